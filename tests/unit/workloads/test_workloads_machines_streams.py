"""A stream between two machines: only for those who know the secret, sealed, and a cut is never its end."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from glasshouse.wire.crypto import TAG_BYTES
from glasshouse.workloads.distributed import machine_streams
from glasshouse.workloads.distributed.machine_streams import Stream, answer, call
from tools.sockets import connection
from tools.waiting import wait_for

SECRET = secrets.token_bytes(32)
CANARY = b"a gradient in the clear, which nobody on the way may see"
_HELLO_BYTES, _ANSWER_BYTES, _CONFIRM_BYTES = 44 + 32, 64, 32


class Wire:
    """The network between two machines: passes on what it is told to, and keeps it."""

    def __init__(self) -> None:
        self.first, self._left = connection()
        self._right, self.second = connection()
        self.seen = {"out": bytearray(), "back": bytearray()}
        self.change: Callable[[str, bytes], bytes | None] = lambda _direction, data: data
        for direction, source, target in (("out", self._left, self._right), ("back", self._right, self._left)):
            threading.Thread(target=self._pass, args=(direction, source, target), daemon=True).start()

    def _pass(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.seen[direction] += data
                changed = self.change(direction, data)
                if changed is None:
                    break
                target.sendall(changed)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in (self.first, self.second, self._left, self._right):
            one.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture
def inside() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    opened: list[socket.socket] = []

    def make() -> tuple[socket.socket, socket.socket]:
        opened.extend(pair := connection())
        return pair

    yield make
    for one in opened:
        one.close()


def met(wire: Wire, *, secret: bytes = SECRET, called: int = 1) -> tuple[Stream | Exception, Stream | Exception]:
    """Let machine 0 call machine 1; return what each side came to."""
    results: dict[str, Stream | Exception] = {}

    def side(name: str, action: Callable[[], Stream], end: socket.socket) -> None:
        try:
            results[name] = action()
        except (OSError, EOFError) as error:
            results[name] = error
            end.close()

    threads = [
        threading.Thread(
            target=side,
            args=("caller", lambda: call(wire.first, SECRET, own=0, machine=called, port=4321), wire.first),
        ),
        threading.Thread(
            target=side, args=("called", lambda: answer(wire.second, secret, own=1, machines=2), wire.second)
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results["caller"], results["called"]


Ends = tuple[socket.socket, socket.socket]


def joined(wire: Wire, inside: Callable[[], Ends]) -> Ends:
    """Return the two ends that ranks on both machines hold of one stream."""
    caller, called = met(wire)
    assert isinstance(caller, Stream)
    assert isinstance(called, Stream)
    assert (caller.port, called.port) == (4321, 4321)
    (rank, caller_end), (other, called_end) = inside(), inside()
    caller_end.settimeout(None)
    called_end.settimeout(None)
    caller.join(caller_end)
    called.join(called_end)
    return rank, other


def everything(end: socket.socket) -> tuple[bytes, bool]:
    """Return what comes, and whether it ended in order."""
    received = bytearray()
    try:
        while data := end.recv(1 << 20):
            received += data
    except ConnectionResetError:
        return bytes(received), False
    return bytes(received), True


def test_both_directions_carry_what_was_said_whole_and_end_one_by_one(wire: Wire, inside: Callable[[], Ends]) -> None:
    rank, other = joined(wire, inside)
    data = CANARY * 40_000  # more than a piece, and than the sockets hold
    sender = threading.Thread(target=lambda: (rank.sendall(data), rank.shutdown(socket.SHUT_WR)))
    sender.start()
    assert everything(other) == (data, True)
    sender.join()
    other.sendall(b"still here")
    other.shutdown(socket.SHUT_WR)
    assert everything(rank) == (b"still here", True)


def test_what_ranks_say_in_the_clear_is_not_to_be_seen_between_the_machines(
    wire: Wire, inside: Callable[[], Ends]
) -> None:
    rank, other = joined(wire, inside)
    rank.sendall(CANARY * 100)
    assert other.recv(len(CANARY)) == CANARY
    other.sendall(CANARY)
    assert rank.recv(len(CANARY)) == CANARY
    for seen in wire.seen.values():
        assert len(seen) > len(CANARY)
        assert CANARY not in seen
        assert SECRET not in seen


def test_two_streams_that_say_the_same_look_different(inside: Callable[[], Ends]) -> None:
    seen = []
    for _ in range(2):
        wire = Wire()
        rank, other = joined(wire, inside)
        rank.sendall(CANARY)
        assert other.recv(len(CANARY)) == CANARY
        seen.append(bytes(wire.seen["out"][_HELLO_BYTES + _CONFIRM_BYTES :]))
        wire.close()
    assert len(seen[0]) == len(seen[1])
    assert seen[0] != seen[1]


# who gets in


def test_who_does_not_know_the_secret_gets_no_further(wire: Wire) -> None:
    caller, called = met(wire, secret=secrets.token_bytes(32))
    assert isinstance(caller, (OSError, EOFError))
    assert isinstance(called, ConnectionAbortedError)
    assert not wire.seen["back"]


def test_a_call_for_another_machine_that_was_led_here_is_refused(wire: Wire) -> None:
    caller, called = met(wire, called=7)
    assert isinstance(called, ConnectionAbortedError)
    assert isinstance(caller, (OSError, EOFError))


@pytest.mark.parametrize("where", ["out", "back"])
@pytest.mark.parametrize("at", [0, 8, 9, 10, 11, 30, -1])
def test_a_greeting_that_was_changed_on_the_way_makes_no_stream(wire: Wire, where: str, at: int) -> None:
    def flip(direction: str, data: bytes) -> bytes:
        changed = bytearray(data)
        if direction == where:
            changed[at] ^= 1
        return bytes(changed)

    wire.change = flip
    caller, called = met(wire)
    assert not isinstance(called, Stream)
    assert where == "out" or not isinstance(caller, Stream)


def test_a_call_that_is_played_again_is_not_answered_to_the_end(inside: Callable[[], Ends]) -> None:
    """Recorded whole, confirmation and first piece included: the answer's nonce is another."""
    first = Wire()
    rank, other = joined(first, inside)
    rank.sendall(CANARY)
    assert other.recv(len(CANARY)) == CANARY
    recording = bytes(first.seen["out"])
    first.close()
    attacker, here = connection()
    attacker.sendall(recording)
    with attacker, here, pytest.raises(ConnectionAbortedError):
        answer(here, SECRET, own=1, machines=2)


def test_what_a_machine_said_is_not_taken_back_by_itself(inside: Callable[[], Ends]) -> None:
    """The answering side's own words, sent back to it as if a caller had said them."""
    one, other = connection()
    mirror = threading.Thread(target=lambda: one.sendall(one.recv(1 << 16)))
    with one, other:
        mirror.start()
        with pytest.raises((OSError, EOFError)):
            call(other, SECRET, own=1, machine=0, port=1)
        mirror.join()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"GHSTREAM" + bytes(68)])
def test_a_stranger_learns_nothing(said: bytes) -> None:
    one, other = connection()
    with one, other:
        one.sendall(said)
        one.shutdown(socket.SHUT_WR)
        with pytest.raises((OSError, EOFError)):
            answer(other, SECRET, own=1, machines=2)
        other.close()
        assert everything(one)[0] == b""


def test_a_caller_that_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_streams, "_GREETING_S", 0.05)
    one, other = connection()
    with one, other, pytest.raises(TimeoutError):
        answer(other, SECRET, own=1, machines=2)


@pytest.mark.parametrize("side", ["caller", "called"])
def test_a_greeting_that_trickles_in_is_given_up_in_time(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte now and then: what counts is the whole, and not how long each takes."""
    monkeypatch.setattr(machine_streams, "_GREETING_S", 0.4)
    monkeypatch.setattr(machine_streams, "_CALL_S", 0.4)
    slow, here = connection()
    over = threading.Event()

    def greet(end: socket.socket) -> Stream:
        if side == "called":
            return answer(end, SECRET, own=1, machines=2)
        return call(end, SECRET, own=0, machine=1, port=1)

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.1):
                slow.sendall(b"G")

    thread = threading.Thread(target=trickle)
    thread.start()
    with slow, here:
        with pytest.raises(TimeoutError):
            greet(here)
        over.set()
        thread.join()


def test_keys_are_replaced_before_a_number_could_come_again(
    wire: Wire, inside: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_streams, "_EPOCH_PIECES", 3)
    monkeypatch.setattr(machine_streams, "PIECE_BYTES", 8)
    used: list[bytes] = []
    derive = machine_streams.derive

    def noting(key: bytes, *info: bytes) -> bytes:
        used.append(info[-1])
        return derive(key, *info)

    monkeypatch.setattr(machine_streams, "derive", noting)
    rank, other = joined(wire, inside)
    data = secrets.token_bytes(200)  # 25 pieces or more
    rank.sendall(data)
    rank.shutdown(socket.SHUT_WR)
    assert everything(other) == (data, True)
    epochs = [int.from_bytes(one, "big") for one in used if len(one) == 4]
    assert epochs.count(8) == 2, "once at each end"
    assert max(epochs.count(epoch) for epoch in epochs) <= 4


# what is done to a stream


def attack(name: str, pieces: list[bytes]) -> list[bytes]:
    match name:
        case "changed":
            pieces[1] = pieces[1][:-1] + bytes([pieces[1][-1] ^ 1])
        case "left out":
            del pieces[1]
        case "swapped":
            pieces[1], pieces[2] = pieces[2], pieces[1]
        case "repeated":
            pieces.insert(2, pieces[1])
        case "longer":
            pieces[1] = (1 << 30).to_bytes(4, "big") + pieces[1][4:]
        case "shorter":
            pieces[1] = (TAG_BYTES - 1).to_bytes(4, "big") + pieces[1][4:]
        case "called the last":
            pieces[1] = bytes([pieces[1][0] | 0x80]) + pieces[1][1:]
        case "cut at a piece":
            del pieces[2:]
        case "cut in a piece":
            pieces[2:] = [pieces[2][:20]]
    return pieces


def cut_up(stream: bytes) -> list[bytes]:
    pieces = []
    while stream:
        size = 4 + (int.from_bytes(stream[:4], "big") & 0x7FFFFFFF)
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


@pytest.mark.parametrize(
    "name",
    ["changed", "left out", "swapped", "repeated", "longer", "shorter", "called the last", "cut at a piece",
     "cut in a piece", "nothing"],
)  # fmt: skip
def test_whatever_is_done_to_a_stream_ends_it_and_never_looks_like_its_end(name: str) -> None:
    """A recorded stream is played, attacked, to the receiver that it was for: same keys, same place."""
    wire = Wire()
    caller, called = met(wire)
    assert isinstance(caller, Stream)
    assert isinstance(called, Stream)
    rank, caller_end = connection()
    caller_end.settimeout(None)
    wire.change = lambda direction, data: b"" if direction == "out" else data
    before = len(wire.seen["out"])
    caller.join(caller_end)
    said = [b"first", b"second", b"third"]
    for index, text in enumerate(said):
        rank.sendall(text)
        # Each in a piece of its own.
        wait_for_length(wire, before + sum(4 + TAG_BYTES + len(one) for one in said[: index + 1]))
    rank.shutdown(socket.SHUT_WR)
    wait_for_length(wire, before + sum(4 + TAG_BYTES + len(one) for one in said) + 4 + TAG_BYTES)
    pieces = attack(name, cut_up(bytes(wire.seen["out"][before:])))
    other, called_end = connection()
    called_end.settimeout(None)
    called.join(called_end)
    with contextlib.suppress(OSError):  # broken off at the first piece that does not fit
        wire._right.sendall(b"".join(pieces))
        wire._right.shutdown(socket.SHUT_WR)
    received, in_order = everything(other)
    if name == "nothing":
        assert (received, in_order) == (b"firstsecondthird", True)
    else:
        assert not in_order
        assert b"firstsecond".startswith(received), "nothing of what came after"
    for one in (rank, caller_end, other):
        one.close()
    wire.close()


def wait_for_length(wire: Wire, length: int) -> None:
    wait_for(lambda: len(wire.seen["out"]) >= length)


def test_a_rank_that_is_killed_is_a_break_on_the_other_machine_too(wire: Wire, inside: Callable[[], Ends]) -> None:
    rank, other = joined(wire, inside)
    rank.sendall(b"so far")
    assert other.recv(6) == b"so far"
    rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    rank.close()
    assert everything(other) == (b"", False)
