"""Flows of frames to and from each peer, in a fixed order.

Laws: a flow's frames go out in the order of its chunks; a frame is taken only into what its opener has verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from glasshouse.collectives.operations.regions import Span
from glasshouse.collectives.protocol.frame_memory import Buffers
from glasshouse.collectives.protocol.headers import HEADER_BYTES, frame_bytes, set_chunk
from glasshouse.collectives.protocol.traffic import FrameOpener, FrameSealer

_Flow = TypeVar("_Flow", "Outflow", "Inflow")

Gate: TypeAlias = Callable[[int], bool] | None  # whether a chunk may be sealed or overwritten yet; None if any may


class Sink(Protocol):
    """Where the frames of a peer go."""

    def ready(self, source: int, chunk: int) -> bool:
        """Return whether that chunk can be taken now."""

    def take(self, source: int, chunk: int, opener: FrameOpener, frame: memoryview) -> None:
        """Open that chunk's frame and use it."""


@dataclass(eq=False)
class Outflow:
    """Frames for one peer, with its packed header; the gate is for sealing."""

    span: Span
    header: bytearray
    sealer: FrameSealer
    gate: Gate = None
    sealed: int = 0  # how many chunks have been sealed: what they were sealed from may be overwritten

    def frame(self, chunk: int, buffer: Callable[[int], memoryview | None]) -> memoryview | None:
        """Return the next chunk's sealed frame, made in what `buffer` gives for its size, or None if not yet."""
        if self.gate is not None and not self.gate(chunk):
            return None
        own = buffer(frame_bytes(self.span.size(chunk)))
        return None if own is None else self._seal(chunk, own)

    def release(self, chunk: int) -> Callable[[], None] | None:
        """Return the callback, if any, for a frame that has gone out whole, and whose memory is free."""
        del chunk
        return None

    def _seal(self, chunk: int, buffer: memoryview) -> memoryview:
        low, high = self.span.bounds(chunk)
        frame = buffer[: frame_bytes(high - low)]
        frame[:HEADER_BYTES] = self.header
        set_chunk(frame, chunk)
        self.span.region.seal(low, high, self.sealer, frame)
        self.sealed = chunk + 1
        return frame


@dataclass(eq=False)
class _Shared:
    """A frame on its way to every peer. Holds no reference to what it was sealed from, which it may outlive."""

    buffers: Buffers
    buffer: memoryview
    frame: memoryview
    left: int
    begun: int = 0  # how many peers' connections have begun with it

    def gone(self) -> None:
        """Count one more connection that is done with it."""
        self.left -= 1
        if not self.left:
            self.buffers.give_back(self.buffer)


class SharedOutflow(Outflow):
    """Frames that are sealed once and sent to every peer, and lie in `buffers` until the last has been sent them."""

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
        if (self.gate is not None and not self.gate(chunk)) or (own := self._buffers.take()) is None:
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


@dataclass(eq=False)
class Inflow:
    """Frames from one peer, of the sizes of a span, with the packed header that they must have."""

    source: int
    span: Span
    header: bytearray
    opener: FrameOpener
    sink: Sink

    def expected(self, chunk: int) -> bytearray:
        """Return the 64 bytes that the next frame, of this chunk, must begin with."""
        set_chunk(self.header, chunk)
        self.opener.complete(self.header, self.span.size(chunk))
        return self.header


@dataclass(eq=False)
class CopySink(Sink):
    """Opens frames straight to where they belong: `span`, once the chunk of it may be overwritten."""

    span: Span
    may: Gate = None
    taken: int = 0

    def ready(self, source: int, chunk: int) -> bool:
        return self.may is None or self.may(chunk)

    def take(self, source: int, chunk: int, opener: FrameOpener, frame: memoryview) -> None:
        low, high = self.span.bounds(chunk)
        self.span.region.open(low, high, opener, frame)
        self.taken = chunk + 1


ChunkRun: TypeAlias = tuple[_Flow, int, int]  # chunks [low, high) of a flow, sent or taken one after the other


def interleaved(first: _Flow, second: _Flow, lag: int) -> list[ChunkRun[_Flow]]:
    """Return two flows as one: `lag` chunks of the first, then a chunk of the second and one of the first in turn.

    Chunk i of the second never comes before chunk i of the first where `lag` is positive.
    """
    ahead, behind = first.span.count, second.span.count
    runs: list[ChunkRun[_Flow]] = [(first, 0, min(lag, ahead))] if ahead else []
    for at in range(max(behind, ahead - lag)):
        if at < behind:
            runs.append((second, at, at + 1))
        if lag + at < ahead:
            runs.append((first, lag + at, lag + at + 1))
    return runs
