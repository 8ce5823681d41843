"""Tensors on a GPU as the engine sees them: sealed and opened where they are; only ciphertext leaves the device.

Laws: plaintext is never copied to host memory; ciphertext goes through one page-locked buffer a queue; what fails to
open is zero on the device before anything behind on the queue's stream sees it, and raises before the caller goes on.
All work of a group on a device happens on the queue's own stream: it begins when the producer's current stream has got
there, and the consumer's current stream waits for its end. The suite is ChaCha20-Poly1305; counters, keys and headers
are those of `sealing`: a rank with its tensors on a GPU and one with them in host memory differ in the suite, and are
told so.
"""

from __future__ import annotations

import contextlib
import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from glasshouse.collectives.protocol.frame_memory import bytes_of
from glasshouse.collectives.protocol.headers import HEADER_BYTES, TAG_BYTES, Bytes, counted
from glasshouse.collectives.protocol.traffic import Reserved
from glasshouse.errors import CollectiveError
from glasshouse.wire.aead import Suite

__all__ = ["CHUNK_BYTES", "DeviceRegion", "Queue"]

CHUNK_BYTES = 4 << 20
"""A launch and its way there and back take as long as moving half a MiB: chunks of a device are larger."""

_PLAIN = torch.uint8


class FrameReserver(Protocol):
    """What a region on a device needs of `sealing.Sealer`."""

    def reserve(self, header: bytearray | memoryview, size: int) -> Reserved: ...


class FrameAdmitter(Protocol):
    """What a region on a device needs of `sealing.Opener`."""

    def admit(self, header: Bytes) -> Reserved: ...

    def refuse(self, header: Bytes) -> CollectiveError: ...


class Queue:
    """Where one group's work on one device is done, in order. Used by one thread at a time.

    Args:
        device: a CUDA device; the CPU under Triton's interpreter only (in tests).
        cipher: a `kernels.aead.Cipher` for it; one of its own by default.

    Raises:
        PlatformError: `device-missing`, a device that the kernels do not run on.
    """

    def __init__(self, device: Any, *, cipher: Any = None) -> None:
        if cipher is None:
            from glasshouse.collectives.kernels.cipher import Cipher  # Triton, where a GPU is used and nowhere else

            cipher = Cipher(device)
        self.cipher = cipher
        self.device = cipher.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._host = torch.empty(0, dtype=_PLAIN, device="cpu")
        self._sealed = torch.empty(0, dtype=_PLAIN, device=self.device)
        self._twins: dict[int, Any] = {}

    def begin(self) -> None:
        """Have this queue wait for what the calling thread has enqueued so far: it makes the inputs."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Have what the calling thread enqueues from now on wait for this queue: it uses the outputs."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Enqueue on this queue whatever is enqueued inside.

        In inference mode: a script may reduce tensors that were made in it, from a thread that is not in it; buffers
        made here are only used here.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def keep(self, tensor: Any) -> None:
        """Have a tensor's memory not be used for another before this queue is through with it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def twin(self, buffer: memoryview, size: int) -> Any:
        """Return `size` bytes on the device that belong to a buffer in host memory: the same for the same buffer."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0
        known = self._twins.get(address)
        if known is None or known.numel() < size:
            known = self._twins[address] = torch.empty(max(size, len(buffer)), dtype=_PLAIN, device=self.device)
        return known[:size]

    def seal(self, source: Any, reserved: Reserved, out: memoryview) -> None:
        """Seal flat bytes on the device, and copy ciphertext and tag to `out` in host memory."""
        from glasshouse.collectives.kernels.cipher import Message

        size = source.numel()
        sealed, host = self._stages(size + TAG_BYTES)
        self.cipher.seal(
            [
                Message(
                    key=reserved.key,
                    nonce=reserved.nonce,
                    associated_data=reserved.associated_data,
                    source=source,
                    destination=sealed[:size],
                    tag=sealed[size:],
                )
            ]
        )
        host.copy_(sealed, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        out[:] = bytes_of(host)

    def open(self, data: memoryview, reserved: Reserved, destination: Any) -> bool:
        """Copy ciphertext and tag to the device and open them; return whether they were authentic.

        If not, `destination` is zero.
        """
        from glasshouse.collectives.kernels.cipher import Message

        size = destination.numel()
        sealed, host = self._stages(size + TAG_BYTES)
        bytes_of(host)[:] = data
        sealed.copy_(host, non_blocking=True)
        message = Message(
            key=reserved.key,
            nonce=reserved.nonce,
            associated_data=reserved.associated_data,
            source=sealed[:size],
            destination=destination,
            tag=sealed[size:],
        )
        # Also waits until the host buffer has been read: it comes next on the same stream.
        verdicts: tuple[bool, ...] = self.cipher.open([message]).wait()
        return verdicts == (True,)

    def close(self) -> None:
        """Wipe what is left of keys in host memory, and let go of all buffers."""
        with self.within():
            self.cipher.close()
        self._twins.clear()
        self._host, self._sealed = self._host[:0], self._sealed[:0]

    def _stages(self, size: int) -> tuple[Any, Any]:
        if self._host.numel() < size:
            self._host = torch.empty(size, dtype=_PLAIN, device="cpu", pin_memory=self._stream is not None)
            self._sealed = torch.empty(size, dtype=_PLAIN, device=self.device)
        return self._sealed[:size], self._host[:size]


class DeviceRegion:
    """Contiguous tensors of one type on one device, one behind the other: a `memory.Region`.

    Everything but making one happens within the queue.

    Args:
        tensors: where the bytes are.
        queue: of their device.
    """

    __slots__ = ("_flat", "_item", "_plain", "_staging", "_starts", "nbytes", "queue")

    suite = Suite.CHACHA20_POLY1305

    def __init__(self, tensors: Sequence[Any], queue: Queue) -> None:
        if any(tensor.device != queue.device or not tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"only contiguous tensors on {queue.device} belong to its queue")
        self.queue = queue
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self._plain = [flat.view(_PLAIN) for flat in self._flat]
        self._starts = [0, *accumulate(plain.numel() for plain in self._plain)]
        self._item = self._flat[0].element_size() if self._flat else 1
        self._staging: Any = None
        self.nbytes = self._starts[-1]
        for plain in self._plain:
            queue.keep(plain)

    def seal(self, low: int, high: int, sealer: FrameReserver, frame: memoryview) -> None:
        reserved = sealer.reserve(frame[:HEADER_BYTES], high - low)
        source = self._bytes(low, high)
        self.queue.seal(self._collect(low, high) if source is None else source, reserved, frame[HEADER_BYTES:])

    def open(self, low: int, high: int, opener: FrameAdmitter, frame: memoryview) -> None:
        destination = self._bytes(low, high)
        if destination is not None:
            self._open(opener, frame, destination)
            return
        staged = self._stage(high - low)
        self._open(opener, frame, staged)
        self._spread(low, high, staged)

    def direct(self, low: int, high: int) -> Any:
        index = self._index(low)
        first = self._starts[index]
        if high > self._starts[index + 1]:
            return None
        return self._flat[index][(low - first) // self._item : (high - first) // self._item]

    def read(self, low: int, high: int) -> Any:
        own = self.direct(low, high)
        return self._collect(low, high).view(self._flat[0].dtype) if own is None else own

    def write(self, low: int, high: int, values: Any) -> None:
        own = self.direct(low, high)
        if own is None:
            # What was computed in a wider type is rounded here, as `copy_` rounds it elsewhere.
            self._spread(low, high, values.to(self._flat[0].dtype).view(_PLAIN))
        elif own.data_ptr() != values.data_ptr():
            own.copy_(values)

    def opened(self, size: int, opener: FrameAdmitter, frame: memoryview, buffer: memoryview) -> Any:
        destination = self.queue.twin(buffer, size)
        self._open(opener, frame, destination)
        return destination.view(self._flat[0].dtype)

    def blank(self, size: int, dtype: Any, buffer: memoryview) -> Any:
        return self.queue.twin(buffer, size // self._item * dtype.itemsize).view(dtype)

    def zero(self) -> None:
        for plain in self._plain:
            plain.zero_()

    def _open(self, opener: FrameAdmitter, frame: memoryview, destination: Any) -> None:
        header, size = frame[:HEADER_BYTES], destination.numel()
        try:
            reserved = opener.admit(header)
            if counted(header)[0] != size or len(frame) != HEADER_BYTES + size + TAG_BYTES:
                raise opener.refuse(header)
            if not self.queue.open(frame[HEADER_BYTES:], reserved, destination):
                raise opener.refuse(header)
        except BaseException:
            destination.zero_()
            raise

    def _index(self, low: int) -> int:
        """Return the tensor that byte `low` lies in; empty tensors hold no byte."""
        return min(bisect_right(self._starts, low), len(self._flat)) - 1

    def _bytes(self, low: int, high: int) -> Any:
        """Return [low, high) as bytes of one tensor, or None where several meet."""
        index = self._index(low)
        first = self._starts[index]
        return self._plain[index][low - first : high - first] if high <= self._starts[index + 1] else None

    def _stage(self, size: int) -> Any:
        """Return `size` bytes on the device, the same memory at every call."""
        if self._staging is None or self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=_PLAIN, device=self.queue.device)
        return self._staging[:size]

    def _pieces(self, low: int, high: int) -> Iterator[tuple[Any, int]]:
        """Yield the parts of the tensors that [low, high) consists of, each with its place in it."""
        index, at = self._index(low), low
        while at < high:
            first, end = self._starts[index], min(high, self._starts[index + 1])
            if end > at:
                yield self._plain[index][at - first : end - first], at - low
            at, index = max(at, end), index + 1

    def _collect(self, low: int, high: int) -> Any:
        staged = self._stage(high - low)
        for part, at in self._pieces(low, high):
            staged[at : at + part.numel()].copy_(part)
        return staged

    def _spread(self, low: int, high: int, values: Any) -> None:
        for part, at in self._pieces(low, high):
            part.copy_(values[at : at + part.numel()])
