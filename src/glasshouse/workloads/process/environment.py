"""What a worker sets in its own process: variables and folders that frameworks expect, threads, the heap's limits."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

# man 3 mallopt
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 512 << 20
_MMAP_BYTES = 32 << 20  # the most that glibc takes here


def sockets_open() -> bool:
    """Return whether an internet socket may be made at all, if only for a loopback."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def egress_open() -> bool:
    """Return whether there is a network to reach anything by: ranks have sockets, and no route."""
    for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.connect((address, 9))  # sends nothing: the kernel looks for a route
        except OSError:
            continue
        return True
    return False


def import_uncollected(warm: Callable[[], None]) -> None:
    """Call `warm`, and collect no garbage while it imports, nor walk what it imported again.

    Thousands of modules are all kept: collections were a sixth of the processor time that they take.
    """
    gc.disable()
    try:
        warm()
    finally:
        gc.freeze()
        gc.enable()


def prepare(workspace: Path, *, protected: bool) -> None:
    """Point temporary files and, but for the raw leg, caches into the workspace and turn telemetry off.

    Called before any framework is imported.
    """
    scratch = workspace / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    values = {
        "TMPDIR": str(scratch),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if protected:
        cache = str(workspace / "cache")
        values |= {
            "HOME": str(workspace),
            "XDG_CACHE_HOME": cache,
            "HF_HOME": cache + "/huggingface",
            "TORCH_HOME": cache + "/torch",
            "TORCHINDUCTOR_CACHE_DIR": cache + "/inductor",
            "TRITON_CACHE_DIR": cache + "/triton",
            "MPLCONFIGDIR": cache + "/matplotlib",
            "CUDA_CACHE_PATH": cache + "/cuda",
        }
        if not egress_open():
            values["HF_HUB_OFFLINE"] = "1"
    os.environ.update(values)
    if "tempfile" in sys.modules:  # else it chooses from TMPDIR when it is imported
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]


def fix_threads(threads: int) -> None:
    """Fix the thread count of numeric libraries that are imported later."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ[name] = str(threads)


def keep_freed_memory() -> bool:
    """Keep the memory that a step frees for the step after it; return whether this C library has and took both limits.

    glibc returns the end of its heap to the kernel when more than 128 KiB of it are free, and takes blocks of that size
    from it one by one. Whether a step crosses these limits depends on what lies behind it in memory: in one process and
    not in the next, pages are given back, taken again and zeroed, which takes a fifth of a step of `mlp`.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False  # not glibc
    return all([set_option(_M_TRIM_THRESHOLD, _TRIM_BYTES) == 1, set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES) == 1])
