"""Files that come to a store in pieces, and how much of a store each owner may have.

Laws: a file has its name only once it is whole, has its digest and is on the disk; what was not whole when the gate
ended is begun again; files are written, and counted, on one thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from sqlalchemy import Connection, func, select

from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import stored
from glasshouse.broker.store.key_file import (
    private_directory,
    read_private_file,
    sync_directory,
    write_private_file,
)
from glasshouse.errors import Code, FormatError, RefusedError, UsageError

KEPT_US = 30 * 24 * 3600 * 1_000_000
LEAST_BYTES = 64 * 1024  # a file counts as no less, so that the bound in bytes is one on their number too
NO_LIMIT = 1 << 62  # but that of the disk
_LEFT_BYTES = 2 << 30  # of the disk, for all else that is on it
_MARK = "gate.public"  # in the folder: the key of the gate whose store it is
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Key = TypeVar("Key")


class StoreSpace:
    """The folder of a store, the thread that writes there, and how much each owner may have of it.

    Attributes:
        checkpoints: bytes of each owner's checkpoints, of which the database has no record.
        coming: all files that are not whole, of which the disk has no record.
        executor: not the thread that decides: a disk that is slow to sync would hold up releases.

    Args:
        folder: made with mode 0700. One gate's alone: it is empty, or has that gate's mark.
        limit_bytes: the most that may be kept in all.
        owners: how many are enrolled: each may have an equal part of it.

    Raises:
        UsageError: a folder that others can enter, that cannot be made, that another process writes in, or that is not
            empty and not this gate's store.
    """

    def __init__(self, broker: BrokerState, *, folder: Path, limit_bytes: int = NO_LIMIT, owners: int = 1) -> None:
        private_directory(folder, what="store")
        _check_own(folder, broker.public)
        self._held = _held(folder)
        self.folder = folder
        self.checkpoints: Counter[bytes] = Counter()
        self.coming: list[Uploads[Any]] = []
        self._limit_bytes, self._share_bytes = limit_bytes, limit_bytes // max(1, owners)
        self.executor = ThreadPoolExecutor(1, "store")

    def close(self) -> None:
        """Finish what is being written."""
        self.executor.shutdown()
        self._held.close()

    def check(self, connection: Connection, owner: bytes, counted: int) -> None:
        """Refuse what an owner, or the disk, has no room for; raises `RefusedError`, `owner-quota` or `disk-full`."""
        total = select(func.coalesce(func.sum(stored.c.counted), 0))
        theirs = connection.execute(total.where(stored.c.owner == owner)).scalar_one() + self.checkpoints[owner]
        everything = connection.execute(total).scalar_one() + self.checkpoints.total()
        if theirs + counted > self._share_bytes or everything + counted > self._limit_bytes:
            raise RefusedError(
                Code.OWNER_QUOTA,
                f"this gate stores {self._share_bytes} bytes of one owner, and has no room for this file beside theirs",
            )
        # A machine on which its owner's job runs may announce what it likes: it fills no disk of theirs.
        coming = sum(upload.size - upload.here for uploads in self.coming for upload in uploads.values())
        room = _room(self.folder) - coming
        if counted > room:
            why = f"the disk of this gate's store has room for {max(0, room)} bytes more, and this file has {counted}"
            raise RefusedError(Code.DISK_FULL, why)


def _room(folder: Path) -> int:
    """Return how many bytes of a disk may be taken; half of what is free always."""
    found = os.statvfs(folder)
    free, whole = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return free - min(max(_LEFT_BYTES, whole // 20), free // 2)


def counted_bytes(size: int) -> int:
    """Return what a file of this size counts as."""
    return max(size, LEAST_BYTES)


@dataclass(slots=True)
class Upload:
    """A file that is not whole yet: whose it is, what it shall be, how much is here, and the digest of that."""

    path: Path  # once it is whole
    owner: bytes
    sha256: bytes
    size: int
    here: int = 0
    so_far: Any = field(default_factory=hashlib.sha256)

    @property
    def part(self) -> Path:
        """Where it lies until it is whole."""
        return part_of(self.path)

    def add(self, start: int, data: bytes) -> bool:
        """Take the next piece, and ignore any other; return whether all is here. Raises `UsageError`, `disk-full`."""
        if start == self.here:
            with writing():
                self.path.parent.mkdir(mode=0o700, exist_ok=True)
                flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if start else os.O_CREAT | os.O_TRUNC)
                try:
                    file = os.fdopen(os.open(self.part, flags, 0o600), "wb")
                except FileNotFoundError:
                    return self._lost()
                with file:
                    if os.fstat(file.fileno()).st_size < start:
                        return self._lost()
                    file.seek(start)
                    file.write(data)
            self.here += len(data)
            self.so_far.update(data)
        return self.here >= self.size

    def _lost(self) -> bool:
        """Begin again: somebody took away what was here, whose digest is known and whose bytes are not."""
        self.here, self.so_far = 0, hashlib.sha256()
        return False

    def check(self) -> None:
        """Refuse a file with another digest than was announced; raises `FormatError`, `upload-damaged`."""
        if self.so_far.digest() != self.sha256:
            raise FormatError(Code.UPLOAD_DAMAGED, "a file that arrived with another digest; nothing of it is kept")

    def finish(self) -> None:
        """Give the file its name, once it is on the disk; raises `UsageError`, `disk-full`."""
        with writing():
            with self.part.open("rb") as file:
                os.fsync(file.fileno())
            self.part.rename(self.path)
            sync_directory(self.path.parent)


class Uploads(OrderedDict[Key, Upload], Generic[Key]):
    """Files that are not whole; those that came on least lately first.

    Args:
        most: of one owner.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def matching(self, key: Key, *, sha256: bytes, size: int) -> Upload | None:
        """Return the file that is being sent, if it is this one."""
        known = self.get(key)
        return known if known is not None and (known.sha256, known.size) == (sha256, size) else None

    def came_on(self, key: Key) -> Key | None:
        """Put a file behind the others; return the first of its owner's where they have too many."""
        self.move_to_end(key)
        owner = self[key].owner
        theirs = [one for one, upload in self.items() if upload.owner == owner]
        return theirs[0] if len(theirs) > self._most else None


def part_of(path: Path) -> Path:
    """Return where a file lies until it is whole."""
    return path.with_name(f"{path.name}.part")


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Turn what a disk refuses into the error of a store that cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise UsageError(Code.DISK_FULL, "the gate's store has no room left on its disk") from None
        raise UsageError(Code.USAGE, f"the gate's store cannot be written: {error.strerror}") from None


def _held(folder: Path) -> BinaryIO:
    """Lock a store until the process ends or closes it: a second one would remove what comes to the first."""
    mark = (folder / _MARK).open("rb")
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        mark.close()
        why = f"the store {folder} cannot be locked, as by another process of this gate: {error.strerror}"
        raise UsageError(Code.USAGE, why, hint="stop it, or name another folder") from None
    return mark


def _check_own(folder: Path, public: bytes) -> None:
    """Mark an empty folder with this gate's key; raise `UsageError` for one that has anything, and not this mark."""
    mark = folder / _MARK
    if not any(folder.iterdir()):
        write_private_file(mark, public.hex().encode())
    hint = "files in a store are removed: name an empty folder, or remove this one if nothing in it is needed any more"
    try:
        found = read_private_file(mark, max_bytes=128, what="mark of the store")
    except UsageError as error:
        if error.code is not Code.FILE_MISSING:
            raise
        raise UsageError(Code.USAGE, f"{folder} has files, and is no gate's store", hint=hint) from None
    if found != public.hex().encode():
        raise UsageError(Code.USAGE, f"{folder} is the store of another gate, by its {_MARK}", hint=hint)
