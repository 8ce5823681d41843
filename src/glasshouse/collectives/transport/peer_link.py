"""One connection with one rank: whole frames out of and into buffers of its own, never waiting.

Laws: what is read goes no further than the frame that is being read, so a buffer holds one frame at a time; a buffer
grows to the largest frame there was and is used for all.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable

from glasshouse.collectives.protocol.frame_memory import allocate
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import HEADER_BYTES, frame_bytes, payload_bytes
from glasshouse.errors import CollectiveError

_LEAST_BUFFER_BYTES = frame_bytes(4096)


class Closed(Exception):  # noqa: N818 - an event that the engine expects, no error
    """The other end is gone."""


class PeerLink:
    """One connection, connected and past the handshake, which the link owns."""

    def __init__(self, connection: socket.socket, peer: int, lane: Lane) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._in = memoryview(bytearray(_LEAST_BUFFER_BYTES))
        self._out = memoryview(bytearray(_LEAST_BUFFER_BYTES))
        self._pending: list[memoryview] = []
        self._gone: Callable[[], None] | None = None
        self.fileno = connection.fileno()
        self.peer = peer
        self.lane = lane
        self.readable = True  # whether a read may find something: cleared by a read that does not, set by the poll
        self.writable = True
        self.received = 0  # bytes that have come on it so far
        self.have = 0  # bytes of the current frame that have arrived
        self.wanted = 0  # bytes of the current frame, once known
        self.closed = False
        self.ended = False  # whether the other end has shut its side down
        self.bye_received = False

    @property
    def sending(self) -> bool:
        """Whether a frame is on its way out."""
        return bool(self._pending)

    @property
    def frame(self) -> memoryview:
        """The frame that has arrived, or its beginning."""
        return self._in[: self.have]

    def out_buffer(self, size: int) -> memoryview | None:
        """Return memory to seal a frame of `size` bytes in, None if not yet; only while nothing is being sent."""
        if len(self._out) < size:
            self._out = allocate(size)
        return self._out

    def begin(self, frame: memoryview, gone: Callable[[], None] | None = None) -> None:
        """Make `frame` the next to send, and call `gone` when its memory is free again."""
        self._pending = [frame]
        self._gone = gone

    def push(self) -> bool:
        """Send what the connection accepts; return whether the frame has gone out whole. `Closed` without a peer."""
        pending = self._pending
        if not pending:
            return False
        try:
            sent = self._socket.send(pending[0]) if len(pending) == 1 else self._socket.sendmsg(pending)
        except BlockingIOError:
            self.writable = False
            return False
        except OSError:
            raise Closed from None
        while pending and sent >= len(pending[0]):
            sent -= len(pending.pop(0))
        if pending:
            pending[0] = pending[0][sent:]
            return False
        self._went()
        return True

    def pull(self, wanted: int) -> bool:
        """Read on, up to a frame of `wanted` bytes or of the size in its header; return whether it is whole.

        Raises:
            Closed: the other end is gone.
            CollectiveError: `collective-tampered`, a header that announces more than a frame carries.
        """
        if not self.wanted:
            self.wanted = wanted
        if len(self._in) < self.wanted:
            self._grow(self.wanted)
        read = self._read(self._in[self.have : self.wanted])
        before, self.have = self.have, self.have + read
        if before < HEADER_BYTES <= self.have:
            # A frame that is not the expected one has its own length; nothing is ever read beyond the shortest.
            self.wanted = self._announced()
        return self.have >= self.wanted

    def taken(self) -> None:
        """Make room for the next frame."""
        self.have = self.wanted = 0

    def flush(self, until: float) -> None:
        """Push the rest of the frame that is on its way, waiting for the connection to `until` (monotonic, s)."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self.sending and not self.push() and (left := until - time.monotonic()) > 0:
            poll.poll(left * 1000)

    def finish(self) -> None:
        """Send nothing more; what was sent still arrives, and what arrives is not answered with a reset."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        if not self.closed:
            self.finish()
            self.abandon()

    def abandon(self) -> None:
        """Close this process's end only, as a forked child: the parent goes on with the connection."""
        self.closed = True
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _went(self) -> None:
        """Free the memory of the frame that has gone out whole."""
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    def _read(self, into: memoryview) -> int:
        """Read what is there; return how much, 0 if nothing."""
        try:
            read = self._socket.recv_into(into)
        except BlockingIOError:
            self.readable = False
            return 0
        except OSError:
            raise Closed from None
        if not read:
            raise Closed
        self.received += read
        return read

    def _announced(self) -> int:
        try:
            return frame_bytes(payload_bytes(self._in[:HEADER_BYTES]))
        except CollectiveError as error:
            raise CollectiveError(error.code, f"from rank {self.peer} came {error.message}", rank=self.peer) from None

    def _grow(self, size: int) -> None:
        larger = allocate(size)
        larger[: self.have] = self._in[: self.have]
        self._in = larger
