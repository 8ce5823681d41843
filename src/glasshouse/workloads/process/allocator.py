"""Keeps the memory that a step frees for the step after it, where the C library would give it back each time.

glibc returns the end of its heap to the kernel when more than 128 KiB of it are free, and takes blocks of that size
from it one by one. Whether a step crosses these limits depends on what lies behind it in memory: in one process and not
in the next, pages are given back, taken again and zeroed, which takes a fifth of a step of `mlp`.
"""

from __future__ import annotations

import ctypes

# man 3 mallopt
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 512 << 20
_MMAP_BYTES = 32 << 20  # the most that glibc takes here


def keep_freed_memory() -> bool:
    """Fix both limits high; return whether this C library has them and took them."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False  # not glibc
    return all([set_option(_M_TRIM_THRESHOLD, _TRIM_BYTES) == 1, set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES) == 1])
