"""What lies beneath the paths that a worker is shown and must not: sockets and pipes, through which other processes are
reached whatever the mount, and an owner's state, which a training script has no business with.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH110
from __future__ import annotations

import errno
import os
import stat
import time

from glasshouse.runtime.kernel import Kernel

__all__ = ["GIVE_UP_S", "bound_beneath", "search"]

# Warm, 250,000 entries take half a second; on a cold disk several. The agent waits for a minute.
GIVE_UP_S = 40.0

# A project's state folder, and the keys of an owner and of a broker wherever they are kept.
_STATE = frozenset((".glasshouse", "broker.key", "owner.key"))


def bound_beneath(kernel: Kernel, paths: tuple[str, ...]) -> list[str]:
    """Return the Unix sockets of this machine that are bound to absolute names beneath `paths`, however deep.

    The kernel lists those of this process's network namespace, by the names that they were bound with; `search` finds
    the others. This is for a refusal that says at once what is wrong.
    """
    try:
        lines = kernel.read("/proc/net/unix").decode("utf-8", "surrogateescape").splitlines()[1:]
    except OSError:
        return []
    roots = tuple({os.path.realpath(path) + "/" for path in paths})
    names = {fields[7] for line in lines if len(fields := line.split(" ", 7)) == 8 and fields[7].startswith("/")}
    real = {name: os.path.realpath(name) for name in names}
    return sorted(name for name, place in real.items() if place.startswith(roots) and os.path.lexists(place))


def search(paths: list[str], *, give_up_s: float = GIVE_UP_S) -> tuple[list[tuple[str, str]], bool]:
    """Look at everything beneath `paths`.

    Args:
        paths: as the worker sees them; of links, where they lead to is looked at.
        give_up_s: after that many seconds no further folder is looked into.

    Returns:
        ``socket``, ``pipe`` or ``state`` and a path, for each that was found, and ``closed`` for each folder that can
        be passed through but not looked into; and whether everything else was looked at.
    """
    deadline = time.monotonic() + give_up_s
    found: list[tuple[str, str]] = []
    whole, last = True, ""
    for path in sorted({os.path.realpath(path) + "/" for path in paths if os.path.exists(path)}):
        if last and path.startswith(last):
            continue  # it lies beneath one that was looked at
        last, top = path, path.rstrip("/") or "/"
        kind = _special(top)
        found += [(kind, top)] if kind else []
        whole = _beneath(top, deadline, found) and whole
    return found, whole


def _beneath(path: str, deadline: float, found: list[tuple[str, str]]) -> bool:
    """Add what lies beneath one path; return whether all of it was looked at."""
    folders, whole = [path], True
    while folders:
        folder = folders.pop()
        if time.monotonic() >= deadline:
            return False
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name in _STATE:
                        found.append(("state", entry.path))
                    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif kind := _special(entry.path):
                        found.append((kind, entry.path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone, or a file that is shown by itself
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                whole = False
            elif os.access(folder, os.X_OK):
                found.append(("closed", folder))
    return whole


def _special(path: str) -> str | None:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, PermissionError):
        return None  # gone, or in a folder that nothing is reached through; any other error is no answer
    return "socket" if stat.S_ISSOCK(mode) else "pipe" if stat.S_ISFIFO(mode) else None
