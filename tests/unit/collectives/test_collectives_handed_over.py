"""Ranks that may name no socket: they meet over connections that are handed to them, and the rest is as ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.torch_backend import reach
from glasshouse.collectives.transport import endpoint, mesh
from glasshouse.collectives.transport.dial import HandedOver, handed_over
from glasshouse.collectives.transport.local_link import LocalLink
from glasshouse.errors import Code, CollectiveError
from simulators.engine_ranks import connect, ended
from simulators.near_ranks import descriptors, links_of, summed
from simulators.switchboard import Switchboard


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Switchboard]:
    """A switchboard, in a process that may neither name nor call a socket."""

    def refused(*_: object) -> None:
        raise PermissionError

    class Nameless(socket.socket):
        bind = connect = connect_ex = refused

    monkeypatch.setattr(endpoint.socket, "socket", Nameless)
    board = Switchboard()
    yield board
    board.close()


def lived(board: Switchboard, size: int, store: Any = None, **options: Any) -> list[Any]:
    store = store or dist.HashStore()

    def live(rank: int) -> Any:
        engine = Engine(connect(store, rank, size, dialler=board.dialler(), **options), timeout_s=20)
        try:
            return {type(link) for link in links_of(engine)}, summed(engine)
        finally:
            engine.close()

    return ended(size, live)


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_meet_and_share_memory_without_a_name(board: Switchboard, size: int) -> None:
    for end in lived(board, size):
        assert end.error is None
        assert end.value == ({LocalLink}, size * (size + 1) / 2)


def test_a_rank_that_has_many_to_take_is_called_again(board: Switchboard) -> None:
    board.refused = 3
    assert [end.error for end in lived(board, 3)] == [None] * 3


def test_the_store_holds_the_name_of_a_door_and_no_address(board: Switchboard) -> None:
    store = dist.HashStore()
    assert lived(board, 2, store)[0].error is None
    host, port, name = store.get("glasshouse/0/1").decode().split()
    assert (host, port) == ("handed-over", "1")
    assert name in board.doors


def test_who_comes_through_a_door_and_says_nothing_is_a_stranger(
    board: Switchboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_STRANGER_S", 0.3)
    ends: list[Any] = []
    listen, silent = board.listen, []

    def crowded() -> tuple[socket.socket, str]:
        door, name = listen()
        silent.extend(board.through(board.doors[name]) for _ in range(3))
        return door, name

    monkeypatch.setattr(board, "listen", crowded)
    thread = threading.Thread(target=lambda: ends.extend(lived(board, 2)))
    thread.start()
    thread.join(30)
    assert [end.error for end in ends] == [None] * 2
    for stranger in silent:
        stranger.settimeout(5)
        while stranger.recv(200):
            continue
        stranger.close()


def test_a_switchboard_that_is_gone_does_not_keep_a_rank_busy(board: Switchboard) -> None:
    store, began = dist.HashStore(), time.process_time()
    listen = board.listen

    def gone() -> tuple[socket.socket, str]:
        door, name = listen()
        board.doors.pop(name).close()
        return door, name

    with pytest.raises(CollectiveError, match="rank 1 did not come") as caught:
        connect(store, 0, 2, dialler=HandedOver(gone, board.call), timeout_s=1)
    assert caught.value.code is Code.COLLECTIVE_TIMEOUT
    assert time.process_time() - began < 0.9


def test_what_comes_on_a_door_is_a_connection_or_refused() -> None:
    before = descriptors()
    door, inside = socket.socketpair()
    with door, inside:
        door.sendall(b"c")
        with pytest.raises(ConnectionAbortedError):
            handed_over(inside)
        door.shutdown(socket.SHUT_WR)
        assert handed_over(inside) is None
    assert descriptors() == before


# torch's rendezvous


@pytest.fixture
def nameless() -> Iterator[Any]:
    store = dist.HashStore()
    reach.use_store(lambda: store)
    yield store
    reach.use_store(None)


@pytest.mark.parametrize("url", ["env://", "tcp://192.0.2.1:29500"])
def test_torchs_rendezvous_ends_at_the_ranks_own_store(
    url: str, nameless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert next(dist.rendezvous(url, 0, 1))[0] is nameless


def test_with_a_network_torch_makes_its_own_store() -> None:
    store = next(dist.rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1"))[0]
    assert isinstance(store, dist.TCPStore)
