"""What a run may have left in the machine's shared memory: which files there, and a search of those.

Other programs have files there too, which come, go, and may be large. Laws: a file is left out only where the kernel
shows that this run did not write it, or where it is gone; what could not be looked at is counted, never skipped in
silence.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from glasshouse.runtime.keys.memory_search import Finder

FOLDER = "/dev/shm"  # noqa: S108
MAX_SEARCHED_BYTES = 1 << 30  # one to five seconds, by the number of needles
_MAX_FILES = 1 << 16
_MAX_LOOKS = 8
# The kernel stamps changes with a clock that ticks every few milliseconds: two changes of one tick look like one.
_SETTLED_NS = 1_000_000_000

# Device and inode of each file, and when its kernel last recorded a change of it, and its length.
Before = Mapping[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _SharedFile:
    path: str
    identity: tuple[int, int]
    state: tuple[int, int]

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> _SharedFile:
        return cls(path, (status.st_dev, status.st_ino), (status.st_ctime_ns, status.st_size))


@dataclass(slots=True)
class _Listing:
    """One listing of everything below a folder."""

    files: list[_SharedFile] = field(default_factory=list)
    vanished: int = 0
    closed: int = 0


def look_before(folder: str = FOLDER, *, now_ns: int) -> Before:
    """Return the files that are there before the run has a secret, but what changed in the second before `now_ns`."""
    try:
        files = _look(folder).files
    except OSError:
        return {}
    return {file.identity: file.state for file in files if file.state[0] < now_ns - _SETTLED_NS}


def search(finder: Finder, before: Before, folder: str = FOLDER) -> int:
    """Search what is new or changed since `look_before`, smallest first, until something is found.

    Return how many files or folders could not be searched.

    Raises:
        FileNotFoundError: the folder does not exist.
        OSError: the folder cannot be listed.
    """
    searched: set[tuple[int, int]] = set()
    for _ in range(_MAX_LOOKS):
        look, failed = _look(folder), 0
        todo = [
            file for file in look.files if file.identity not in searched and before.get(file.identity) != file.state
        ]
        for file in sorted(todo, key=lambda file: file.state[1]):
            try:
                complete = _search_file(file, finder)
            except FileNotFoundError:
                look.vanished += 1
                continue
            except OSError:
                complete = False
            if finder.found:
                return 0
            searched.add(file.identity)
            failed += not complete
        if failed or look.closed or not look.vanished:
            return failed + look.closed
        # A name that vanished may be another now: what went is gone only when a whole look meets everything it lists.
    return look.vanished


def _look(folder: str) -> _Listing:
    """List the files below a folder that this user may have written; raises `OSError` for the folder itself."""
    look, pending = _Listing(), [folder]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    _sort(entry, look, pending)
        except OSError as error:
            if directory == folder:
                raise
            if isinstance(error, FileNotFoundError):
                look.vanished += 1
            elif os.access(directory, os.X_OK, effective_ids=True):
                look.closed += 1
            # else: another user's, and closed to this one: nothing in it can be reached
    return look


def _sort(entry: os.DirEntry[str], look: _Listing, pending: list[str]) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        look.vanished += 1
        return
    if stat.S_ISDIR(status.st_mode):
        pending.append(entry.path)
    elif stat.S_ISREG(status.st_mode) and (status.st_uid == os.geteuid() or status.st_mode & 0o022):
        if len(look.files) < _MAX_FILES:
            look.files.append(_SharedFile.of(entry.path, status))
        else:
            look.closed += 1


def _search_file(file: _SharedFile, finder: Finder) -> bool:
    """Search one file; returns whether that reached its end within the limit.

    Raises:
        FileNotFoundError: the name has gone, or is another file's now.
        OSError: the file cannot be read.
    """
    descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = _SharedFile.of(file.path, os.fstat(descriptor))
        if found.identity != file.identity:
            raise FileNotFoundError(errno.ENOENT, "another file has this name now")
        # What is added after this is not the run's: its processes have ended.
        return all(_search_range(descriptor, *piece, finder) for piece in _written(descriptor, found.state[1], finder))
    finally:
        os.close(descriptor)


def _written(descriptor: int, size: int, finder: Finder) -> Iterator[tuple[int, int]]:
    """Yield the ranges that were ever written, with so much of the holes beside them as a needle may reach into."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        yield max(start - finder.overlap, 0), min(end + finder.overlap, size)


def _search_range(descriptor: int, start: int, end: int, finder: Finder) -> bool:
    kept = 0
    while start < end:
        if finder.searched_bytes >= MAX_SEARCHED_BYTES:
            return False
        count = os.preadv(descriptor, [finder.view[kept : kept + end - start]], start)
        if not count:
            return True
        start, held = start + count, kept + count
        if finder.search(held):
            return True
        kept = min(finder.overlap, held)
        finder.view[:kept] = finder.view[held - kept : held]
    return True
