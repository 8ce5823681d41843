"""Memory that frames are sealed from and opened into: tensors as bytes, and the buffers of ciphertext.

Laws: a view of a tensor never owns or resizes its storage (a tensor that went through `numpy()` can no longer be
resized, which FSDP does); the buffers of a group are bounded by its chunk size and world size, never by a tensor's.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from glasshouse.wire.crypto import zero

CHUNK_BYTES = 1 << 20  # the largest chunk in host memory: its ciphertext and plaintext lie in a core's cache together
SHARED_FRAMES = 4  # frames for every peer that are sealed and not yet sent to the last

_HUGE_PAGE = 2 << 20
_READ_WRITE = 0x200

_view_of: Callable[[int, int, int], memoryview] = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object  # type: ignore[attr-defined]
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)  # type: ignore[attr-defined]


def bytes_of(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable; valid as long as the caller holds the tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor in host memory can be seen as bytes")
    size = tensor.numel() * tensor.element_size()
    return _view_of(tensor.data_ptr(), size, _READ_WRITE) if size else memoryview(bytearray())


class Buffers:
    """A pool of at most `limit` buffers of `size` bytes each."""

    def __init__(self, size: int, limit: int, make: Callable[[int], memoryview] | None = None) -> None:
        self.size = size
        self._limit = limit
        self._make = make or allocate
        self.short = False  # whether the last `take` found none
        self._free: list[memoryview] = []
        self._made: list[memoryview] = []

    @property
    def available(self) -> bool:
        """Whether `take` has one."""
        return bool(self._free or len(self._made) < self._limit)

    def take(self) -> memoryview | None:
        """Return a free buffer, or None."""
        self.short = not self.available
        if self.short:
            return None
        if self._free:
            return self._free.pop()
        self._made.append(self._make(self.size))
        return self._made[-1]

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer to the pool; the one used last is the next one out, while it is in the caches."""
        self._free.append(buffer)

    def wipe(self) -> None:
        """Zero all of them, also those that are out."""
        for made in self._made:
            zero(made)


def allocate(size: int) -> memoryview:
    """Return fresh zeroed memory, in huge pages where the system has them: the cipher walks through all of it."""
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)
