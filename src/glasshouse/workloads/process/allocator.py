"""Keeps the memory that a step frees for the step after it, where the C library would give it back each time.

A step on the CPU frees all that it took. glibc returns the end of its heap to the kernel when more than 128 KiB of it
are free, and takes blocks of that size from the kernel one by one; both limits grow by themselves, but whether a step
still crosses them depends on what happens to lie behind it in memory. Then each step has hundreds of pages given
back, taken again and zeroed, in one process and not in the next: a fifth of a step of `mlp`, and more than any
difference between a raw and a protected run.
"""

from __future__ import annotations

import ctypes

# man 3 mallopt
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 512 << 20
_MMAP_BYTES = 32 << 20  # the most that glibc takes here


def keep_freed_memory() -> bool:
    """Fix both limits high; return whether this C library knows them and took them."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False  # not glibc
    return all([set_option(_M_TRIM_THRESHOLD, _TRIM_BYTES) == 1, set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES) == 1])
