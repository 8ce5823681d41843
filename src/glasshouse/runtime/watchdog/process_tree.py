"""Reads the state of every thread of a process and of everything that descends from it, from /proc.

Laws: a thread counts as ended only where the kernel answers ENOENT or ESRCH, and a process only where it cannot be
signalled either; whatever else keeps a thread from being seen (no descriptor left, no memory, no permission, a /proc
that hides processes) makes the look incomplete, and `TreeState.complete` false. Files are read to their end. Threads
and children that come and go during a look may be missed by it, and by that one alone.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass, field

# Descriptors kept open from one look to the next: an open file of /proc holds about 6 kB of the kernel's memory.
CACHED_FILES = 512
_SPARE_FILES = 32
_WANTED_FILES = CACHED_FILES + 2 * _SPARE_FILES
_UNLIMITED = 1 << 63
_ENDED = (errno.ENOENT, errno.ESRCH)
# The kernel gives no more of such a file at once.
_PIECE_BYTES = 4096


@dataclass(slots=True)
class TreeState:
    """What one look saw."""

    # the traced processes, each with whether it belongs to the worker
    traced: dict[int, bool] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)  # every process of which at least one thread was read
    root_stopped: bool = False  # whether a thread of the root is stopped
    complete: bool = True  # whether everything that lives was read


class ProcessTree:
    """A process and its descendants, but for one child."""

    def __init__(self, root: int, *, left_out: int) -> None:
        self._root, self._left_out = root, left_out
        self._files: dict[str, int] = {}
        self._most_files = _room_for_files()

    def look(self, worker: int) -> TreeState:
        """Look at everything once; `worker` is the descendant whose own descendants are its, 0 for none."""
        found = TreeState()
        used: set[str] = set()
        waiting = [(self._root, False)]
        while waiting:
            pid, in_worker = waiting.pop()
            try:
                waiting += self._read_process(pid, in_worker or pid == worker, found, used)
            except OSError as error:
                if error.errno not in _ENDED or _exists(pid):
                    found.complete = False
        for path in self._files.keys() - used:
            os.close(self._files.pop(path))
        return found

    def forget(self) -> None:
        """Close what is kept open."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _read_process(self, pid: int, in_worker: bool, found: TreeState, used: set[str]) -> list[tuple[int, bool]]:
        """Read every thread of a process; returns its children, raises `OSError` when it cannot be listed."""
        children: list[tuple[int, bool]] = []
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib is slow to import
            place = f"/proc/{pid}/task/{thread}/"
            try:
                status = self._read(place + "status", used, whole=False)
                listed = self._read(place + "children", used, whole=True)
            except OSError as error:
                # A kernel without the list of children has the thread still, and would hide what descends from it.
                if error.errno not in _ENDED or _is_there(place):
                    found.complete = False
                continue
            found.seen.add(pid)
            if b"\nTracerPid:\t" not in status:
                found.complete = False
            elif b"\nTracerPid:\t0\n" not in status or b"\nState:\tt" in status:
                # A tracer outside this process namespace is shown as 0, but the stop that it causes is not hidden.
                found.traced[pid] = in_worker
            if pid == self._root:
                found.root_stopped = found.root_stopped or b"\nState:\tT" in status or b"\nState:\tt" in status
            children += [(int(child), in_worker) for child in listed.split() if int(child) != self._left_out]
        return children

    def _read(self, path: str, used: set[str], *, whole: bool) -> bytes:
        """Return a file, or its first piece; raises `OSError`."""
        descriptor = self._files.get(path, -1)
        if descriptor >= 0:
            used.add(path)
            try:
                return _content(descriptor, whole)
            except OSError as error:
                os.close(self._files.pop(path))
                if error.errno not in _ENDED:
                    raise
        # Not kept, or kept for a thread that has ended: its number may be another's now.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        keep = len(self._files) < self._most_files
        try:
            content = _content(descriptor, whole)
        except OSError:
            keep = False
            raise
        finally:
            if keep:
                self._files[path] = descriptor
                used.add(path)
            else:
                os.close(descriptor)
        return content


def _content(descriptor: int, whole: bool) -> bytes:
    content = piece = os.pread(descriptor, _PIECE_BYTES, 0)
    while whole and piece:
        piece = os.pread(descriptor, _PIECE_BYTES, len(content))
        content += piece
    return content


def _room_for_files() -> int:
    """Raise this process's soft limit of descriptors if that is low; return how many may be kept open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most, soft = (_UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in (hard, soft))
    if soft < _WANTED_FILES:
        soft = min(most, _WANTED_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(0, min(CACHED_FILES, soft - _SPARE_FILES))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_there(place: str) -> bool:
    try:
        os.stat(place)  # noqa: PTH116 - pathlib is slow to import
    except OSError as error:
        return error.errno not in _ENDED
    return True
