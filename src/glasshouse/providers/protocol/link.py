"""One end of a channel: frames over two descriptors that never block, and the calls of runtimes to their gate.

Laws (spec/place.md, sections 2 and 7): the caller bounds what is queued, by `pending_bytes`; `flush` writes what could
not be written before; a call that breaks, or holds more than a gate ever sends, is dropped on both sides and harms no
other.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from glasshouse.errors import Code, FormatError, PeerError
from glasshouse.wire import frames
from glasshouse.wire.canonical import Json

MAX_CALLS = 16
_STREAM_BYTES = 4
_MAX_DATA_BYTES = frames.MAX_PAYLOAD_BYTES - _STREAM_BYTES
_READ_BYTES = 1 << 20
_CALL_READ_BYTES = 1 << 16
# Evidence, an answer with its head, and as much again.
_MAX_HELD_BYTES = 1 << 20

# A control message, or a stream's number and bytes of it.
Message = dict[str, Json] | tuple[int, bytes]


class Link:
    """Frames in both directions, over two descriptors, which are made non-blocking and closed by `close`."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        self._decoder = frames.Decoder()
        self._queue: deque[memoryview] = deque()
        self._later: deque[memoryview] = deque()
        self.pending_bytes = 0
        self._held = False

    def hold(self) -> None:
        """Write nothing until `let_go`."""
        self._held = True

    def let_go(self) -> None:
        """Write what was queued meanwhile; raises as `flush`."""
        self._held = False
        self.flush()

    def send(self, message: dict[str, Json], *, can_wait: bool = False) -> None:
        """Queue a control frame, and write what goes out now.

        Args:
            can_wait: lets frames that are queued later come before it; those that can wait keep their order.

        Raises:
            ValueError: it is too long for a frame.
            PeerError: as `flush`.
        """
        self._put(frames.control(message), can_wait)

    def send_data(self, stream: int, data: bytes | memoryview, *, can_wait: bool = False) -> None:
        """Queue the bytes of a stream; nothing happens without any. `can_wait` as of `send`."""
        left = memoryview(data)
        while left:
            piece, left = left[:_MAX_DATA_BYTES], left[_MAX_DATA_BYTES:]
            header = frames.data_header(_STREAM_BYTES + len(piece)) + stream.to_bytes(_STREAM_BYTES, "big")
            self._put(header + bytes(piece), can_wait)

    def flush(self) -> None:
        """Write what can be written now; raises `PeerError` `place-unreachable` where the other side is gone."""
        while not self._held and (self._queue or self._later):
            if not self._queue:
                self._queue.append(self._later.popleft())
            try:
                written = os.write(self.writer, self._queue[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise _gone(error.strerror) from None
            self.pending_bytes -= written
            if written < len(self._queue[0]):
                self._queue[0] = self._queue[0][written:]
            else:
                self._queue.popleft()

    def receive(self) -> Iterator[Message]:
        """Yield what has come whole.

        Raises:
            PeerError: `place-unreachable`: the other side has ended; `schema-invalid`: what came is no frame.
        """
        try:
            data = os.read(self.reader, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise _gone(error.strerror) from None
        if not data:
            raise _gone("its end was reached")
        yield from self.feed(data)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take bytes that were read elsewhere; as `receive`."""
        try:
            for _, value in self._decoder.feed(data):
                if isinstance(value, dict):
                    yield value
                elif isinstance(value, bytearray) and len(value) > _STREAM_BYTES:
                    yield int.from_bytes(value[:_STREAM_BYTES], "big"), bytes(value[_STREAM_BYTES:])
                else:
                    raise FormatError(Code.SCHEMA, "a frame without bytes, or no object")
        except FormatError as error:
            raise PeerError(Code.SCHEMA, f"the other side of the channel sent no frame: {error.message}") from None

    def close(self) -> None:
        """Close both descriptors."""
        self._decoder.wipe()
        for descriptor in (self.reader, self.writer):
            os.close(descriptor)

    def _put(self, frame: bytes, can_wait: bool) -> None:
        (self._later if can_wait else self._queue).append(memoryview(frame))
        self.pending_bytes += len(frame)
        self.flush()


@dataclass(slots=True)
class _Call:
    connection: socket.socket
    held: bytearray = field(default_factory=bytearray)  # waits to be written to the connection
    no_more_comes: bool = False
    no_more_goes: bool = False


class Calls:
    """The open calls of one channel: at the place the sockets are the runtimes', at the owner's they lead to the gate.

    Args:
        selector: waits for the connections; the `data` of each is called with the events.
    """

    def __init__(self, link: Link, selector: selectors.BaseSelector) -> None:
        self._link, self._selector = link, selector
        self._calls: dict[int, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def add(self, number: int, connection: socket.socket) -> None:
        """Carry a connected socket, and close it at its end."""
        connection.setblocking(False)
        self._calls[number] = _Call(connection)
        self._wait(number)

    def data(self, number: int, data: bytes) -> None:
        """Write what came from the other side; nothing for a call that is gone."""
        call = self._calls.get(number)
        if call is None or call.no_more_comes:
            return
        call.held += data
        if len(call.held) > _MAX_HELD_BYTES:
            self._fail(number)
        else:
            self._write(number, call)

    def end(self, number: int) -> None:
        """Note that nothing more comes from the other side."""
        call = self._calls.get(number)
        if call is not None:
            call.no_more_comes = True
            self._write(number, call)

    def drop(self, number: int) -> None:
        """Close a call because the other side did."""
        call = self._calls.pop(number, None)
        if call is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(call.connection)
            call.connection.close()

    def close(self) -> None:
        """Close all calls."""
        for number in list(self._calls):
            self.drop(number)

    def _ready(self, number: int, events: int) -> None:
        call = self._calls.get(number)
        if call is not None and events & selectors.EVENT_WRITE:
            self._write(number, call)
        if number in self._calls and events & selectors.EVENT_READ:
            self._read(number, self._calls[number])

    def _read(self, number: int, call: _Call) -> None:
        try:
            data = call.connection.recv(_CALL_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._fail(number)
            return
        if data:
            self._link.send_data(number, data)
            return
        call.no_more_goes = True
        self._link.send({"end": number})
        self._settle(number, call)

    def _write(self, number: int, call: _Call) -> None:
        try:
            while call.held:
                del call.held[: call.connection.send(call.held, socket.MSG_NOSIGNAL)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._fail(number)
            return
        self._settle(number, call)

    def _settle(self, number: int, call: _Call) -> None:
        if call.no_more_comes and not call.held:
            with contextlib.suppress(OSError):
                call.connection.shutdown(socket.SHUT_WR)
            if call.no_more_goes:
                self.drop(number)
                return
        self._wait(number)

    def _wait(self, number: int) -> None:
        call = self._calls[number]
        events = (0 if call.no_more_goes else selectors.EVENT_READ) | (selectors.EVENT_WRITE if call.held else 0)
        with contextlib.suppress(KeyError):
            self._selector.unregister(call.connection)
        if events:
            self._selector.register(call.connection, events, lambda ready: self._ready(number, ready))

    def _fail(self, number: int) -> None:
        self._link.send({"drop": number})
        self.drop(number)


def _gone(why: str | None) -> PeerError:
    return PeerError(Code.PLACE_UNREACHABLE, f"the channel to the place is gone ({why})")
