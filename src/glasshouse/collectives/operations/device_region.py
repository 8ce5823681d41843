"""Tensors on a GPU, sealed and opened where they are; only ciphertext leaves the device.

Laws: plaintext is never copied to host memory; ciphertext goes through one page-locked buffer a queue; what fails to
open is zero on the device before anything behind on the queue's stream sees it, and raises before the caller goes on.
All work of a group on a device happens on the queue's own stream: it begins when the producer's current stream has got
there, and the consumer's current stream waits for its end.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from glasshouse.collectives.operations.regions import Region
from glasshouse.collectives.protocol.frame_memory import bytes_of
from glasshouse.collectives.protocol.headers import HEADER_BYTES, counted
from glasshouse.collectives.protocol.traffic import FrameOpener, FrameSealer, Reserved
from glasshouse.wire.crypto import TAG_BYTES, Suite

_PLAIN = torch.uint8


class Queue:
    """Orders one group's work on one CUDA device (in tests the CPU). Used by one thread at a time.

    Raises:
        PlatformError: `device-missing`, a device that the kernels do not run on.
    """

    def __init__(self, device: Any, *, cipher: Any = None) -> None:
        # Triton is imported where a GPU is used and nowhere else.
        from glasshouse.collectives.kernels.cipher import Cipher, Message

        self._message = Message
        self._cipher = Cipher(device) if cipher is None else cipher
        self.device = self._cipher.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._host = torch.empty(0, dtype=_PLAIN, device="cpu")
        self._sealed = torch.empty(0, dtype=_PLAIN, device=self.device)
        self._twins: dict[int, Any] = {}

    def begin(self) -> None:
        """Make this queue wait for the calling thread's work so far: it makes the inputs."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Make the calling thread's work from now on wait for this queue: it uses the outputs."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Enqueue on this queue whatever is enqueued inside."""
        # In inference mode: a script may reduce tensors that were made in it, from a thread that is not in it.
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def keep(self, tensor: Any) -> None:
        """Keep a tensor's memory from being used for another before this queue is through with it."""
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
        size = source.numel()
        sealed, host = self._stages(size + TAG_BYTES)
        one = self._message(**reserved._asdict(), source=source, destination=sealed[:size], tag=sealed[size:])
        self._cipher.seal([one])
        host.copy_(sealed, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        out[:] = bytes_of(host)

    def open(self, data: memoryview, reserved: Reserved, destination: Any) -> bool:
        """Copy ciphertext and tag to the device and open them; return whether they were authentic.

        If not, `destination` is zero.
        """
        size = destination.numel()
        sealed, host = self._stages(size + TAG_BYTES)
        bytes_of(host)[:] = data
        sealed.copy_(host, non_blocking=True)
        one = self._message(**reserved._asdict(), source=sealed[:size], destination=destination, tag=sealed[size:])
        # Also waits until the host buffer has been read: it comes next on the same stream.
        verdicts: tuple[bool, ...] = self._cipher.open([one]).wait()
        return verdicts == (True,)

    def close(self) -> None:
        """Wipe the keys that are left in host memory, and release all buffers."""
        with self.within():
            self._cipher.close()
        self._twins.clear()
        self._host, self._sealed = self._host[:0], self._sealed[:0]

    def _stages(self, size: int) -> tuple[Any, Any]:
        if self._host.numel() < size:
            self._host = torch.empty(size, dtype=_PLAIN, device="cpu", pin_memory=self._stream is not None)
            self._sealed = torch.empty(size, dtype=_PLAIN, device=self.device)
        return self._sealed[:size], self._host[:size]


class DeviceRegion(Region):
    """Tensors on a device, for ChaCha20-Poly1305; everything but making one happens within its queue."""

    suite = Suite.CHACHA20_POLY1305

    def __init__(self, tensors: Sequence[Any], queue: Queue) -> None:
        if any(tensor.device != queue.device for tensor in tensors):
            raise ValueError(f"only tensors on {queue.device} belong to its queue")
        super().__init__(tensors)
        self.queue = queue
        for tensor in self._flat:
            queue.keep(tensor)

    def seal(self, low: int, high: int, sealer: FrameSealer, frame: memoryview) -> None:
        reserved = sealer.reserve(frame[:HEADER_BYTES], high - low)
        self.queue.seal(self.read(low, high).view(_PLAIN), reserved, frame[HEADER_BYTES:])

    def blank(self, size: int, dtype: Any, buffer: memoryview) -> Any:
        return self.queue.twin(buffer, size // self._item * dtype.itemsize).view(dtype)

    def _open_into(self, target: Any, opener: FrameOpener, frame: memoryview) -> None:
        header, destination = frame[:HEADER_BYTES], target.view(_PLAIN)
        size = destination.numel()
        try:
            reserved = opener.admit(header)
            fits = counted(header)[0] == size and len(frame) == HEADER_BYTES + size + TAG_BYTES
            if not fits or not self.queue.open(frame[HEADER_BYTES:], reserved, destination):
                raise opener.refuse(header)
        except BaseException:
            destination.zero_()
            raise
