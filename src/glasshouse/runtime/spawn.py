"""Starts a program with chosen descriptors, and none other of this process that is closed on exec."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence

_FIRST_SPARE_FD = 16


def library_path() -> dict[str, str]:
    """Return what a program's environment keeps of where libraries are searched: places that only root can change."""
    # Driver libraries of some images are found by it alone.
    places = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    kept = [place for place in places if place.startswith("/usr/") and os.path.normpath(place) == place.rstrip("/")]
    return {"LD_LIBRARY_PATH": ":".join(kept)} if kept else {}


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
