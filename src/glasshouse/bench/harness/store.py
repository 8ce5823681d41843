"""The files of one part of a measurement, written line by line as it runs.

```
PART/design.json      canonical JSON, before the first slice
PART/slices.jsonl     a line a record, each written whole or not at all
PART/sessions.jsonl   a line a session
PART/receipts/NNNN.json
```

What follows from them is written beside them when they are complete (`overhead.statement`).

Law: whatever goes wrong, the files end with a whole line. A little room is kept on the disk so that the line
that says it was full can still be written.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from glasshouse.bench.overhead.design import Design
from glasshouse.bench.overhead.notes import SessionNote
from glasshouse.bench.overhead.slices import Record
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.files import private_folder, write_private
from glasshouse.wire.canonical import encode

__all__ = ["Store", "append_line", "opened"]

_ROOM_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Store:
    """One part's folder, made by its first file.

    Args:
        folder: must not hold a part yet.

    Raises:
        UsageError: `usage` when something is there already or cannot be written, `disk-full`.
    """

    def __init__(self, folder: Path, design: Design) -> None:
        self.folder = private_folder(folder)
        self._room = folder.parent / f".{folder.name}.room"
        write_private(folder / "design.json", encode(design.to_json()), replace=False)
        self._slices = opened(folder / "slices.jsonl")
        self._sessions = opened(folder / "sessions.jsonl")
        self._keep_room()

    def append(self, record: Record) -> None:
        """Add a line to the slices; raises `UsageError`, `disk-full`, after which the file is as it was before."""
        append_line(self._slices, record.encode(), self.folder / "slices.jsonl")

    def note(self, note: SessionNote) -> None:
        """Add a line to the sessions; raises as `append`."""
        append_line(self._sessions, note.encode(), self.folder / "sessions.jsonl")

    def receipt(self, session: int, bundle: bytes) -> None:
        """Keep the receipt of a session's protected run; raises `UsageError`."""
        write_private(private_folder(self.folder / "receipts") / f"{session:04d}.json", bundle)

    def make_room(self) -> None:
        """Give back what was kept, on a disk that is full."""
        self._room.unlink(missing_ok=True)

    def close(self) -> None:
        self.make_room()
        for descriptor in (self._slices, self._sessions):
            os.close(descriptor)

    def _keep_room(self) -> None:
        # Not sparse: the blocks have to be there. Where they cannot be had now there is nothing to keep.
        with contextlib.suppress(OSError), self._room.open("wb") as room:
            room.write(os.urandom(_ROOM_BYTES))


def opened(path: Path) -> int:
    """Make a file that must not be there yet, to append to; raises `UsageError`."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refused(path, error) from None


def append_line(descriptor: int, line: bytes, path: Path) -> None:
    """Write a line whole or not at all; raises `UsageError`, `disk-full` where there is no room."""
    before = os.fstat(descriptor).st_size
    left = memoryview(line + b"\n")
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise _refused(path, error) from None


def _refused(path: Path, error: OSError) -> UsageError:
    if error.errno in _FULL:
        return UsageError(
            Code.DISK_FULL, f"no room to write {path}: what was complete before is kept", hint="free some space"
        )
    return UsageError(Code.USAGE, f"cannot write {path}: {(error.strerror or '').lower()}")
