"""The run's folder on the rented machine's disk: nothing in it is in the clear but the evidence.

```
events.log          one event a line, flushed as it happens
heads.log           countersigned heads, one a line
outputs/NNNN.sealed log/NNNN.sealed
checkpoints/        of a leg of a line: parts on their way to the store, by rank; gone at the end
receipt.json        the bundle, when the run has ended
.worker             while the run lasts: the session of the worker, or of the first process of its namespace
```

Laws: files are mode 0600 and folders 0700; a sealed file has its final name only when it is whole; a
reserve is kept so that a disk filled by outputs still has room for how the run ended.
"""

# pathlib would cost the agent 30 ms at every start, to no other use:
# ruff: noqa: PTH102, PTH103, PTH104, PTH106, PTH108, PTH208

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.runtime.watchdog.session_record import NAME as SESSION_NAME
from glasshouse.runtime.watchdog.session_record import SessionRecord

_RESERVE_BYTES = 1152 * 1024  # hardware evidence in the bundle has half of it
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def disk_errors(discard: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise `RunError` (`disk-full`), in our words, for an `OSError` of the block; `discard` is called before."""
    try:
        yield
    except OSError as error:
        discard()
        reason = os.strerror(error.errno) if error.errno else "unknown"
        raise RunError(Code.DISK_FULL, f"the run's folder cannot be written to ({reason})") from None


class PartialFile:
    """A file that has its final name only once `keep` was called; raises `RunError`."""

    def __init__(self, final: str) -> None:
        self.final, self._partial = final, final + ".partial"
        with disk_errors():
            self.stream = os.fdopen(os.open(self._partial, _FLAGS, 0o600), "wb", buffering=0)

    def keep(self) -> None:
        """Close the file and give it its final name; raises `RunError`."""
        with disk_errors():
            self.stream.close()
            os.rename(self._partial, self.final)

    def discard(self) -> None:
        """Remove the file; one that is gone or kept is fine."""
        try:
            self.stream.close()
        finally:
            remove(self._partial)


class OutDir:
    """The run's folder, made if need be; raises `UsageError` where it cannot be made, or holds a run."""

    def __init__(self, root: str) -> None:
        self._root = root
        try:
            os.makedirs(root, mode=0o700, exist_ok=True)
            for name in ("outputs", "log"):
                os.mkdir(f"{root}/{name}", mode=0o700)
            self._events = os.open(f"{root}/events.log", _FLAGS | os.O_APPEND, 0o600)
            self._heads = os.open(f"{root}/heads.log", _FLAGS | os.O_APPEND, 0o600)
        except OSError:
            raise UsageError(Code.USAGE, "the output folder cannot be made, or holds a run already") from None
        with self._opened(".reserve") as reserve:
            os.posix_fallocate(reserve, 0, _RESERVE_BYTES)

    def event(self, line: bytes) -> None:
        """Append a line to the event log, whole or not at all; raises `RunError`."""
        _append(self._events, line)

    def head(self, countersigned: bytes) -> None:
        """Append a countersigned head; raises `RunError`."""
        _append(self._heads, countersigned + b"\n")

    def sealed(self, folder: str, sequence: int) -> PartialFile:
        """Open the next sealed file of ``outputs`` or ``log``; raises `RunError`."""
        return PartialFile(f"{self._root}/{folder}/{sequence:04d}.sealed")

    def checkpoints(self) -> None:
        """Make the folder of checkpoints, of a leg of a line; raises `RunError`."""
        with disk_errors():
            os.mkdir(f"{self._root}/checkpoints", mode=0o700)

    def part(self, rank: int) -> PartialFile:
        """Open a sealed part of a checkpoint; raises `RunError`."""
        return PartialFile(f"{self._root}/checkpoints/{rank:04d}.sealed")

    def no_checkpoints(self) -> None:
        """Remove that folder with what is in it; nothing happens where there is none. Raises `RunError`."""
        folder = f"{self._root}/checkpoints"
        with disk_errors(), suppress(FileNotFoundError):
            for name in os.listdir(folder):
                remove(f"{folder}/{name}")
            os.rmdir(folder)

    def receipt(self, bundle: bytes) -> None:
        """Write the bundle, whole or not at all; raises `RunError`."""
        file = PartialFile(f"{self._root}/receipt.json")
        with disk_errors(file.discard):
            file.stream.write(bundle)
            os.fsync(file.stream.fileno())
        file.keep()

    def worker(self, session: SessionRecord) -> None:
        """Keep which session is the worker's, until `worker_gone`; raises `RunError`."""
        with self._opened(SESSION_NAME) as descriptor:
            _append(descriptor, session.to_line())

    def worker_gone(self) -> None:
        """Remove that; nothing happens where there is none."""
        remove(f"{self._root}/{SESSION_NAME}")

    def give_reserve(self) -> None:
        """Free the reserve: from now on only the end of the run is written."""
        remove(f"{self._root}/.reserve")

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        with disk_errors():
            descriptor = os.open(f"{self._root}/{name}", _FLAGS, 0o600)
            try:
                yield descriptor
            finally:
                os.close(descriptor)


def remove(path: str) -> None:
    """Remove a file; one that is gone is fine."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def _append(descriptor: int, line: bytes) -> None:
    with disk_errors():
        before = os.lseek(descriptor, 0, os.SEEK_END)
        if os.write(descriptor, line) != len(line):
            os.ftruncate(descriptor, before)
            raise RunError(Code.DISK_FULL, "the run's folder is full")
