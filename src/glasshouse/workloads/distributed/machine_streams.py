"""Sealed streams between the workers of a group's machines, for their ranks and the store.

The agent's relay makes the connections and hands them in (`runtime.gate.relay`, whose messages these are). Only this
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
import time
from threading import Thread

from glasshouse.errors import Code, PackageError, PeerError
from glasshouse.wire.crypto import PREFIX_BYTES, TAG_BYTES, ChunkCipher, Suite, derive

PIECE_BYTES = 256 << 10
_BUFFER_BYTES = 4 << 20
_MAGIC = b"GHSTREAM"
_HELLO = struct.Struct(">8sBBH32s")  # magic, from, to, port, the caller's nonce
_NONCE_BYTES = _MAC_BYTES = 32
_LENGTH = struct.Struct(">I")
_LAST = 1 << 31
_LABEL = b"glasshouse stream v1"
_EPOCH_PIECES = 1 << 24

_GREETING_S = 5.0
_CALL_S = 15.0
# A machine that fell silent is given up after half a minute.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Direction:
    """The keys of one direction of a stream, in order: another one for every `_EPOCH_PIECES`."""

    def __init__(self, secret: bytes, sender: bytes, transcript: bytes) -> None:
        self._secret, self._sender, self._transcript = secret, sender, transcript
        self._index = 0
        self._cipher: ChunkCipher | None = None

    def next(self) -> tuple[ChunkCipher, int]:
        """Return the cipher of the next piece, and the piece's number under its key."""
        epoch, number = divmod(self._index, _EPOCH_PIECES)
        if self._cipher is None or number == 0:
            key = derive(self._secret, _LABEL, b"key", self._sender, self._transcript, epoch.to_bytes(4, "big"))
            self._cipher = ChunkCipher(
                suite=Suite.AES_256_GCM, key=key, prefix=bytes(PREFIX_BYTES), associated_data=self._sender
            )
        self._index += 1
        return self._cipher, number


class Stream:
    """One connection with a worker that has proved itself.

    Args:
        connection: to the other machine; belongs to this object from now on.
        caller: which machine called.
        port: which listener of the called machine's loopback it is for; 0 for its worker.
    """

    def __init__(
        self, connection: socket.socket, sending: Direction, receiving: Direction, *, caller: int, port: int
    ) -> None:
        self.caller, self.port = caller, port
        self._connection, self._sending, self._receiving = connection, sending, receiving
        self._broken = False
        prepare(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def join(self, inside: socket.socket) -> None:
        """Pass on everything between this stream and a connection of the loopback, until both directions have ended."""
        prepare(inside)
        Thread(target=self._run, args=(inside,), name="glasshouse-stream", daemon=True).start()

    def close(self) -> None:
        """Close the connection of a stream that is not joined."""
        self._connection.close()

    def _run(self, inside: socket.socket) -> None:
        outward = Thread(target=self._outward, args=(inside,), daemon=True)
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
                    return  # it was cut here, and the other side must not take this for the end
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
                (word,) = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size))
                last, size = bool(word & _LAST), word & ~_LAST
                if not TAG_BYTES <= size <= len(sealed):
                    raise PeerError(Code.COLLECTIVE_TAMPERED, "a piece of a stream that cannot be one")
                _fill(self._connection, sealed[:size])
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
    """Prove this worker to another machine's, and have it prove itself, for the listener on its loopback at `port`.

    Raises:
        OSError, EOFError: it is away, or no worker of this group.
    """
    until = time.monotonic() + _CALL_S
    connection.settimeout(_CALL_S)
    hello = _HELLO.pack(_MAGIC, own, machine, port, secrets.token_bytes(_NONCE_BYTES))
    connection.sendall(hello + _mac(secret, b"hello", hello))
    transcript = hello + _exactly(connection, _NONCE_BYTES, until)
    if not _proves(connection, secret, b"answer", transcript, until):
        raise ConnectionAbortedError("no worker of this group answers there")
    connection.sendall(_mac(secret, b"confirm", transcript))
    sending, receiving = (Direction(secret, side, transcript) for side in (b"caller", b"called"))
    return Stream(connection, sending, receiving, caller=own, port=port)


def answer(connection: socket.socket, secret: bytes, *, own: int, machines: int) -> Stream:
    """Have a caller prove itself, and prove this worker to it; raises as `call`."""
    until = time.monotonic() + _GREETING_S
    hello = _exactly(connection, _HELLO.size, until)
    magic, caller, called, port, _ = _HELLO.unpack(hello)
    proved = _proves(connection, secret, b"hello", hello, until)
    if not proved or (magic, called) != (_MAGIC, own) or caller == own or caller >= machines:
        raise ConnectionAbortedError("a stranger, or a call for another machine")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    transcript = hello + nonce
    connection.sendall(nonce + _mac(secret, b"answer", transcript))
    # Only now is it certain that this is not an older call, played again.
    if not _proves(connection, secret, b"confirm", transcript, until):
        raise ConnectionAbortedError("a call that was not meant now")
    sending, receiving = (Direction(secret, side, transcript) for side in (b"called", b"caller"))
    return Stream(connection, sending, receiving, caller=caller, port=port)


def prepare(connection: socket.socket) -> None:
    """Let a connection wait as long as it must, send at once, and hold enough to keep both of its ends busy."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _mac(secret: bytes, step: bytes, data: bytes) -> bytes:
    return hmac.digest(derive(secret, _LABEL, step), data, "sha256")


def _proves(connection: socket.socket, secret: bytes, step: bytes, data: bytes, until: float) -> bool:
    return hmac.compare_digest(_exactly(connection, _MAC_BYTES, until), _mac(secret, step, data))


def _exactly(connection: socket.socket, count: int, until: float | None = None) -> bytes:
    data = bytearray(count)
    _fill(connection, memoryview(data), until)
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview, until: float | None = None) -> None:
    """Fill a buffer by a time (monotonic, s), however the bytes trickle in.

    Raises:
        EOFError: an end before that.
        OSError: a broken connection; `TimeoutError` when the time is up.
    """
    while len(view):
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("the other side takes too long to prove itself")
            connection.settimeout(left)
        count = connection.recv_into(view)
        if not count:
            raise EOFError("a stream that ended in the middle")
        view = view[count:]
