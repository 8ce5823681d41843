"""Flows of frames to and from each peer, in a fixed order.

Laws: a flow's frames go out in the order of its chunks; a frame is taken only into what its opener has verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from glasshouse.collectives.operations.regions import Span
from glasshouse.collectives.protocol.frame_memory import Buffers
from glasshouse.collectives.protocol.headers import HEADER_BYTES, frame_bytes, set_chunk
from glasshouse.collectives.protocol.traffic import FrameOpener, FrameSealer

__all__ = ["ChunkRun", "CopySink", "Gate", "Inflow", "Outflow", "SharedOutflow", "Sink", "interleaved"]

_Flow = TypeVar("_Flow", "Outflow", "Inflow")

Gate: TypeAlias = Callable[[int], bool] | None
"""Whether a chunk may be sealed or overwritten yet; None if any may."""


class Sink(Protocol):
    """Where the frames of a peer go."""

    __slots__ = ()

    def ready(self, source: int, chunk: int) -> bool:
        """Return whether that chunk can be taken now."""

    def take(self, source: int, chunk: int, opener: FrameOpener, frame: memoryview) -> None:
        """Open that chunk's frame and use it."""


class Outflow:
    """Frames for one peer.

    Args:
        span: what to send.
        header: packed for this peer and phase.
        sealer: of the stream.
        gate: for sealing.
    """

    __slots__ = ("_gate", "_header", "_sealer", "_span", "count", "gone", "sealed")

    def __init__(self, span: Span, header: bytearray, sealer: FrameSealer, gate: Gate = None) -> None:
        self._span = span
        self._header = header
        self._sealer = sealer
        self._gate = gate
        self.count = span.count
        self.sealed = 0
        """How many chunks have been sealed: what they were sealed from may be overwritten."""
        self.gone = 0
        """How many frames have gone out whole."""

    def frame(self, chunk: int, buffer: Callable[[int], memoryview | None]) -> memoryview | None:
        """Return the next chunk's sealed frame, made in what `buffer` gives for its size, or None if not yet."""
        if self._gate is not None and not self._gate(chunk):
            return None
        own = buffer(frame_bytes(self._span.size(chunk)))
        return None if own is None else self._seal(chunk, own)

    def release(self, chunk: int) -> Callable[[], None]:
        """Return the callback for a frame that has gone out whole, and whose memory is free."""

        def gone() -> None:
            self.gone = chunk + 1

        return gone

    def _seal(self, chunk: int, buffer: memoryview) -> memoryview:
        low, high = self._span.bounds(chunk)
        frame = buffer[: frame_bytes(high - low)]
        frame[:HEADER_BYTES] = self._header
        set_chunk(frame, chunk)
        self._span.region.seal(low, high, self._sealer, frame)
        self.sealed = chunk + 1
        return frame


class _Shared:
    """A frame on its way to every peer. Holds no reference to what it was sealed from, which it may outlive."""

    __slots__ = ("_buffer", "_buffers", "_left", "begun", "frame")

    def __init__(self, buffers: Buffers, buffer: memoryview, frame: memoryview, peers: int) -> None:
        self._buffers = buffers
        self._buffer = buffer
        self._left = peers
        self.frame = frame
        self.begun = 0
        """How many peers' connections have begun with it."""

    def gone(self) -> None:
        """Count one more connection that is done with it."""
        self._left -= 1
        if not self._left:
            self._buffers.give_back(self._buffer)


class SharedOutflow(Outflow):
    """Frames that are sealed once and sent to every peer.

    Args:
        buffers: where frames lie until the last peer has been sent them.
        peers: how many there are.
    """

    __slots__ = ("_buffers", "_frames", "_peers")

    def __init__(
        self, span: Span, header: bytearray, sealer: FrameSealer, gate: Gate, *, buffers: Buffers, peers: int
    ) -> None:
        super().__init__(span, header, sealer, gate)
        self._buffers = buffers
        self._peers = peers
        self._frames: dict[int, _Shared] = {}

    def frame(self, chunk: int, buffer: Callable[[int], memoryview | None]) -> memoryview | None:
        if (known := self._frames.get(chunk)) is not None:
            return known.frame
        if (self._gate is not None and not self._gate(chunk)) or (own := self._buffers.take()) is None:
            return None
        frame = self._seal(chunk, own)
        self._frames[chunk] = _Shared(self._buffers, own, frame, self._peers)
        return frame

    def release(self, chunk: int) -> Callable[[], None]:
        shared = self._frames[chunk]
        shared.begun += 1
        if shared.begun == self._peers:
            del self._frames[chunk]
        return shared.gone


class Inflow:
    """Frames from one peer.

    Args:
        source: the peer.
        span: what they fill, or another of the same sizes.
        header: packed as they must be.
        opener: of the stream.
        sink: where they go.
    """

    __slots__ = ("_header", "_opener", "_sink", "_span", "count", "source")

    def __init__(self, source: int, span: Span, header: bytearray, opener: FrameOpener, sink: Sink) -> None:
        self.source = source
        self._span = span
        self._header = header
        self._opener = opener
        self._sink = sink
        self.count = span.count

    def size(self, chunk: int) -> int:
        """Return the payload bytes of a chunk."""
        return self._span.size(chunk)

    def expected(self, chunk: int) -> bytearray:
        """Return the 64 bytes that the next frame, of this chunk, must begin with."""
        set_chunk(self._header, chunk)
        self._opener.complete(self._header, self._span.size(chunk))
        return self._header

    def ready(self, chunk: int) -> bool:
        """Return whether that chunk can be taken now."""
        return self._sink.ready(self.source, chunk)

    def take(self, chunk: int, frame: memoryview) -> None:
        """Open a frame whose header is the expected one, and use it.

        Raises:
            CollectiveError: `collective-tampered`.
        """
        self._sink.take(self.source, chunk, self._opener, frame)


class CopySink(Sink):
    """Opens frames straight to where they belong: `span`, once the chunk of it may be overwritten."""

    __slots__ = ("_may", "_span", "taken")

    def __init__(self, span: Span, may: Gate = None) -> None:
        self._span = span
        self._may = may
        self.taken = 0

    def ready(self, source: int, chunk: int) -> bool:
        return self._may is None or self._may(chunk)

    def take(self, source: int, chunk: int, opener: FrameOpener, frame: memoryview) -> None:
        low, high = self._span.bounds(chunk)
        self._span.region.open(low, high, opener, frame)
        self.taken = chunk + 1


ChunkRun: TypeAlias = tuple[_Flow, int, int]
"""Chunks [low, high) of a flow, sent or taken one after the other."""


def interleaved(first: _Flow, second: _Flow, lag: int) -> list[ChunkRun[_Flow]]:
    """Return two flows as one: `lag` chunks of the first, then a chunk of the second and one of the first in turn.

    Chunk i of the second never comes before chunk i of the first where `lag` is positive.
    """
    runs: list[ChunkRun[_Flow]] = [(first, 0, min(lag, first.count))] if first.count else []
    for at in range(max(second.count, first.count - lag)):
        if at < second.count:
            runs.append((second, at, at + 1))
        if lag + at < first.count:
            runs.append((first, lag + at, lag + at + 1))
    return runs
