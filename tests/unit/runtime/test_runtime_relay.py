"""The relay: connects machines, reads nothing, keeps nothing of the agent's, and does not outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.gate import relay
from glasshouse.runtime.gate.relay import CALL, CALLED, FAILED, MESSAGE, Relay
from glasshouse.runtime.kernel import REAL
from tools.forked import in_child
from tools.machine import needs_filters
from tools.ports import free_port
from tools.sandboxed import is_gone
from tools.waiting import wait_for

pytestmark = needs_filters


def heard(end: socket.socket) -> tuple[tuple[int, int, int], socket.socket | None]:
    end.settimeout(15)
    data, descriptors, _, _ = socket.recv_fds(end, 64, 4)
    message = MESSAGE.unpack(data)
    return message, socket.socket(fileno=descriptors[0]) if descriptors else None


def word(end: socket.socket) -> tuple[int, int, int]:
    """Return what is said, and let go of what came with it."""
    message, connection = heard(end)
    if connection is not None:
        connection.close()
    return message


@pytest.fixture
def started() -> Iterator[Callable[..., Relay]]:
    with contextlib.ExitStack() as relays:

        def start(*peers: str) -> Relay:
            made = relay.start(peers)
            relays.callback(made.stop)
            return made

        yield start


@pytest.fixture
def pair(started: Callable[..., Relay]) -> tuple[Relay, Relay]:
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    first, second = started(*peers), started(*peers)
    first.listen(0)
    second.listen(1)
    return first, second


def test_a_call_arrives_and_both_workers_hold_the_connection(pair: tuple[Relay, Relay]) -> None:
    first, second = pair
    first.worker_end.send(MESSAGE.pack(CALL, 1, 7))
    said, ours = heard(first.worker_end)
    called, theirs = heard(second.worker_end)
    assert (said, called) == ((CALL, 1, 7), (CALLED, 0, 0))
    assert ours is not None
    assert theirs is not None
    with ours, theirs:
        ours.setblocking(True)
        theirs.setblocking(True)
        ours.sendall(b"from the first")
        assert theirs.recv(64) == b"from the first"
        theirs.sendall(b"and back")
        assert ours.recv(64) == b"and back"
    # The relay kept no copy: the end of one is seen at the other.
    first.worker_end.send(MESSAGE.pack(CALL, 1, 8))
    (_, one), (_, other) = heard(first.worker_end), heard(second.worker_end)
    assert one is not None
    assert other is not None
    one.close()
    other.settimeout(5)
    assert other.recv(1) == b""
    other.close()


def test_a_machine_that_is_not_there_is_said_to_be_so(started: Callable[..., Relay]) -> None:
    alone = started(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", "no.such.host.invalid:9")
    alone.listen(0)
    for machine in (1, 2, 3, 255):
        alone.worker_end.send(MESSAGE.pack(CALL, machine, machine))
        assert heard(alone.worker_end) == ((FAILED, machine, machine), None)


@pytest.mark.parametrize("words", [b"\0", b"\x01\0", b"\x09" + bytes(5), bytes(60)])
def test_words_that_are_none_are_passed_over(pair: tuple[Relay, Relay], words: bytes) -> None:
    first, second = pair
    first.worker_end.send(words)
    first.worker_end.send(MESSAGE.pack(CALL, 1, 1))
    assert word(first.worker_end) == (CALL, 1, 1)
    assert word(second.worker_end) == (CALLED, 0, 0)


def test_an_address_that_is_taken_is_a_platform_error(started: Callable[..., Relay]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = started(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(PlatformError) as refusal:
            made.listen(0)
    assert refusal.value.code is Code.PLATFORM


def test_an_address_that_only_others_know_is_listened_at_all_the_same(started: Callable[..., Relay]) -> None:
    """As behind address translation: 192.0.2.1 is nobody's, and not this machine's either."""
    port = free_port()
    made = started(f"192.0.2.1:{port}")
    made.listen(0)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    assert word(made.worker_end) == (CALLED, 0, 0)


def test_ipv6_is_written_in_brackets(started: Callable[..., Relay]) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
            port = listener.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    made = started(f"[::1]:{port}")
    made.listen(0)
    socket.create_connection(("::1", port), timeout=5).close()
    assert word(made.worker_end) == (CALLED, 0, 0)


def test_a_flood_of_strangers_that_no_worker_takes_does_not_stop_it(pair: tuple[Relay, Relay]) -> None:
    first, second = pair
    first.worker_end.send(MESSAGE.pack(CALL, 1, 1))
    _, one = heard(first.worker_end)
    assert one is not None
    port = one.getpeername()[1]
    one.close()
    for _ in range(600):  # more than its socket to the worker holds; nobody reads there
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    assert not is_gone(second.pid)
    second.worker_end.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while True:
            _, descriptors, _, _ = socket.recv_fds(second.worker_end, 64, 4)
            for descriptor in descriptors:
                os.close(descriptor)
    first.worker_end.send(MESSAGE.pack(CALL, 1, 2))
    assert word(first.worker_end) == (CALL, 1, 2)


def test_it_holds_nothing_of_the_agents_and_can_start_nothing(pair: tuple[Relay, Relay]) -> None:
    first, _ = pair
    names = sorted(str(path.readlink()) for path in Path(f"/proc/{first.pid}/fd").iterdir())
    kinds = [name for name in names if not name.startswith(("socket:", "anon_inode:"))]
    assert kinds == ["/dev/null"] * 3
    assert len(names) == 3 + 3  # and the two sockets and the listener
    status = REAL.status(first.pid)
    assert (status["Seccomp"], int(status["CapEff"], 16)) == ("2", 0)


def test_it_does_not_outlive_the_agent() -> None:
    def agent() -> int:
        made = relay.start((f"127.0.0.1:{free_port()}",))
        made.listen(0)
        return made.pid

    pid = in_child(agent)
    wait_for(lambda: is_gone(pid))


def test_it_ends_when_told_twice_even(pair: tuple[Relay, Relay]) -> None:
    first, _ = pair
    pid = first.pid
    os.kill(pid, signal.SIGTERM)  # what a terminal sends to the group is not for it
    first.stop()
    first.stop()
    assert is_gone(pid)
