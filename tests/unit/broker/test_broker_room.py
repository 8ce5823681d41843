"""Who gives way when there is no room: who takes most of it, and nobody whose request has arrived."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.applications import Starlette

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.client.owner_client import request
from glasshouse.broker.http import connections as room_module
from glasshouse.broker.http.connections import MOST_CONNECTIONS, Room, Troubles, room_for
from glasshouse.broker.http.listeners import Server


@dataclass(eq=False)
class Line:
    """A connection that remembers what became of it."""

    room: Room
    address: str = "192.0.2.1"
    ended: bool = field(default=False)

    def enter(self) -> bool:
        return self.room.enter(self, self.address)

    def cut(self) -> None:
        self.ended = True


def lines(room: Room, number: int, *, address: str = "192.0.2.1") -> list[Line]:
    found = [Line(room, address) for _ in range(number)]
    assert all(one.enter() for one in found)
    return found


def ended(found: list[Line]) -> list[int]:
    return [number for number, one in enumerate(found) if one.ended]


def test_the_oldest_that_idles_gives_way_and_no_request_does() -> None:
    room = Room(4, of_address=100)
    found = lines(room, 4)
    room.whole(found[0])
    more = lines(room, 2)
    assert ended(found) == [1, 2]
    assert ended(more) == []


def test_where_nothing_idles_the_newcomer_is_turned_away() -> None:
    room = Room(2)
    found = lines(room, 2)
    for one in found:
        room.whole(one)
    assert not Line(room).enter()
    assert ended(found) == []
    room.leave(found[0])
    assert Line(room).enter()


def test_an_address_with_too_many_makes_room_among_its_own() -> None:
    room = Room(100, of_address=3)
    others = lines(room, 3, address="192.0.2.2")
    found = lines(room, 5)
    assert ended(found) == [0, 1]
    assert ended(others) == []
    for one in found[2:]:
        room.whole(one)
    assert not Line(room).enter(), "all of its own are requests"
    assert Line(room, "192.0.2.3").enter()


def test_an_address_at_its_limit_in_a_full_room_takes_one_place_and_not_two() -> None:
    room = Room(4, of_address=2)
    others = lines(room, 2, address="192.0.2.2")
    found = lines(room, 3)
    assert ended(others) == []
    assert ended(found) == [0]


def test_those_on_a_unix_socket_have_no_address_to_be_counted_by() -> None:
    assert ended(lines(Room(10, of_address=2), 10, address="")) == []


def test_unfinished_requests_give_way_when_they_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "MOST_BYTES", 1000)
    room = Room(100)
    found = lines(room, 4)
    room.received(found[0], 900)
    room.whole(found[0])
    for one in found[1:]:
        room.received(one, 400)
    assert ended(found) == [1], "the first of three; what is whole is not counted"
    room.received(found[3], 10_000)
    assert ended(found) == [1, 3], "and one that takes all of it for itself"
    assert room._bytes == 400


def test_who_takes_most_of_the_memory_gives_way_and_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "MOST_BYTES", 1000)
    room = Room(100)
    [honest] = lines(room, 1)
    room.received(honest, 300)
    greedy = lines(room, 60, address="192.0.2.2")
    beside = lines(room, 1, address="192.0.2.2")
    room.received(beside[0], 10)
    for one in greedy:
        room.received(one, 260)
    assert not honest.ended, "although it came first and waits longest"
    assert ended(beside) == [], "a short request from behind the same address is not cut either"
    assert len(ended(greedy)) == 58
    room.received(honest, 200)
    room.whole(honest)
    assert not honest.ended


def test_one_address_cuts_no_others_request_in_a_room_that_it_fills() -> None:
    """Where few open files are allowed, an address may have as many connections as there is room for."""
    room = Room(8, of_address=8)
    others = [*lines(room, 1, address="192.0.2.2"), *lines(room, 1, address="192.0.2.3")]
    found = lines(room, 20)
    assert ended(others) == []
    assert ended(found) == list(range(14))


def test_many_addresses_with_one_each_do_not_cut_an_address_with_a_few() -> None:
    """Several machines behind one NAT, whose requests are under way."""
    room = Room(MOST_CONNECTIONS)
    strangers = [Line(room, f"198.51.{number // 250}.{number % 250}") for number in range(2 * MOST_CONNECTIONS)]
    assert all(one.enter() for one in strangers[: MOST_CONNECTIONS - 4])
    honest = lines(room, 8)
    assert all(one.enter() for one in strangers[MOST_CONNECTIONS - 4 : MOST_CONNECTIONS + 200])
    assert ended(honest) == []


def test_many_addresses_with_some_bytes_do_not_cut_one_long_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "MOST_BYTES", 64_000)
    room = Room(MOST_CONNECTIONS)
    strangers = [Line(room, f"198.51.{number // 250}.{number % 250}") for number in range(500)]
    for one in strangers:
        assert one.enter()
        room.received(one, 200)
    [honest] = lines(room, 1)
    for _ in range(10):
        room.received(honest, 100)
    assert not honest.ended
    assert ended(strangers)[0] == 0
    room.received(honest, 500)
    assert honest.ended, "longer than any message, from an address that keeps more than its share"


def test_what_left_is_forgotten() -> None:
    room = Room(2, of_address=2)
    for _ in range(3):
        for one in lines(room, 2):
            room.leave(one)
            room.leave(one)
    assert room._addresses == room._open == {}


def test_a_broker_stays_below_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, expected in ((256, 64), (1024, 448), (1 << 20, MOST_CONNECTIONS), (resource.RLIM_INFINITY, 512), (32, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _what, soft=soft: (soft, soft))
        assert room_for(2) == expected


def test_a_broker_that_is_no_gate_leaves_nothing_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (1024, 1024))
    protocols = [Server(Starlette(), listeners=listeners).config.http for listeners in (2, 3)]
    assert [protocol.room._most for protocol in protocols] == [448, 298]  # type: ignore[union-attr]


def test_what_has_its_answer_gives_way_again() -> None:
    room = Room(2)
    found = lines(room, 2)
    for one in found:
        room.whole(one)
    assert not Line(room).enter()
    room.answered(found[1])
    assert Line(room).enter()
    assert ended(found) == [1]


def test_a_burst_of_connections_does_not_use_up_the_descriptors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They were accepted a thousand at a time, and where that failed, nobody was for a second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        broker = BrokerProcess(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    with broker, ExitStack() as stack:
        # Held up, so that all of them wait at once.
        os.kill(broker.pid, signal.SIGSTOP)
        for number in range(600):
            stranger = stack.enter_context(socket.socket())
            stranger.bind((f"127.0.1.{1 + number % 100}", 0))
            stranger.connect((host, int(port)))
        os.kill(broker.pid, signal.SIGCONT)
        assert request(broker.runtime_url, "POST", "/v1/heads", b"{}").status == 400
    assert "could not be served" not in capfd.readouterr().err


def test_what_cannot_be_accepted_is_said_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """The framework says it with a traceback, a hundred times a second, as long as it lasts."""
    now = [0.0]
    troubles = Troubles(lambda: now[0])
    full = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "Too many files")}
    for _ in range(1000):
        troubles(None, full)
    now[0] = 61.0
    troubles(None, {"message": "s3cr3t", "exception": ValueError("s3cr3t")})
    assert capsys.readouterr().err == (
        "glasshouse broker: a connection could not be served: Too many files\n"
        "glasshouse broker: a connection could not be served: ValueError (999 more since the last such line)\n"
    )
