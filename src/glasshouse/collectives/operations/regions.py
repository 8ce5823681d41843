"""Tensors of one type seen as one run of bytes, cut into chunks: the source and the destination of frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch

from glasshouse.collectives.protocol.frame_memory import bytes_of
from glasshouse.collectives.protocol.headers import HEADER_BYTES, Element, counted
from glasshouse.collectives.protocol.traffic import FrameOpener, FrameSealer
from glasshouse.wire.crypto import TAG_BYTES, Suite

ELEMENTS: dict[Any, Element] = {
    getattr(torch, name): element
    for element in Element
    if element is not Element.NONE and hasattr(torch, name := element.name.lower())
}
"""The code of every torch.dtype that can travel."""

_COPIED_BYTES = 1 << 20


def flat(tensor: Any) -> Any:
    """Return a contiguous tensor's elements in one dimension, without its gradient's history."""
    if not tensor.is_contiguous():
        raise ValueError("only contiguous tensors are exchanged")
    return tensor.detach() if tensor.dim() == 1 else tensor.detach().view(-1)


def within(queue: Any) -> AbstractContextManager[None]:
    """Return a context whose work is enqueued on a device's queue; one without effect for None, host memory."""
    return nullcontext() if queue is None else queue.within()


class Region(ABC):
    """Contiguous tensors of one type on one device, one behind the other, kept alive. All offsets are in bytes."""

    suite: Suite  # the cipher that reaches the tensors
    queue: Any  # the `cipher.Queue` that orders work on them; None for tensors in host memory

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._flat = [flat(tensor) for tensor in tensors]
        self._item = self._flat[0].element_size() if self._flat else 1
        self._starts = [0, *accumulate(tensor.numel() * self._item for tensor in self._flat)]
        self._staging: Any = None
        self.nbytes = self._starts[-1]

    @abstractmethod
    def seal(self, low: int, high: int, sealer: FrameSealer, frame: memoryview) -> None:
        """Seal bytes [low, high) into `frame`, whose header is packed but for length and counter."""

    def open(self, low: int, high: int, opener: FrameOpener, frame: memoryview) -> None:
        """Verify a received frame and open it into bytes [low, high).

        Raises:
            CollectiveError: `collective-tampered`; the bytes are zero then.
        """
        own = self.direct(low, high)
        target = self._stage(high - low) if own is None else own
        self._open_into(target, opener, frame)
        if own is None:
            self._spread(low, high, target)

    def opened(self, size: int, opener: FrameOpener, frame: memoryview, buffer: memoryview) -> Any:
        """Verify a frame and return its `size` bytes as a tensor on this device, in `buffer` if that is the host."""
        target = self.blank(size, self._flat[0].dtype, buffer)
        self._open_into(target, opener, frame)
        return target

    @abstractmethod
    def blank(self, size: int, dtype: Any, buffer: memoryview) -> Any:
        """Return a tensor to compute in: as many elements as `size` bytes of this region hold, of type `dtype`."""

    def direct(self, low: int, high: int) -> Any:
        """Return elements [low, high) as a flat tensor of the region's own memory, or None where tensors meet."""
        if len(self._flat) == 1:
            return self._flat[0][low // self._item : high // self._item]
        index = self._index(low)
        first = self._starts[index]
        if high > self._starts[index + 1]:
            return None
        return self._flat[index][(low - first) // self._item : (high - first) // self._item]

    def read(self, low: int, high: int) -> Any:
        """Return elements [low, high) as a flat tensor: a copy, good until the next call, where tensors meet."""
        if (own := self.direct(low, high)) is not None:
            return own
        staged = self._stage(high - low)
        for part, at in self._pieces(low, high):
            staged[at : at + part.numel()].copy_(part)
        return staged

    def write(self, low: int, high: int, values: Any) -> None:
        """Store the result for [low, high); nothing is copied where `values` is that memory already."""
        own = self.direct(low, high)
        if own is None:
            self._spread(low, high, values)
        elif own.data_ptr() != values.data_ptr():
            own.copy_(values)

    def zero(self) -> None:
        """Overwrite everything with zero bytes."""
        for tensor in self._flat:
            tensor.zero_()

    @abstractmethod
    def _open_into(self, target: Any, opener: FrameOpener, frame: memoryview) -> None:
        """Verify a received frame and open it into a flat tensor, which is zero where that fails."""

    def _index(self, low: int) -> int:
        """Return the tensor that byte `low` lies in; empty tensors hold no byte."""
        return min(bisect_right(self._starts, low), len(self._flat)) - 1

    def _stage(self, size: int) -> Any:
        """Return a flat tensor of `size` bytes, the same memory at every call."""
        count, first = size // self._item, self._flat[0]
        if self._staging is None or self._staging.numel() < count:
            self._staging = torch.empty(count, dtype=first.dtype, device=first.device)
        return self._staging[:count]

    def _pieces(self, low: int, high: int) -> Iterator[tuple[Any, int]]:
        """Yield the parts of the tensors that [low, high) consists of, each with its first element's place in it."""
        index, at = self._index(low), low
        while at < high:
            first, end = self._starts[index], min(high, self._starts[index + 1])
            if end > at:
                part = self._flat[index][(at - first) // self._item : (end - first) // self._item]
                yield part, (at - low) // self._item
            at, index = max(at, end), index + 1

    def _spread(self, low: int, high: int, values: Any) -> None:
        for part, at in self._pieces(low, high):
            part.copy_(values[at : at + part.numel()])


class HostRegion(Region):
    """Tensors in host memory, for AES-256-GCM."""

    suite = Suite.AES_256_GCM

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__(tensors)
        self.queue = None
        # Most regions are one tensor, or none: their chunks are slices of one view.
        self._view = bytes_of(self._flat[0]) if len(tensors) == 1 else None if tensors else memoryview(bytearray())

    def seal(self, low: int, high: int, sealer: FrameSealer, frame: memoryview) -> None:
        plaintext = bytes_of(self.read(low, high)) if self._view is None else self._view[low:high]
        sealer.seal_into(frame[:HEADER_BYTES], plaintext, frame[HEADER_BYTES:])

    def open(self, low: int, high: int, opener: FrameOpener, frame: memoryview) -> None:
        if self._view is None:
            super().open(low, high, opener, frame)
        else:
            opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], self._view[low:high])

    def opened(self, size: int, opener: FrameOpener, frame: memoryview, buffer: memoryview) -> Any:
        opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], buffer[:size])
        return self.blank(size, self._flat[0].dtype, buffer)

    def blank(self, size: int, dtype: Any, buffer: memoryview) -> Any:
        return torch.frombuffer(buffer, dtype=dtype, count=size // self._item)

    def _open_into(self, target: Any, opener: FrameOpener, frame: memoryview) -> None:
        opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], bytes_of(target))


class DeviceRegion(Region):
    """Tensors on a device, for ChaCha20-Poly1305; everything but making one happens within its queue."""

    suite = Suite.CHACHA20_POLY1305

    def __init__(self, tensors: Sequence[Any], queue: Any) -> None:
        if any(tensor.device != queue.device for tensor in tensors):
            raise ValueError(f"only tensors on {queue.device} belong to its queue")
        super().__init__(tensors)
        self.queue = queue
        for tensor in self._flat:
            queue.keep(tensor)

    def seal(self, low: int, high: int, sealer: FrameSealer, frame: memoryview) -> None:
        reserved = sealer.reserve(frame[:HEADER_BYTES], high - low)
        self.queue.seal(self.read(low, high).view(torch.uint8), reserved, frame[HEADER_BYTES:])

    def blank(self, size: int, dtype: Any, buffer: memoryview) -> Any:
        return self.queue.twin(buffer, size // self._item * dtype.itemsize).view(dtype)

    def _open_into(self, target: Any, opener: FrameOpener, frame: memoryview) -> None:
        header, destination = frame[:HEADER_BYTES], target.view(torch.uint8)
        size = destination.numel()
        try:
            reserved = opener.admit(header)
            fits = counted(header)[0] == size and len(frame) == HEADER_BYTES + size + TAG_BYTES
            if not fits or not self.queue.open(frame[HEADER_BYTES:], reserved, destination):
                raise opener.refuse(header)
        except BaseException:
            destination.zero_()
            raise


class Span:
    """Bytes [low, high) of a region, cut into chunks: the content of one flow of frames.

    An empty span has no chunk, and so no frame.
    """

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


def copy(source: Region, out: Region, change: Callable[[Any], Any] = lambda values: values) -> None:
    """Copy a region of this rank to another of the same size, a chunk at a time, through `change`."""
    if source.nbytes != out.nbytes:
        raise ValueError(f"a tensor of {out.nbytes} bytes where one of {source.nbytes} is needed")
    for low in range(0, out.nbytes, _COPIED_BYTES):
        high = min(low + _COPIED_BYTES, out.nbytes)
        out.write(low, high, change(source.read(low, high)))
