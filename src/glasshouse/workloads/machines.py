"""Sealed streams between the workers of a group's machines: what ranks and their store say to each other across them.

The agent's relay makes the connections and hands them in (`runtime.relay`, whose messages these are). Only this
process, in which no script runs (but what PyTorch imports does), holds them; ranks get a connection over their own
loopback, and every byte that goes further is sealed here. Laws: nothing is connected or passed on before the other
side has proved that it holds the group secret; each stream has fresh keys in each direction; a stream that was cut,
changed or replayed ends, and delivers nothing of what came after.
Source: spec/key-release.md, section 5.5.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from glasshouse.errors import Code, PackageError, PeerError
from glasshouse.wire.aead import PREFIX_BYTES, TAG_BYTES, ChunkCipher, Suite
from glasshouse.wire.kdf import derive

__all__ = ["STORE_PORT", "Machines", "Stream", "answer", "call"]

STORE_PORT = 29400
"""Of the group's store on the first machine's loopback, and of the way to it on every other's."""

PIECE_BYTES = 256 << 10
_BUFFER_BYTES = 4 << 20
_LOOPBACK = "127.0.0.1"
_MAGIC = b"GHSTREAM"
_HELLO = struct.Struct(">8sBBH32s")  # magic, from, to, port, the caller's nonce
_NONCE_BYTES = _MAC_BYTES = 32
_LENGTH = struct.Struct(">I")
_LAST = 1 << 31
_LABEL = b"glasshouse stream v1"
_EPOCH_PIECES = 1 << 24

_GREETING_S = 5.0
_CALL_S = 15.0
_STORE_S = 300.0
_RETRY_S = 0.1
_FINISHING_S = 1.0
_STRANGERS = 32
# A machine that fell silent is given up after half a minute.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_WORKER_PORT = 0

# As the agent's relay has it.
_MESSAGE = struct.Struct(">BBI")
_CALL, _FAILED, _CALLED = 1, 2, 3

_T = TypeVar("_T")


class Direction:
    """Seals or opens the pieces of one direction of a stream, in order; every `_EPOCH_PIECES` under another key.

    Args:
        key: returns the key of an epoch.
        sender: who speaks in this direction.
    """

    def __init__(self, key: Callable[[int], bytes], sender: bytes) -> None:
        self._key, self._sender = key, sender
        self._index = 0
        self._cipher: ChunkCipher | None = None

    def next(self) -> tuple[ChunkCipher, int]:
        """Return the cipher of the next piece, and the piece's number under its key."""
        epoch, number = divmod(self._index, _EPOCH_PIECES)
        if self._cipher is None or number == 0:
            self._cipher = ChunkCipher(
                suite=Suite.AES_256_GCM, key=self._key(epoch), prefix=bytes(PREFIX_BYTES), associated_data=self._sender
            )
        self._index += 1
        return self._cipher, number


class Stream:
    """One connection with a worker that has proved itself.

    Args:
        connection: to the other machine; belongs to this object from now on.
        sending, receiving: the two directions, each with keys of this stream alone.
        caller: which machine called.
        port: which listener of the called machine's loopback it is for; 0 for its worker.
    """

    def __init__(
        self, connection: socket.socket, sending: Direction, receiving: Direction, *, caller: int, port: int
    ) -> None:
        self.caller, self.port = caller, port
        self._connection, self._sending, self._receiving = connection, sending, receiving
        self._broken = False
        _prepare(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def join(self, inside: socket.socket) -> None:
        """Pass on everything between this stream and a connection of the loopback, until both directions have ended."""
        threading.Thread(target=self._run, args=(inside,), name="glasshouse-stream", daemon=True).start()

    def close(self) -> None:
        self._connection.close()

    def _run(self, inside: socket.socket) -> None:
        outward = threading.Thread(target=self._outward, args=(inside,), daemon=True)
        outward.start()
        self._inward(inside)
        outward.join()
        inside.close()
        self._connection.close()

    def _outward(self, inside: socket.socket) -> None:
        plain, sealed = memoryview(bytearray(PIECE_BYTES)), bytearray(_LENGTH.size + PIECE_BYTES + TAG_BYTES)
        count = -1
        try:
            while count:
                count = inside.recv_into(plain)
                if self._broken:
                    return  # it was cut here, and the other side is not told that this was the end
                size = count + TAG_BYTES
                _LENGTH.pack_into(sealed, 0, size | (0 if count else _LAST))
                body = memoryview(sealed)[_LENGTH.size : _LENGTH.size + size]
                cipher, number = self._sending.next()
                cipher.seal_into(number, last=not count, plaintext=plain[:count], out=body)
                self._connection.sendall(memoryview(sealed)[: _LENGTH.size + size])
        except OSError:
            self._cut(inside)

    def _inward(self, inside: socket.socket) -> None:
        plain, sealed = memoryview(bytearray(PIECE_BYTES)), memoryview(bytearray(PIECE_BYTES + TAG_BYTES))
        last = False
        try:
            while not last:
                (word,) = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size, None))
                last, size = bool(word & _LAST), word & ~_LAST
                if not TAG_BYTES <= size <= len(sealed):
                    raise PeerError(Code.COLLECTIVE_TAMPERED, "a piece of a stream that cannot be one")
                _fill(self._connection, sealed[:size], None)
                count = size - TAG_BYTES
                cipher, number = self._receiving.next()
                cipher.open_into(number, last=last, sealed=sealed[:size], out=plain[:count])
                inside.sendall(plain[:count])
            inside.shutdown(socket.SHUT_WR)
        except (OSError, EOFError, PackageError, PeerError):
            # Not as an end that the other side meant: what reads the loopback must see that something is missing.
            self._cut(inside)

    def _cut(self, inside: socket.socket) -> None:
        """Let both other ends see a break and no orderly end, and wake what waits here."""
        self._broken = True
        for connection, direction in ((inside, socket.SHUT_RD), (self._connection, socket.SHUT_RDWR)):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                connection.shutdown(direction)


def call(connection: socket.socket, secret: bytes, *, own: int, machine: int, port: int) -> Stream:
    """Prove ourselves to another machine's worker, and it to us.

    Args:
        connection: to it.
        secret: the group secret.
        own, machine: which machine this is, and which is called.
        port: the listener on its loopback that is wanted.

    Raises:
        OSError, EOFError: it is away, or no worker of this group.
    """
    until = time.monotonic() + _CALL_S
    connection.settimeout(_CALL_S)
    hello = _HELLO.pack(_MAGIC, own, machine, port, secrets.token_bytes(_NONCE_BYTES))
    connection.sendall(hello + _mac(secret, b"hello", hello))
    answered = _exactly(connection, _NONCE_BYTES, until)
    transcript = hello + answered
    if not hmac.compare_digest(_exactly(connection, _MAC_BYTES, until), _mac(secret, b"answer", transcript)):
        raise ConnectionAbortedError("no worker of this group answers there")
    connection.sendall(_mac(secret, b"confirm", transcript))
    return Stream(connection, *_directions(secret, transcript, b"caller", b"called"), caller=own, port=port)


def answer(connection: socket.socket, secret: bytes, *, own: int, machines: int) -> Stream:
    """Have a caller prove itself, and us to it; raises as `call`."""
    until = time.monotonic() + _GREETING_S
    hello = _exactly(connection, _HELLO.size, until)
    magic, caller, called, port, _ = _HELLO.unpack(hello)
    if (
        not hmac.compare_digest(_exactly(connection, _MAC_BYTES, until), _mac(secret, b"hello", hello))
        or (magic, called) != (_MAGIC, own)
        or caller == own
        or caller >= machines
    ):
        raise ConnectionAbortedError("a stranger, or a call for another machine")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    transcript = hello + nonce
    connection.sendall(nonce + _mac(secret, b"answer", transcript))
    # Only now is it certain that this is not an older call, played again.
    if not hmac.compare_digest(_exactly(connection, _MAC_BYTES, until), _mac(secret, b"confirm", transcript)):
        raise ConnectionAbortedError("a call that was not meant now")
    return Stream(connection, *_directions(secret, transcript, b"called", b"caller"), caller=caller, port=port)


class Machines:
    """This worker's place among those of its group.

    Args:
        relay: the end of the agent's relay; belongs to this object from now on.
        secret: the group secret.
        machine, machines: which this is, and how many there are.
    """

    def __init__(self, relay: socket.socket, secret: bytes, *, machine: int, machines: int) -> None:
        self.machine, self.machines = machine, machines
        self._relay, self._secret = relay, secret
        self._asked: dict[int, SimpleQueue[socket.socket | None]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._lines: list[socket.socket] = []
        self._store: socket.socket | None = None
        self._over = False
        self._on_lost: Callable[[int], None] = lambda _machine: None

    def start(self, on_lost: Callable[[int], None]) -> None:
        """Answer from now on; on every machine but the first, lead to the first one's store.

        Args:
            on_lost: called, in a thread, with a machine whose worker ended before it had finished. The first machine
                hears of every other, and every other of the first: one that is lost so ends them all.
        """
        self._on_lost = on_lost
        threading.Thread(target=self._listen, name="glasshouse-relay", daemon=True).start()
        if self.machine:
            threading.Thread(target=self._hold_on, name="glasshouse-first", daemon=True).start()
            self._store = socket.create_server((_LOOPBACK, STORE_PORT))
            threading.Thread(target=self._forward, args=(self._store,), name="glasshouse-store", daemon=True).start()

    def finish(self) -> None:
        """Tell the other workers that this one ends in order."""
        with self._lock:
            self._over = True
            lines = list(self._lines)
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
                line.settimeout(_FINISHING_S)
                line.recv(1)  # what was said is on its way when the other side is done too, or some time has passed

    def dial(self, machine: int, port: int) -> socket.socket:
        """Return a connection over this machine's loopback that leads to a listener on another's.

        Raises:
            OSError: there is none.
        """
        return self._inside(self._reach(machine, port))

    def _inside(self, stream: Stream) -> socket.socket:
        with socket.create_server((_LOOPBACK, 0)) as listener:
            outer = socket.create_connection(listener.getsockname())
            inner, caller = listener.accept()
            if caller != outer.getsockname():
                inner.close()
                stream.close()
                raise ConnectionAbortedError("another process came first")
        _prepare(inner)
        _prepare(outer)
        stream.join(inner)
        return outer

    def _reach(self, machine: int, port: int) -> Stream:
        if not 0 <= machine < self.machines or machine == self.machine:
            raise OSError(f"no other machine {machine}")
        answers: SimpleQueue[socket.socket | None] = SimpleQueue()
        with self._lock:
            self._count += 1
            number = self._count
            self._asked[number] = answers
        try:
            self._relay.send(_MESSAGE.pack(_CALL, machine, number))
            connection = _within(answers, _CALL_S)
        finally:
            with self._lock:
                del self._asked[number]
        if connection is None:
            raise ConnectionRefusedError(f"machine {machine} cannot be reached")
        try:
            return call(connection, self._secret, own=self.machine, machine=machine, port=port)
        except (OSError, EOFError):
            connection.close()
            raise ConnectionRefusedError(f"machine {machine} is not who it should be") from None

    def _listen(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._relay, 64, 1)
            except OSError:
                return
            if len(data) != _MESSAGE.size:
                return  # the agent is gone, and this process a moment later
            kind, _, number = _MESSAGE.unpack(data)
            connection = socket.socket(fileno=descriptors[0]) if descriptors else None
            if kind == _CALLED and connection is not None:
                self._meet(connection)
                continue
            with self._lock:
                waiting = self._asked.get(number)
            if waiting is not None:
                waiting.put(connection)
            elif connection is not None:
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        if not self._strangers.acquire(blocking=False):
            connection.close()  # one of ours calls again
            return
        threading.Thread(target=self._greet, args=(connection,), name="glasshouse-called", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            stream = answer(connection, self._secret, own=self.machine, machines=self.machines)
        except (OSError, EOFError):
            connection.close()
            return
        finally:
            self._strangers.release()
        if stream.port == _WORKER_PORT:
            self._watch(stream.caller, self._inside(stream))
            return
        try:
            inside = _patiently(lambda: socket.create_connection((_LOOPBACK, stream.port), timeout=_CALL_S), _CALL_S)
        except OSError:
            stream.close()
            return
        _prepare(inside)
        stream.join(inside)

    def _hold_on(self) -> None:
        """Keep a line to the first machine's worker; its end is how either learns of the other's."""
        try:
            line = _patiently(lambda: self.dial(0, _WORKER_PORT), _STORE_S)
        except OSError:
            self._on_lost(0)
            return
        self._watch(0, line)

    def _watch(self, machine: int, line: socket.socket) -> None:
        with self._lock:
            self._lines.append(line)
            over = self._over
        if over:
            self.finish()
            return
        try:
            in_order = not line.recv(1)
        except OSError:
            in_order = False
        if not in_order and not self._over:
            self._on_lost(machine)

    def _forward(self, listener: socket.socket) -> None:
        while True:
            try:
                inside = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._lead_to_store, args=(inside,), daemon=True).start()

    def _lead_to_store(self, inside: socket.socket) -> None:
        try:
            stream = _patiently(lambda: self._reach(0, STORE_PORT), _STORE_S)
        except OSError:
            inside.close()
            return
        _prepare(inside)
        stream.join(inside)


def _prepare(connection: socket.socket) -> None:
    """Let a connection wait as long as it must, send at once, and hold enough to keep both of its ends busy."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _patiently(action: Callable[[], _T], within_s: float) -> _T:
    """Do `action`, again while it fails, for at most `within_s`; raises its `OSError`."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return action()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _within(answers: SimpleQueue[socket.socket | None], seconds: float) -> socket.socket | None:
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return None


def _mac(secret: bytes, step: bytes, data: bytes) -> bytes:
    return hmac.digest(derive(secret, _LABEL, step), data, "sha256")


def _directions(secret: bytes, transcript: bytes, own: bytes, other: bytes) -> tuple[Direction, Direction]:
    """Return what this side sends under, and what it receives under."""

    def direction(sender: bytes) -> Direction:
        def key(epoch: int) -> bytes:
            return derive(secret, _LABEL, b"key", sender, transcript, epoch.to_bytes(4, "big"))

        return Direction(key, sender)

    return direction(own), direction(other)


def _exactly(connection: socket.socket, count: int, until: float | None) -> bytes:
    data = bytearray(count)
    _fill(connection, memoryview(data), until)
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview, until: float | None) -> None:
    """Receive exactly as much.

    Args:
        connection: from where.
        view: what is filled.
        until: when to give up (monotonic, s), however the bytes trickle in; None for never.

    Raises:
        EOFError: an end before that.
        OSError: a broken connection; `TimeoutError` when the time is up.
    """
    while len(view):
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("who is there takes too long to say so")
            connection.settimeout(left)
        count = connection.recv_into(view)
        if not count:
            raise EOFError("a stream that ended in the middle")
        view = view[count:]
