"""A machine among the others of its group: who is reached, who is kept waiting, and who is told of a loss."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator

import pytest

from glasshouse.workloads.distributed import machine_group, machine_streams
from glasshouse.workloads.distributed.machine_group import MachineGroup
from tools.fake_agent import wait_for
from tools.sockets import connection

SECRET = secrets.token_bytes(32)
ARRIVAL = machine_group._MESSAGE.pack(machine_group._CALLED, 0, 0)


class Relays:
    """The relays of two machines, played: connections are made at once, or not at all."""

    def __init__(self) -> None:
        self.ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        self.there = True
        self.lost: list[list[int]] = []
        for index in range(2):
            threading.Thread(target=self._serve, args=(index,), daemon=True).start()

    def _serve(self, index: int) -> None:
        mine = self.ends[index][1]
        with contextlib.suppress(OSError):
            while data := mine.recv(64):
                if not self.there:
                    mine.send(bytes([machine_group._FAILED]) + data[1:])
                    continue
                one, other = connection()
                with one, other:
                    socket.send_fds(mine, [data], [one.fileno()])
                    socket.send_fds(self.ends[data[1]][1], [ARRIVAL], [other.fileno()])

    def close(self) -> None:
        for pair in self.ends:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def lines(machine: MachineGroup) -> int:
    return len(machine._lines)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MachineGroup, MachineGroup, Relays]]:
    # Both machines share this one's loopback here, so the second cannot stand in for the store at the same port.
    relays = Relays()
    relays.lost = lost = [[], []]
    first, second = (MachineGroup(relays.ends[m][0], SECRET, machine=m, machines=2) for m in range(2))
    first.start(lost[0].append)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        way, store = (free.getsockname()[1] for free in (one, other))
    # On one machine the two have to differ.
    monkeypatch.setattr(machine_group, "STORE_PORT", way)
    second.start(lost[1].append)
    monkeypatch.setattr(machine_group, "STORE_PORT", store)
    wait_for(lambda: lines(first) == lines(second) == 1)
    yield first, second, relays
    for one in (*first._lines, *second._lines, second._store):
        if one is not None:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
    relays.close()


def test_a_rank_reaches_a_listener_on_another_machines_loopback(
    group: tuple[MachineGroup, MachineGroup, Relays],
) -> None:
    first, second, _ = group
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for here, there in ((second, 0), (first, 1)):
            with here.dial(there, listener.getsockname()[1]) as rank, listener.accept()[0] as other:
                rank.sendall(b"question")
                assert other.recv(64) == b"question"
                other.sendall(b"answer")
                assert rank.recv(64) == b"answer"


def test_who_is_not_there_or_is_no_other_machine_is_an_os_error(
    group: tuple[MachineGroup, MachineGroup, Relays],
) -> None:
    first, _, relays = group
    for machine in (0, 2, -1):
        with pytest.raises(OSError, match="no other machine"):
            first.dial(machine, 1)
    relays.there = False
    with pytest.raises(ConnectionRefusedError):
        first.dial(1, 1)


def test_the_store_of_the_first_machine_is_found_on_the_second(
    group: tuple[MachineGroup, MachineGroup, Relays],
) -> None:
    _, second, _ = group
    assert second.machine == 1
    assert second._store is not None
    with socket.create_server(("127.0.0.1", machine_group.STORE_PORT)) as store:
        way = second._store.getsockname()
        with socket.create_connection(way, timeout=10) as rank, store.accept()[0] as other:
            rank.sendall(b"set")
            assert other.recv(16) == b"set"


def test_strangers_wait_in_small_numbers_and_one_of_the_group_still_gets_in(
    group: tuple[MachineGroup, MachineGroup, Relays], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, relays = group
    monkeypatch.setattr(machine_streams, "_GREETING_S", 2.0)
    strangers = []
    for _ in range(100):
        one, other = connection()
        socket.send_fds(relays.ends[1][1], [ARRIVAL], [other.fileno()])
        other.close()
        strangers.append(one)
    waiting = [thread for thread in threading.enumerate() if thread.name == "glasshouse-called"]
    assert len(waiting) <= machine_group._STRANGERS + 1  # and the one that holds the line to the first machine
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        reached: list[socket.socket] = []

        def reach() -> bool:
            with contextlib.suppress(OSError):
                reached.append(first.dial(1, listener.getsockname()[1]))
            return bool(reached)

        wait_for(reach)
        reached[0].close()
        listener.accept()[0].close()
    for one in strangers:
        one.close()


def test_a_machine_that_finished_is_not_lost(group: tuple[MachineGroup, MachineGroup, Relays]) -> None:
    first, second, relays = group
    second.finish()
    first.finish()
    assert relays.lost == [[], []]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_worker_that_is_gone_before_it_had_finished_is_lost_to_the_other(
    group: tuple[MachineGroup, MachineGroup, Relays], broken: int
) -> None:
    line = group[broken]._lines[0]  # type: ignore[index]
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    line.shutdown(socket.SHUT_RD)
    line.close()
    wait_for(lambda: group[2].lost[1 - broken] == [broken])
