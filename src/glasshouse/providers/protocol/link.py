"""One end of a channel: frames over two descriptors that never block (spec/place.md, section 2).

Laws: the caller bounds what is queued, by `pending_bytes`; `flush` writes what could not be written before.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

from glasshouse.errors import Code, FormatError, PeerError
from glasshouse.wire import frames
from glasshouse.wire.canonical import Json

_STREAM_BYTES = 4
MAX_DATA_BYTES = frames.MAX_PAYLOAD_BYTES - _STREAM_BYTES
_READ_BYTES = 1 << 20

# A control message, or a stream's number and bytes of it.
Message = dict[str, Json] | tuple[int, bytes]


class Link:
    """Frames in both directions.

    Args:
        reader, writer: two descriptors, made non-blocking; closed by `close`.
    """

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
            piece, left = left[:MAX_DATA_BYTES], left[MAX_DATA_BYTES:]
            header = frames.data_header(_STREAM_BYTES + len(piece)) + stream.to_bytes(_STREAM_BYTES, "big")
            self._put(header + bytes(piece), can_wait)

    def flush(self) -> None:
        """Write what can be written now.

        Raises:
            PeerError: `place-unreachable`: the other side is gone.
        """
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


def _gone(why: str | None) -> PeerError:
    return PeerError(Code.PLACE_UNREACHABLE, f"the channel to the place is gone ({why})")
