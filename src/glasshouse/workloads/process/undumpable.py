"""The first acts of a worker: no core dump, and no reading by processes of the same user.

`execve` makes a process dumpable again, so the worker does this itself and only then sends `ready`; the agent reads the
result back from the kernel. Imports next to nothing: the agent waits for it.
"""

from __future__ import annotations

import ctypes
import resource
import sys

_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4


def close_to_others() -> None:
    """Set core limit 0 and, on Linux, dumpable 0; raises `OSError` where the kernel does not do it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not sys.platform.startswith("linux"):
        return  # only a raw leg runs elsewhere; the agent, and so the protected leg, is Linux alone
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0 or libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel does not let a process refuse being dumped")
