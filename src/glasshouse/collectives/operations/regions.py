"""Where frames are sealed from and opened to: tensors of one type seen as one run of bytes, cut into chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Protocol

import torch

from glasshouse.collectives.protocol.frame_memory import FrameOpener, FrameSealer, bytes_of
from glasshouse.collectives.protocol.headers import HEADER_BYTES
from glasshouse.wire.aead import Suite, zero

__all__ = ["HostRegion", "Region", "Span", "flat", "within"]


def flat(tensor: Any) -> Any:
    """Return a contiguous tensor's elements in one dimension, without its gradient's history.

    Raises:
        ValueError: it has gaps.
    """
    if not tensor.is_contiguous():
        raise ValueError("only contiguous tensors are exchanged")
    return tensor.detach() if tensor.dim() == 1 else tensor.detach().view(-1)


def within(queue: Any) -> AbstractContextManager[None]:
    """Return what enqueues on a device's queue whatever is done inside; nothing for None, which is host memory."""
    return nullcontext() if queue is None else queue.within()


class Region(Protocol):
    """Tensors of one type seen as one run of bytes, wherever they are. All offsets are in bytes.

    `suite` is the cipher that reaches them; `queue` is where work on them is done in order (`device.Queue`), None for
    tensors in host memory. Sealers and openers are those of `sealing`.
    """

    nbytes: int

    @property
    def suite(self) -> Suite: ...

    @property
    def queue(self) -> Any: ...

    def seal(self, low: int, high: int, sealer: Any, frame: memoryview) -> None:
        """Seal bytes [low, high) into `frame`, whose header is packed but for length and counter."""

    def open(self, low: int, high: int, opener: Any, frame: memoryview) -> None:
        """Verify a received frame and open it into bytes [low, high).

        Raises:
            CollectiveError: `collective-tampered`; the bytes are zero then.
        """

    def direct(self, low: int, high: int) -> Any:
        """Return elements [low, high) as a flat tensor of the region's own memory, or None where tensors meet."""

    def read(self, low: int, high: int) -> Any:
        """Return elements [low, high) as a flat tensor: a copy, good until the next call, where tensors meet."""

    def write(self, low: int, high: int, values: Any) -> None:
        """Store what was computed for [low, high); nothing is copied where `values` is that memory already."""

    def opened(self, size: int, opener: Any, frame: memoryview, buffer: memoryview) -> Any:
        """Verify a received frame and return its `size` bytes as a tensor where this region's tensors are.

        Args:
            size: payload bytes.
            opener: of the frame's stream.
            frame: as received.
            buffer: host memory that may be used for it.
        """

    def blank(self, size: int, dtype: Any, buffer: memoryview) -> Any:
        """Return a tensor to compute in: as many elements as `size` bytes of this region hold, of type `dtype`."""

    def zero(self) -> None:
        """Overwrite everything with zero bytes."""


class HostRegion:
    """Contiguous CPU tensors of one type, one behind the other.

    Args:
        tensors: where the bytes are; they are kept alive.
    """

    __slots__ = ("_flat", "_item", "_only", "_staging", "_starts", "_views", "nbytes")

    suite = Suite.AES_256_GCM
    queue = None

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._flat = [flat(tensor) for tensor in tensors]
        self._views = [bytes_of(tensor) for tensor in self._flat]
        self._starts = [0, *accumulate(len(view) for view in self._views)]
        self._item = self._flat[0].element_size() if self._flat else 1
        self._only = self._views[0] if len(self._views) == 1 else None
        self._staging: Any = None
        self.nbytes = self._starts[-1]

    def seal(self, low: int, high: int, sealer: FrameSealer, frame: memoryview) -> None:
        view = self._within(low, high)
        plaintext = bytes_of(self._collect(low, high)) if view is None else view
        sealer.seal_into(frame[:HEADER_BYTES], plaintext, frame[HEADER_BYTES:])

    def open(self, low: int, high: int, opener: FrameOpener, frame: memoryview) -> None:
        view = self._within(low, high)
        if view is not None:
            opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], view)
            return
        staged = self._stage(high - low)
        opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], bytes_of(staged))
        self._spread(low, high, staged)

    def direct(self, low: int, high: int) -> Any:
        if self._only is not None:
            return self._flat[0][low // self._item : high // self._item]
        index = self._index(low)
        first = self._starts[index]
        if high > self._starts[index + 1]:
            return None
        return self._flat[index][(low - first) // self._item : (high - first) // self._item]

    def read(self, low: int, high: int) -> Any:
        own = self.direct(low, high)
        return self._collect(low, high) if own is None else own

    def write(self, low: int, high: int, values: Any) -> None:
        own = self.direct(low, high)
        if own is None:
            self._spread(low, high, values)
        elif own.data_ptr() != values.data_ptr():
            own.copy_(values)

    def opened(self, size: int, opener: FrameOpener, frame: memoryview, buffer: memoryview) -> Any:
        opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], buffer[:size])
        return torch.frombuffer(buffer, dtype=self._flat[0].dtype, count=size // self._item)

    def blank(self, size: int, dtype: Any, buffer: memoryview) -> Any:
        return torch.frombuffer(buffer, dtype=dtype, count=size // self._item)

    def zero(self) -> None:
        for view in self._views:
            zero(view)

    def _index(self, low: int) -> int:
        """Return the tensor that byte `low` lies in; empty tensors hold no byte."""
        return min(bisect_right(self._starts, low), len(self._flat)) - 1

    def _within(self, low: int, high: int) -> memoryview | None:
        """Return bytes [low, high), or None where several tensors meet in them."""
        if self._only is not None:
            return self._only[low:high]
        if low == high:
            return memoryview(bytearray())
        index = self._index(low)
        first = self._starts[index]
        return self._views[index][low - first : high - first] if high <= self._starts[index + 1] else None

    def _stage(self, size: int) -> Any:
        """Return a flat tensor of `size` bytes, the same memory at every call."""
        if self._staging is None or self._staging.numel() * self._item < size:
            self._staging = torch.empty(size // self._item, dtype=self._flat[0].dtype, device="cpu")
        return self._staging[: size // self._item]

    def _pieces(self, low: int, high: int) -> Iterator[tuple[Any, int]]:
        """Yield the parts of the tensors that [low, high) consists of, each with its first element's place in it."""
        index, at = self._index(low), low
        while at < high:
            first, end = self._starts[index], min(high, self._starts[index + 1])
            if end > at:
                part = self._flat[index][(at - first) // self._item : (end - first) // self._item]
                yield part, (at - low) // self._item
            at, index = max(at, end), index + 1

    def _collect(self, low: int, high: int) -> Any:
        staged = self._stage(high - low)
        for part, at in self._pieces(low, high):
            staged[at : at + part.numel()].copy_(part)
        return staged

    def _spread(self, low: int, high: int, values: Any) -> None:
        for part, at in self._pieces(low, high):
            part.copy_(values[at : at + part.numel()])


class Span:
    """Bytes [low, high) of a region, cut into chunks: what one flow of frames carries.

    An empty span has no chunk, and so no frame.
    """

    __slots__ = ("_chunk_bytes", "_high", "_low", "count", "region")

    def __init__(self, region: Region, low: int, high: int, chunk_bytes: int) -> None:
        self.region = region
        self._low = low
        self._high = high
        self._chunk_bytes = chunk_bytes
        self.count = -(-(high - low) // chunk_bytes)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Return where chunk `chunk` begins and ends in the region."""
        low = self._low + chunk * self._chunk_bytes
        return low, min(low + self._chunk_bytes, self._high)

    def size(self, chunk: int) -> int:
        """Return the bytes of chunk `chunk`."""
        low, high = self.bounds(chunk)
        return high - low
