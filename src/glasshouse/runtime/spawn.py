"""Starts a program with chosen descriptors, and none other of this process; and what its environment may hold."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence

_FIRST_SPARE_FD = 16
# Environment variables that make the loader take other libraries.
# LD_LIBRARY_PATH is not among them: driver images set it; what it led to is seen in the mappings.
PRELOADING = ("GCONV_PATH", "LD_AUDIT", "LD_PRELOAD", "LD_PROFILE")
# Those that make programs print more than they should.
DEBUGGING = (
    "GLIBC_TUNABLES", "LD_DEBUG", "LD_DEBUG_OUTPUT", "MALLOC_CHECK_", "MALLOC_PERTURB_", "MALLOC_TRACE",
    "PYTHONBREAKPOINT", "PYTHONDEBUG", "PYTHONDUMPREFS", "PYTHONFAULTHANDLER", "PYTHONINSPECT",
    "PYTHONMALLOCSTATS", "PYTHONSTARTUP", "PYTHONTRACEMALLOC", "PYTHONVERBOSE", "SSLKEYLOGFILE",
)  # fmt: skip


def library_path() -> dict[str, str]:
    """Return what a program's environment keeps of where libraries are searched: places that only root can change."""
    # Driver libraries of some images are found by it alone.
    places = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    kept = [place for place in places if place.startswith("/usr/") and os.path.normpath(place) == place.rstrip("/")]
    return {"LD_LIBRARY_PATH": ":".join(kept)} if kept else {}


def foreign_libraries(read: Callable[[str], bytes], names: list[str]) -> list[str]:
    """Return what would load foreign code into a process started with these environment variables."""
    found = [] if set(PRELOADING).isdisjoint(names) else ["preloading"]
    try:
        if read("/etc/ld.so.preload").strip():
            found.append("ld.so.preload")
    except OSError:
        pass
    return found


def spawn(
    argv: list[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    *,
    blocked: Sequence[int] = (),
    defaults: Sequence[int] = (),
) -> int:
    """Start a program and return its process id; raises `OSError`.

    It gets `descriptors` as its 0, 1, 2 and so on; signals of `blocked` are blocked, those of `defaults` as by default.
    """
    # Out of the way of the numbers that they get.
    spare = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE_FD) for one in descriptors]
    try:
        return os.posix_spawn(
            argv[0],
            argv,
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(spare)],
            setsigmask=blocked,
            setsigdef=defaults,
        )
    finally:
        for one in spare:
            os.close(one)
