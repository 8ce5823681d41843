"""One connection: how its request is bounded, in time, bytes and pieces, while it is read.

Law: nothing is kept or parsed of a request beyond its limits, and of a body of two parts nothing is read behind the
first before that was found authentic.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import socket
import sys
import termios
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from glasshouse.attestation.detached import LENGTH_BYTES, readable
from glasshouse.broker.http.connections import Room, address_of
from glasshouse.broker.http_api import PROBLEM_TYPE, Problem
from glasshouse.errors import Code, FormatError

MAX_HEADER_BYTES = 4096
MAX_HEADER_LINES = 64
MAX_HEADER_COMMAS = 64
FREE_PIECES = 8  # of a request are read as they come; after each later one the kernel is left to join what follows
PAUSE_SHARE = 0.25  # of the time that a request has taken so far, and so the most by which it is found to be whole late
SHORTEST_PAUSE_S = 0.01
PART_BYTES = 64 * 1024  # of a body are parsed and passed on at once, or its rest
READ_BYTES = 256 * 1024  # at once
UNREAD_S = 2.0  # for an answer to reach the sender of what was not read
HEADER_TIMEOUT_S = 2.0
CONNECTION_TIMEOUT_S = 15.0
_BLANK_LINE = re.compile(rb"\n\r?\n")
_NOT_IN_A_HEAD = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\r(?!\n|\Z)")


class _Requests(h11.Connection):
    """Reads requests whose body has a length in its headers.

    A body in chunks costs by the chunk: as many as it has bytes, at its sender's choice.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise h11.RemoteProtocolError("a body in chunks")
        return event


class _Unread:
    """A transport whose close leaves the connection open: what was not read would make it take the answer back."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.write, self.is_closing = transport.write, transport.is_closing

    def close(self) -> None:
        """Leave it to the timer."""


class BoundedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection, cut off when its headers, or all of it, take too long, or when it idles in another's place.

    Every answer closes its connection, so the second timer bounds slow bodies and slow readers alike. Pauses grow with
    the time that a request takes, so that it is read in some forty pieces at most however its sender parts it. Of a
    body of two parts no byte behind the first leaves the kernel before `read_on` is called.
    """

    room: Room
    _deadline: asyncio.TimerHandle | None = None
    _pause: asyncio.TimerHandle | None = None
    _pieces = 0
    _began_s = 0.0
    _head = b""
    _length = 0  # bytes of the body
    _left = 0  # of them, those to come
    _begin = b""  # the first of them
    _is_held = False  # whether the first of two parts is here, and the second has to wait
    _is_open = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._part = bytearray()
        self._into = memoryview(b"")
        self.conn = _Requests(h11.SERVER, MAX_HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.room.enter(self, address_of(self.client[0] if self.client else None)):
            self.cut()
            return
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_due)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return room for as many bytes as may be read."""
        self._into = memoryview(bytearray(self._readable() if self._left > 0 else MAX_HEADER_BYTES))
        return self._into

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        self.data_received(bytes(self._into[:nbytes]))

    def _readable(self) -> int:
        end = None if self._is_open else readable(self._begin)
        return min(READ_BYTES, self._left, READ_BYTES if end is None else max(1, end - self._length + self._left))

    def data_received(self, data: bytes) -> None:
        taken = self._whole_head(data) if self.cycle is None else self._whole_part(data)
        if taken is None:
            return
        if taken:
            first = self.cycle is None
            super().data_received(taken)
            if first and self.cycle is not None:
                self._length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
                self._left, self._begin = self._length - len(self.cycle.body), bytes(self.cycle.body[:LENGTH_BYTES])
                self.scope["state"]["rest"] = self
        # After each read: where its window is full the kernel wakes below the mark, and a rest below it would stay
        self._wake_for(min(self._readable(), PART_BYTES - len(self._part)))
        if self._at_end_of_first() and self.cycle is not None:
            self._is_held, self.cycle.transport = True, _Unread(self.transport)  # type: ignore[assignment]
            self.transport.pause_reading()
        if self._is_held or (self.cycle is not None and not self.cycle.more_body):
            self.room.whole(self)  # the first part of two is as good as a body of one
        else:
            self.room.received(self, len(data))
            self._leave_to_the_kernel()

    def _wake_for(self, count: int) -> None:
        """Let the kernel wake the loop no sooner than so many bytes are there: TCP only, and not every kernel does."""
        connection = self.transport.get_extra_info("socket")
        if count > 0 and connection is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _leave_to_the_kernel(self) -> None:
        """Read nothing for a while, after more than a few pieces: each costs a turn of the loop, whatever is in it."""
        now_s = self.loop.time()
        self._pieces += 1
        if self._pieces == 1:
            self._began_s = now_s
        if self._pieces > FREE_PIECES:
            self.transport.pause_reading()
            pause_s = max(SHORTEST_PAUSE_S, PAUSE_SHARE * (now_s - self._began_s))
            self._pause = self.loop.call_later(pause_s, self._read_on)

    def _at_end_of_first(self) -> bool:
        end = None if self._is_open or len(self._begin) < LENGTH_BYTES else readable(self._begin)
        return end is not None and self._left > 0 and self._length - self._left >= end

    def read_on(self) -> None:
        """Read what is behind the first part, which is authentic."""
        self._is_held, self._is_open = False, True
        if self.cycle is not None:
            self.cycle.transport = self.transport
        self._wake_for(min(self._readable(), PART_BYTES))
        self.transport.resume_reading()

    def arrived(self) -> int:
        """Return how many bytes of the second part have come, also those that the kernel has yet."""
        unread = bytearray(4)
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed
                fcntl.ioctl(connection.fileno(), termios.FIONREAD, unread)
        return self._length - self._left - (readable(self._begin) or 0) + int.from_bytes(unread, sys.byteorder)

    def on_response_complete(self) -> None:
        """Close it, a little later where something was not read."""
        if not self._is_held:
            super().on_response_complete()
            return
        self.room.answered(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(UNREAD_S, self.cut)

    def _read_on(self) -> None:
        # By the server, which has enough for now and will resume by itself; or until the rest is asked for.
        if not self.flow.read_paused and not self._is_held:
            self.transport.resume_reading()

    def _whole_head(self, data: bytes) -> bytes | None:
        """Return all that has come when it holds a whole head, b"" until then, and None when the head was refused.

        h11 measures a head that is incomplete alone, and a line that it refuses may cost it the square of its length.
        """
        head = self._head + data
        blank = _BLANK_LINE.search(head, max(0, len(self._head) - 2))
        end = len(head) if blank is None else blank.start()
        refused = None
        if end > MAX_HEADER_BYTES:
            refused = f"more than {MAX_HEADER_BYTES} bytes of headers"
        elif head.count(b"\n", 0, end) + (blank is not None) > MAX_HEADER_LINES:
            refused = "too many header lines"  # each costs as much as a hundred bytes of a body
        elif head.count(b",", 0, end) > MAX_HEADER_COMMAS:
            refused = "too many commas among the headers"  # of lists that are parted more than once
        elif blank is not None and _NOT_IN_A_HEAD.search(head, 0, end):
            refused = "a control character among the headers"
        if refused is not None:
            self.send_400_response(refused)
            return None
        self._head = b"" if blank else head
        return head if blank else b""

    def _whole_part(self, data: bytes) -> bytes:
        """Return a part of the body that is long enough, or its end, and b"" until then."""
        self._part += data
        self._left -= len(data)
        self._begin += data[: LENGTH_BYTES - len(self._begin)]
        if self._left > 0 and len(self._part) < PART_BYTES and not self._at_end_of_first():
            return b""
        part, self._part = bytes(self._part), bytearray()
        return part

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.leave(self)
        for timer in (self._deadline, self._pause):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def cut(self) -> None:
        """End the connection at once; who has sent nothing is owed no answer."""
        self.transport.abort()

    def shutdown(self) -> None:
        """Begin the graceful end of a connection, if it has not begun: what was refused has its answer already."""
        if not self.transport.is_closing():
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP/1.1 as taken here with a problem document, and close."""
        problem = Problem.of(FormatError(Code.MESSAGE_INVALID, f"not a request that is taken here: {msg}")).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {PROBLEM_TYPE}\r\ncontent-length: {len(problem)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + problem)
        self.transport.close()

    def _headers_due(self) -> None:
        if self.cycle is None:
            self.cut()
        else:
            self._deadline = self.loop.call_later(CONNECTION_TIMEOUT_S - HEADER_TIMEOUT_S, self.cut)
