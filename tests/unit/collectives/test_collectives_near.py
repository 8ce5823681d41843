"""Ranks of one machine: frames through memory that the sender shares, and what there is where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations import communicator, plans, point_to_point
from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import Algorithm, ReductionCode
from glasshouse.collectives.transport import endpoint, local_link, mesh, send_pool
from glasshouse.collectives.transport.local_link import LocalLink
from simulators.engine_ranks import connect, ended, in_ranks, operate
from simulators.near_ranks import ELEMENTS, FAR, descriptors, links_of, summed


def test_large_frames_go_by_their_place_and_small_ones_on_the_connection() -> None:
    carried: list[int] = []

    class Counting(LocalLink):
        def push(self) -> bool:
            carried.append(sum(map(len, self._pending)))
            return super().push()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mesh, "LocalLink", Counting)
        assert in_ranks(2, summed) == [3.0, 3.0]
    assert max(carried) < local_link.LEAST_PLACED_BYTES
    assert carried.count(local_link.UNIT_BYTES) > 8


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING, Algorithm.SERIAL])
@pytest.mark.parametrize("size", [2, 5])
def test_every_algorithm_comes_to_its_sum_with_one_slot_to_send_from(
    algorithm: Algorithm, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_pool, "LINK_SLOTS", {Lane.COLLECTIVE: 1, Lane.P2P: 1})
    for module in (send_pool, communicator):
        monkeypatch.setattr(module, "SHARED_FRAMES", 1)
    for chunk in (64 << 10, 2 << 20):  # the larger ones find no slot that is large enough
        expected = size * (size + 1) / 2
        assert in_ranks(size, lambda engine: summed(engine, algorithm), chunk_bytes=chunk) == [expected] * size


def test_messages_longer_than_all_slots_arrive_in_order() -> None:
    def story(engine: Engine) -> list[float]:
        tensors = [torch.full((ELEMENTS,), float(number * (1 - engine.rank))) for number in range(3)]
        way = point_to_point.receive if engine.rank else point_to_point.send
        done = [engine.submit(way([tensor], 1 - engine.rank), background=True) for tensor in tensors]
        for each in done:
            each.wait()
        return [float(tensor.min()) for tensor in tensors]

    assert in_ranks(2, story) == [[0.0, 1.0, 2.0]] * 2


def test_ranks_near_and_far_are_one_group() -> None:
    store = dist.HashStore()

    def live(rank: int) -> Any:
        engine = Engine(connect(store, rank, 4, dialler=FAR if rank == 2 else None), timeout_s=20)
        try:
            kinds = {link.peer: isinstance(link, LocalLink) for link in links_of(engine)}
            return kinds, summed(engine)
        finally:
            engine.close()

    ends = ended(4, live)
    for rank, end in enumerate(ends):
        assert end.error is None
        assert end.value == ({peer: 2 not in (peer, rank) for peer in range(4) if peer != rank}, 10.0)


def test_where_nothing_can_be_shared_frames_go_on_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_link, "send_pool_for", lambda _peers: None)
    assert in_ranks(3, summed) == [6.0] * 3


def test_one_end_may_have_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = [None, send_pool.send_pool_for(1)]
    monkeypatch.setattr(local_link, "send_pool_for", lambda _peers: arenas.pop())
    assert in_ranks(2, summed) == [3.0] * 2
    assert not arenas


def test_a_system_without_such_memory_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_pool, "_SEALS", 1 << 30)
    before = descriptors()
    assert send_pool.send_pool_for(1) is None
    assert descriptors() == before


def test_where_no_name_is_allowed_ranks_meet_through_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "local_address", lambda name: "/proc/no-such-place/" + name)
    kinds = in_ranks(2, lambda engine: {type(link).__name__ for link in links_of(engine)})
    assert kinds == [{"PeerLink"}] * 2


def test_nothing_stays_open_and_nothing_is_closed_twice() -> None:
    before = descriptors()
    engines = in_ranks(3, lambda engine: engine)  # kept: each still has the memory that others may read
    for engine in engines:
        for link in links_of(engine):
            assert link.local_peer.acks.fileno() == -1
            link.abandon()
    assert descriptors() == before + 3
    del engines, engine, link
    assert descriptors() == before


def test_the_memory_holds_no_plaintext() -> None:
    marked = b"PLAIN TEXT BLOCK"

    def story(engine: Engine) -> bytes:
        tensor = torch.frombuffer(bytearray(marked * 100_000), dtype=torch.uint8)
        operate(engine, plans.all_reduce([tensor], Reduction(kind=ReductionCode.MAX)))
        send_pool = engine._mesh.send_pool
        assert send_pool is not None
        return bytes(send_pool._map)

    for memory in in_ranks(2, story):
        assert len(memory) - memory.count(0) > 1_000_000, "frames lay there"
        assert marked not in memory
