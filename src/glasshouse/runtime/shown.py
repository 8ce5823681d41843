"""What lies beneath the paths that a worker is shown and must not: sockets, through which other processes are reached
whatever the mount, and an owner's state, which a training script has no business with.
"""

from __future__ import annotations

import os
import stat

from glasshouse.runtime.kernel import Kernel

__all__ = ["bound_beneath", "search"]

MAX_ENTRIES = 3_000

# A project's state folder, and the keys of an owner and of a broker wherever they are kept.
_STATE = (".glasshouse", "broker.key", "owner.key")


def bound_beneath(kernel: Kernel, paths: tuple[str, ...]) -> list[str]:
    """Return the Unix sockets of this machine that are bound to names beneath `paths`, however deep.

    The kernel lists those of this process's network namespace, by the names that they were bound with.
    """
    try:
        lines = kernel.read("/proc/net/unix").decode("utf-8", "surrogateescape").splitlines()[1:]
    except OSError:
        return []  # what there is is found by its place, as far as `search` looks
    roots = tuple({os.path.realpath(path) + "/" for path in paths})
    names = {fields[7] for line in lines if len(fields := line.split(" ", 7)) == 8 and fields[7].startswith("/")}
    real = {name: os.path.realpath(name) for name in names}
    return sorted(name for name, place in real.items() if place.startswith(roots) and os.path.lexists(place))


def search(paths: list[str], *, limit: int = MAX_ENTRIES) -> tuple[list[tuple[str, str]], bool]:
    """Look beneath each of `paths`, level by level: what a person or a program left lies near the top.

    Args:
        paths: as the worker sees them.
        limit: how many entries to look at beneath each.

    Returns:
        ``socket`` or ``state`` and a path, for each that was found; and whether everything was looked at.
    """
    found: list[tuple[str, str]] = []
    whole, last = True, ""
    for path in sorted(paths):
        if last and path.startswith(last):
            continue  # it lies beneath one that was looked at
        last = path.rstrip("/") + "/"
        found += [("socket", path)] if _is_socket(path) else []
        whole = _search_one(path, limit, found) and whole
    return found, whole


def _search_one(path: str, limit: int, found: list[tuple[str, str]]) -> bool:
    """Add what lies beneath one path; return whether its end was reached."""
    level, looked_at = [path], 0
    while level:
        deeper: list[str] = []
        for folder in level:
            try:
                entries = os.scandir(folder)
            except OSError:
                continue  # a file, or closed to this process
            with entries:
                for entry in entries:
                    looked_at += 1
                    if looked_at > limit:
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        deeper.append(entry.path)
                    kind = _kind(entry)
                    found += [(kind, entry.path)] if kind else []
        level = deeper
    return True


def _kind(entry: os.DirEntry[str]) -> str | None:
    if entry.name in _STATE:
        return "state"
    known = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
    return "socket" if not known and _is_socket(entry.path) else None


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False
