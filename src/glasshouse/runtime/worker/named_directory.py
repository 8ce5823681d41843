"""A directory of the agent's own that other processes could see by name.

It holds the targets of the launcher's trials for a moment; only where no private root can be is it the worker's
workspace, in the largest memory file system that this user may write to: on a disk it lies where there is none, or too
small a one and the owner allows it. The agent holds a lock (`flock`) on it until it is removed, and the kernel lets go
of that with the agent: so the next start, or the owner's side, removes what a killed agent left, and nothing that is in
use, in whatever container that may be. Versions before held no lock: for theirs the process in the name counts, too.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH102, PTH106, PTH112, PTH116
from __future__ import annotations

import fcntl
import os

from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.confine import memory_limits, mounts
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.watchdog.session_record import Process

_PREFIX = "glasshouse-ws-"
_TRIES = 3
_MEMORY = "tmpfs"
_SHARED = "/dev/shm"  # noqa: S108
_OF_THE_KERNEL = ("/dev/", "/proc/", "/sys/")


class NamedDirectory:
    """Such a directory, made by `make`."""

    def __init__(self, path: str, lock: int) -> None:
        self.path, self._lock = path, lock

    def remove(self) -> bool:
        """Remove it with all that is in it; return whether it is gone. May be called twice."""
        gone = _gone(self.path)
        if self._lock >= 0:
            os.close(self._lock)  # what stays is for the next start
            self._lock = -1
        return gone


def make(parents: list[str] | None = None, *, least_bytes: int = 0, disk: bool = False) -> NamedDirectory:
    """Make an empty directory, readable by this user alone, in memory where there is; raises `PlatformError`.

    It lies in the first of `parents` that can be, by default of what this machine has; where memory has less room than
    `least_bytes`, rather on the disk, if `disk` permits it.
    """
    name = f"{_PREFIX}{os.getpid()}-{_begun(str(os.getpid()))}-"
    if parents is None:
        memory = _in_memory()
        others = _elsewhere(memory)
        small = not memory or _free_bytes(memory[0]) < least_bytes
        parents = others + memory if small and disk else memory + others
    for parent in [parent for parent in parents for _ in range(_TRIES)]:
        path = f"{parent}/{name}{os.urandom(8).hex()}"
        try:
            os.mkdir(path, 0o700)
        except OSError:
            continue
        try:
            return NamedDirectory(path, _lock(path))
        except OSError:
            _gone(path)  # another container looked in this very moment; or there are no locks here
    raise PlatformError(Code.PLATFORM, "this machine has no directory for a workspace")


def room(path: str) -> tuple[bool, int]:
    """Return whether a directory lies in memory, and how many bytes have room there."""
    try:
        mount = mounts.MountTable.read(REAL.read).at(os.path.realpath(path))
        return mount is not None and mount.kind == _MEMORY, _free_bytes(path)
    except (OSError, ValueError):
        return False, 0


def largest() -> tuple[str, int] | None:
    """Return the memory file system with the most room, and how many bytes that is; None where there is none."""
    memory = _in_memory()
    return (memory[0], _free_bytes(memory[0])) if memory else None


def sweep(parents: list[str] | None = None) -> int:
    """Remove what agents that are gone have left of this user's; return how many of them are gone now."""
    return sum(remove_left(path) for path in left(parents))


def left(parents: list[str] | None = None) -> list[str]:
    """Return this user's directories whose agent is gone."""
    found: list[str] = []
    if parents is None:
        memory = _in_memory()
        parents = memory + _elsewhere(memory)
    for parent in parents:
        try:
            with os.scandir(parent) as entries:
                found += [entry.path for entry in entries if entry.name.startswith(_PREFIX) and _is_left(entry)]
        except OSError:
            continue  # not there, or not to be listed: by no name can it be found
    return sorted(found)


def remove_left(path: str) -> bool:
    """Remove one of those with all that is in it; return whether it is gone."""
    try:
        lock = _lock(path)
    except OSError:
        return not os.path.lexists(path)
    try:
        return _gone(path)
    finally:
        os.close(lock)


def _is_left(entry: os.DirEntry[str]) -> bool:
    try:
        own = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        pid, _, rest = entry.name[len(_PREFIX) :].partition("-")
        # Where that process is, it may be of a version that holds no lock; elsewhere the number means nothing.
        if not own or rest.partition("-")[0] == _begun(pid):
            return False
        os.close(_lock(entry.path))
    except OSError:
        return False
    return True


def _lock(path: str) -> int:
    """Return a descriptor that holds the lock; raises `OSError` where another does, or it was removed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        from glasshouse.runtime.worker import tree_removal

        descriptor = tree_removal.opened(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise FileNotFoundError(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _gone(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        # Only a worker without a private root leaves files here; the module costs 3 ms to compile.
        from glasshouse.runtime.worker import tree_removal

        return tree_removal.removed(path)
    return True


def _in_memory() -> list[str]:
    """Return the memory file systems that this user may write to, the one with the most room first."""
    try:
        places = mounts.MountTable.read(REAL.read).places(_MEMORY)
    except (OSError, ValueError):
        return []  # no Linux, or no table
    own = [place for place in places if place == _SHARED or not (place + "/").startswith(_OF_THE_KERNEL)]
    return sorted((place for place in own if os.access(place, os.W_OK | os.X_OK)), key=_free_bytes, reverse=True)


def _elsewhere(memory: list[str]) -> list[str]:
    paths = (_SHARED, os.environ.get("TMPDIR", "/tmp"))  # noqa: S108
    return [path for path in paths if path not in memory and os.path.isdir(path)]


def _free_bytes(path: str) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    # One without a limit of its own reports no blocks at all.
    return found.f_bavail * found.f_frsize if found.f_blocks else memory_limits.available_bytes()


def _begun(pid: str) -> str:
    """Return when a process started, in clock ticks, or nothing when there is no such process."""
    try:
        return str(Process.of(int(pid)).started)
    except (OSError, ValueError, IndexError):
        return ""
