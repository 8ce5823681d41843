"""Ranks of one machine: what a peer may give, and what somebody can do who gets at memory, connection or bell."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import fcntl
import gc
import mmap
import os
import resource
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.collectives import ring
from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations import plans, point_to_point
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import Algorithm, frame_bytes
from glasshouse.collectives.transport import dial, endpoint, local_link, mesh, send_pool
from glasshouse.collectives.transport.local_link import INLINE, LocalLink, LocalPeer, PoolExchange, unit_of
from glasshouse.collectives.transport.send_pool import PeerPool, SendPool
from glasshouse.errors import Code, CollectiveError
from simulators.engine_ranks import Ended, connect, ended, in_ranks, operate, world
from simulators.near_ranks import ELEMENTS, SUM, descriptors, links_of, near_pair, offer, sent, summed
from tools.forked import ChildDiedError, in_child
from tools.machine import needs_root


@pytest.fixture
def pair() -> Iterator[tuple[LocalLink, LocalLink]]:
    with near_pair() as ends:
        yield ends


def test_memory_that_is_shared_can_be_neither_shrunk_nor_written_by_its_readers() -> None:
    send_pool = SendPool(1)
    there = PeerPool(send_pool.fileno)
    for attempt in (
        lambda: os.ftruncate(send_pool.fileno, 0),
        lambda: mmap.mmap(send_pool.fileno, mmap.PAGESIZE),
        lambda: os.write(send_pool.fileno, b"x"),
    ):
        with pytest.raises(PermissionError):
            attempt()
    send_pool.slots(Lane.COLLECTIVE)[0][:1] = b"y"
    seen = memoryview(bytearray(1))
    there.copy_into(seen, 0)
    assert bytes(seen) == b"y"
    with pytest.raises(TypeError):
        there._map[0] = 1
    for each in (send_pool.shut, there.close) * 2:
        each()


def test_a_forked_child_cannot_write_where_its_parents_cipher_does() -> None:
    def story(engine: Engine) -> int:
        summed(engine)
        send_pool = engine._mesh.send_pool
        assert send_pool is not None

        def write() -> None:
            faulthandler.disable()
            send_pool._map[0] = 1

        try:
            in_child(write)
        except ChildDiedError as died:
            return died.code
        return 0

    assert in_ranks(2, story) == [-signal.SIGSEGV] * 2


def given(seals: int, size: int = mmap.PAGESIZE) -> int:
    fileno = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fileno, size)
    fcntl.fcntl(fileno, fcntl.F_ADD_SEALS, seals)
    return fileno


@pytest.mark.parametrize(
    "make",
    [
        lambda: given(0),
        lambda: given(send_pool._SEALS & ~fcntl.F_SEAL_SHRINK),
        lambda: given(send_pool._SEALS, size=0),
        lambda: given(send_pool._SEALS, size=send_pool.MAX_POOL_BYTES + mmap.PAGESIZE),
        lambda: os.open("/proc/self/exe", os.O_RDONLY),
        lambda: os.eventfd(0),
    ],
)
def test_other_memory_is_not_read(make: Callable[[], int]) -> None:
    fileno = make()
    with pytest.raises((ValueError, OSError)):
        PeerPool(fileno)
    os.close(fileno)


@pytest.mark.parametrize("said", [b"", b"\x00", b"\x01", b"\x02", b"x"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("connected", [False, True])
def test_an_offer_in_another_form_is_refused_and_leaves_nothing_open(connected: bool, said: bytes, count: int) -> None:
    before = descriptors()
    with contextlib.ExitStack() as closed:
        here, there = (closed.enter_context(end) for end in socket.socketpair())
        bell = closed.enter_context(socket.socket(socket.AF_UNIX))
        junk = closed.enter_context(Path("/dev/zero").open("rb"))
        one = closed.enter_context(contextlib.closing(offer(here, None, connected=connected)))
        if said:
            given = [junk.fileno()] * 3 if connected else [bell.fileno(), junk.fileno(), junk.fileno()]
            socket.send_fds(there, [said], given[:count])
        there.shutdown(socket.SHUT_WR)
        if (said, count) == ((b"\x00", 0) if connected else (b"\x01", 1)):
            one.answer().close()
        else:
            with pytest.raises((ValueError, OSError, CollectiveError)):
                one.answer()
    assert descriptors() == before


def test_a_peer_that_gives_more_than_a_rank_does_is_blamed_and_not_the_own_limits() -> None:
    before = descriptors()
    here, there = socket.socketpair()
    with (
        here,
        there,
        socket.socket(socket.AF_UNIX) as bell,
        contextlib.closing(offer(here, None, connected=False)) as one,
    ):
        socket.send_fds(there, [b"\x02"], [bell.fileno()] * 3)
        with pytest.raises(ValueError, match="not what a rank sends"):
            one.answer()
    assert descriptors() == before


def test_a_connection_through_the_network_is_no_acknowledgement_socket() -> None:
    before = descriptors()
    here, there = socket.socketpair()
    with here, there, socket.socket(socket.AF_INET) as other, contextlib.closing(offer(here, None)) as one:
        socket.send_fds(there, [b"\x01"], [other.fileno()])
        with pytest.raises(ValueError, match="not an acknowledgement socket"):
            one.answer()
    assert descriptors() == before


def test_a_peer_that_offers_nothing_is_waited_for_no_longer_than_there_is_time() -> None:
    here, there = socket.socketpair()
    with here, there, contextlib.closing(offer(here, None, within_s=0.05)) as one, pytest.raises(TimeoutError):
        one.answer()


def test_a_process_that_may_open_no_more_files_is_told_so() -> None:
    def story() -> list[str]:
        said = []
        here, there = socket.socketpair()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.closing(offer(here, None, connected=False)) as one:
            pair = socket.socketpair()
            socket.send_fds(there, [b"\x01"], [pair[0].fileno()])
            last = os.open("/dev/null", os.O_RDONLY)
            resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
            for attempt in (one.answer, lambda: offer(here, None, connected=True)):
                with pytest.raises(OSError, match=r"Too many open files|no room") as own:
                    attempt()
                with pytest.raises(CollectiveError) as caught:
                    dial.check_own_limits(own.value)
                said.append(f"{caught.value.code.value} {caught.value.hint}")
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return said

    for line in in_child(story):
        assert line.startswith("collective-aborted raise the limits (ulimit -n")


def test_a_process_that_has_no_file_left_to_map_a_peers_memory_does_not_blame_the_peer() -> None:
    def story() -> str:
        here, there = socket.socketpair()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.closing(offer(here, None, connected=False)) as one:
            pair, theirs = socket.socketpair(), SendPool(1)
            socket.send_fds(there, [b"\x02"], [pair[0].fileno(), theirs.fileno])
            last = os.open("/dev/null", os.O_RDONLY)
            resource.setrlimit(resource.RLIMIT_NOFILE, (last + 3, hard))  # for the two that come, and no third
            with pytest.raises(OSError, match=r"Too many open files|no room") as own:
                one.answer()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with pytest.raises(CollectiveError) as caught:
            dial.check_own_limits(own.value)
        return caught.value.code.value

    assert in_child(story) == Code.COLLECTIVE_ABORTED.value


@pytest.mark.parametrize(("error", "code"), [(TimeoutError, Code.COLLECTIVE_TIMEOUT), (ValueError, Code.RANK_LOST)])
def test_a_meeting_fails_where_a_peer_offers_nothing(
    error: type[Exception], code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = []

    def answer(self: PoolExchange) -> LocalPeer:
        if threading.get_ident() in answered:
            raise error  # the second one; the first is closed
        answered.append(threading.get_ident())
        return real(self)

    real = PoolExchange.answer
    monkeypatch.setattr(PoolExchange, "answer", answer)
    before = descriptors()
    codes = {end.error.code for end in world(3, summed) if isinstance(end.error, CollectiveError)}
    assert answered
    assert code in codes
    assert codes <= {code, Code.RANK_LOST}, "one of the two may have seen the other leave"
    assert descriptors() == before


@pytest.mark.parametrize("deaf", [False, True])
def test_acknowledgements_that_are_not_read_make_no_rank_wait(deaf: bool, pair: tuple[LocalLink, LocalLink]) -> None:
    """The other end may be anybody's, and may have made its sending and ours wait as far as it can."""
    here, there = pair
    bells = here.local_peer.acks, there.local_peer.acks
    for bell in bells:
        os.set_blocking(bell.fileno(), True)
    bells[0].shutdown(socket.SHUT_RDWR) if deaf else fill(bells[1])
    sent(here, local_link.LEAST_PLACED_BYTES)
    assert there.pull(0), "what was sent before still counts"
    if deaf:
        here.local_peer.collect()
        assert here.lends


def fill(bell: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            bell.send(b"\x01" * 4096, socket.MSG_DONTWAIT)


# somebody between the two


@pytest.mark.parametrize(
    "unit",
    [
        unit_of(INLINE, frame_bytes(0) - 1),
        unit_of(INLINE, 1 << 31),
        unit_of(1 << 20, local_link.LEAST_PLACED_BYTES),
        unit_of(0, local_link.LEAST_PLACED_BYTES + 1),
    ],
)
def test_a_unit_that_no_rank_sends_is_tampering(unit: bytes, pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    sent(here, local_link.LEAST_PLACED_BYTES)
    here._socket.send(unit)
    assert there.pull(0)
    there.taken()
    with pytest.raises(CollectiveError) as caught:
        there.pull(0)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


def test_a_frame_on_the_connection_that_says_another_size_than_its_unit_is_tampering(
    pair: tuple[LocalLink, LocalLink],
) -> None:
    here, there = pair
    here._socket.send(unit_of(INLINE, 200) + bytes(200))
    with pytest.raises(CollectiveError) as caught:
        there.pull(0)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


def test_memory_is_used_again_when_it_was_copied_and_not_before(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    size = local_link.LEAST_PLACED_BYTES
    frames = [sent(here, size, 9) for _ in range(send_pool.LINK_SLOTS[Lane.COLLECTIVE])]
    assert here.out_buffer(size) is None
    assert here.short
    assert there.pull(0)
    frames[0][:] = bytes(size)
    assert bytes(there.frame[16:]) == bytes([9]) * (size - 16), "copied before it was given back"
    there.taken()
    assert here.out_buffer(size) is not None
    assert here.out_buffer(size) is None


@pytest.mark.parametrize("said", [b"\x01\x01", b"\x02", b"\x00", b"\xff"])
def test_an_acknowledgement_of_what_was_not_sent_is_tampering(said: bytes, pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    sent(here, local_link.LEAST_PLACED_BYTES)
    there.local_peer.acks.send(said)
    with pytest.raises(CollectiveError) as caught:
        here.local_peer.collect()
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_that_dies_before_it_has_copied_is_missed_at_once(shared: bool) -> None:
    """Its peer sends, and waits for nothing from it but the memory."""
    size = 3 if shared else 2

    def story(engine: Engine) -> bool:
        if engine.rank == 1:
            time.sleep(0.3)  # so that everything that there is memory for has been sent
            for link in links_of(engine):
                link._socket.close()
                link.local_peer.close()
            engine._failed = CollectiveError(Code.COLLECTIVE_ABORTED, "dead")
            return True
        tensor = torch.ones(20 * ELEMENTS)
        operation = plans.broadcast([tensor], 0) if shared else point_to_point.send([tensor], 1)
        with pytest.raises(CollectiveError) as caught:
            operate(engine, operation)
        assert caught.value.code is Code.RANK_LOST
        return True

    assert all(in_ranks(size, story, timeout_s=600)), "missed long before the time is up"


def test_what_was_sent_from_is_let_go_of_though_nobody_copied_it() -> None:
    def story(engine: Engine) -> bool:
        tensor = torch.ones(ELEMENTS)
        operate(engine, plans.all_reduce([tensor], SUM))
        gone = weakref.ref(tensor)
        del tensor
        gc.collect()
        return gone() is None

    assert in_ranks(3, story) == [True] * 3


Write = Callable[[memoryview], None]


def flip(frame: memoryview) -> None:
    frame[100] ^= 1


def flip_header(frame: memoryview) -> None:
    frame[41] ^= 1


def flip_counter(frame: memoryview) -> None:
    frame[23] ^= 1


def shorten(frame: memoryview) -> None:
    frame[12:16] = (int.from_bytes(frame[12:16], "big") - 16).to_bytes(4, "big")


def blank(frame: memoryview) -> None:
    frame[:] = bytes(len(frame))


@pytest.mark.parametrize("write", [flip, flip_header, flip_counter, shorten, blank])
@pytest.mark.parametrize("algorithm", [Algorithm.DIRECT, Algorithm.RING])
def test_who_writes_to_the_memory_ends_the_job_and_nothing_is_left(algorithm: Algorithm, write: Write) -> None:
    ends = attacked(lambda frames, frame: write(frame) if len(frames) == 2 else None, algorithm)
    for end in ends:
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.COLLECTIVE_TAMPERED


def test_who_puts_an_older_frame_in_the_place_of_a_new_one_is_found() -> None:
    def put(frames: list[bytes], frame: memoryview) -> None:
        if len(frames) == 2:
            frame[:] = frames[0]

    for end in attacked(put, Algorithm.DIRECT):
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.COLLECTIVE_TAMPERED


def attacked(change: Callable[[list[bytes], memoryview], None], algorithm: Algorithm) -> list[Ended]:
    """Let `change` at each frame that rank 0 reads out of rank 1's memory; return how both ended, outputs zeroed."""
    frames: list[bytes] = []

    class Written(PeerPool):
        __slots__ = ()

        def copy_into(self, out: memoryview, place: int) -> None:
            super().copy_into(out, place)
            frames.append(bytes(out))
            change(frames, out)

    tensors = [torch.full((ELEMENTS,), 1.0) for _ in range(2)]

    def story(engine: Engine) -> None:
        if engine.rank == 0:
            for link in links_of(engine):
                link.local_peer.window.__class__ = Written
        operate(engine, ring.all_reduce([tensors[engine.rank]], SUM, algorithm))

    ends = world(2, story)
    assert len(frames) >= 2
    assert not torch.cat(tensors).any()
    return ends


def test_a_stranger_at_the_name_of_a_rank_is_told_from_one() -> None:
    name = "0" * 32
    store = dist.HashStore()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(dial.local_address(name))
        listener.listen()
        store.set("glasshouse/0/0", f"127.0.0.1 9 {name}")

        def story(rank: int) -> None:
            if rank:
                connect(store, 1, 2)
                return
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(128))
                connection.recv(1024)

        error = ended(2, story)[1].error
    assert isinstance(error, CollectiveError)
    assert error.code is Code.COLLECTIVE_TAMPERED


def test_a_name_at_which_nobody_listens_or_takes_nobody_in_leads_to_the_network() -> None:
    """What an earlier run left in the store; a listener whose queue is full."""
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(dial.local_address("1" * 32))
        listener.listen(0)
        while (connection := dial.dial_local("1" * 32)) is not None:
            waiting.enter_context(connection)
        for name in ("0" * 32, "1" * 32):
            store = Renaming(name)
            ends = ended(2, lambda rank, store=store: kinds(connect(store, rank, 2)))  # type: ignore[misc]
            assert [end.value for end in ends] == [{"PeerLink"}] * 2


class Renaming(dist.HashStore):
    """A store that says another name for every rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def get(self, key: str) -> bytes:
        host, port, _ = super().get(key).decode().split()
        return f"{host} {port} {self._name}".encode()


def kinds(one: mesh.Mesh) -> set[str]:
    links = [*one.collective, *one.p2p]
    for link in links:
        link.close()
    return {type(link).__name__ for link in links}


def test_a_process_of_another_user_is_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (endpoint, dial):
        monkeypatch.setattr(module, "of_this_user", lambda _connection: False)
    assert in_ranks(2, lambda engine: {type(link).__name__ for link in links_of(engine)}) == [{"PeerLink"}] * 2


@needs_root
def test_who_is_at_the_other_end_is_asked_of_the_kernel() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(dial.local_address("2" * 32))
        listener.listen()

        def other() -> None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(dial.local_address("2" * 32))

        for user, ours in ((None, True), (65534, False)):
            in_child(other, user=user)
            with listener.accept()[0] as accepted:
                assert dial.of_this_user(accepted) is ours


def test_where_the_system_has_no_such_sockets_ranks_meet_through_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without(family: int = -1, *more: Any, **given: Any) -> socket.socket:
        if family == socket.AF_UNIX:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *more, **given)

    monkeypatch.setattr(socket, "socket", without)
    assert in_ranks(2, lambda engine: {type(link).__name__ for link in links_of(engine)}) == [{"PeerLink"}] * 2
