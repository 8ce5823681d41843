"""Files at a place, kept by their digest (spec/place.md, section 4).

Laws: a name is given only to what has the digest; a part is worth nothing but the time of sending it again. A name
holds for one start of the machine: nothing waits for the disk, which may lack some of a file after a crash; so what
an earlier start left is a part, and is hashed before it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time
from pathlib import Path

import blake3

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.providers.serve.runs import own_folder

# Into memory that is there already: for each piece anew it took the kernel 0.8 s of 1 GiB.
_PIECE_BYTES = 256 << 10
# Room that an upload leaves to what the runs write.
_SPARE_BYTES = 64 << 20
_UNUSED_S = 24 * 3600
_KEEP_SIZE = 1
_BLOCK_BYTES = 512


class Uploads:
    """What is there, in a folder that is made if need be.

    Args:
        boot: changes when the machine is started anew; empty where that is not known: then files are synced.
    """

    def __init__(self, folder: Path, *, boot: str) -> None:
        self._folder, self._boot = folder, boot
        own_folder(folder)

    def path(self, digest: str) -> Path:
        """Return where the whole file of a digest is, or would be."""
        return self._folder / (f"{digest}.{self._boot}" if self._boot else digest)

    def present(self, digest: str) -> int:
        """Return how many of its bytes are there, from the first."""
        self._distrust(digest)
        for path in (self.path(digest), self._part(digest)):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)  # it is used: none that makes room takes it away
                return path.stat().st_size
        return 0

    def whole(self, digest: str, size: int) -> bool:
        """Return whether the file is there, and as long as it should be; one that is not is removed."""
        try:
            if self.path(digest).stat().st_size == size:
                os.utime(self.path(digest))
                return True
            self.path(digest).unlink()
        except FileNotFoundError:
            pass
        return False

    def begin(self, digest: str, size: int, start: int) -> Upload:
        """Go on with a file at `start`, which `present` returned.

        Raises:
            UsageError: `usage`: it is not there so far; `upload-busy`: another connection sends it at this moment.
            PlatformError: `disk-full`.
        """
        self._distrust(digest)
        part = self._part(digest)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(Code.UPLOAD_BUSY, "the same file is being sent by another command") from None
            if not 0 <= start <= size or os.fstat(descriptor).st_size != start:
                raise UsageError(Code.USAGE, "a file that is not there so far")
            os.utime(part)
            self._make_room(size - os.fstat(descriptor).st_blocks * _BLOCK_BYTES)
            _reserve(descriptor, size)
            return Upload(descriptor, part, self.path(digest), digest, size=size, sync=not self._boot)
        except BaseException:
            os.close(descriptor)
            raise

    def drop(self, digest: str) -> None:
        """Remove a file, or what is there of it, unless a run uses it or a connection sends it; none is fine."""
        self._distrust(digest)
        with contextlib.suppress(FileNotFoundError):
            if self.path(digest).stat().st_nlink == 1:
                self.path(digest).unlink()
        with contextlib.suppress(FileNotFoundError, BlockingIOError), self._part(digest).open("rb") as part:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(part.fileno(), self._part(digest)):
                self._part(digest).unlink()

    def _make_room(self, wanted: int) -> None:
        if self._free() >= wanted + _SPARE_BYTES:
            return
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                # A run that uses it has a link of its own.
                if found.st_nlink == 1 and found.st_mtime < time.time() - _UNUSED_S:
                    path.unlink()
        if self._free() >= wanted + _SPARE_BYTES:
            return
        why = f"the machine's disk has {self._free() >> 20} MiB left; the upload needs {wanted >> 20} MiB and some room"
        hint = "remove what is not needed there, or name another folder of the machine"
        raise PlatformError(Code.DISK_FULL, why, hint=hint)

    def _distrust(self, digest: str) -> None:
        """Make a part of what an earlier start of the machine left."""
        for path in self._folder.glob(f"{digest}*"):
            if path not in (self.path(digest), self._part(digest)):
                with contextlib.suppress(FileNotFoundError):  # another connection was faster
                    path.rename(self._part(digest))

    def _free(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def _part(self, digest: str) -> Path:
        return self._folder / f"{digest}.part"


class Upload:
    """A file on its way, of which `left` bytes are still to come."""

    def __init__(self, descriptor: int, part: Path, whole: Path, digest: str, *, size: int, sync: bool) -> None:
        self._descriptor, self._part, self._whole, self._sync = descriptor, part, whole, sync
        self._wanted, self._digest = digest, blake3.blake3()
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        self.left = size
        while count := os.readv(descriptor, [self._buffer]):
            self._take(self._buffer[:count])

    def read(self, source: int) -> int:
        """Take what has come at a descriptor, and return how many bytes: 0 at its end; raises as `write`, `OSError`."""
        count = os.readv(source, [self._buffer[: self.left]])
        self.write(self._buffer[:count])
        return count

    def write(self, data: bytes | memoryview) -> None:
        """Take what came, at most `left` bytes; raises `PlatformError` `disk-full`."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise PlatformError(Code.DISK_FULL, f"the machine cannot keep the upload: {error.strerror}") from None
        self._take(data)

    def finish(self) -> None:
        """Give the whole file its name; raises `UsageError` `upload-damaged` for another digest: then it is gone."""
        own = _is_same(self._descriptor, self._part)
        if self._digest.hexdigest() != self._wanted or not own:
            if own:
                self._part.unlink()
            hint = "run the same command again"
            raise UsageError(Code.UPLOAD_DAMAGED, "what arrived is not what was sent; it was removed", hint=hint)
        if self._sync:
            os.fsync(self._descriptor)
        self._part.rename(self._whole)

    def close(self) -> None:
        """Close the file; a part stays."""
        os.close(self._descriptor)

    def _take(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self.left -= len(data)


def _is_same(descriptor: int, path: Path) -> bool:
    """Return whether a name is still that of an open file: another connection may have removed or replaced it."""
    opened = os.fstat(descriptor)
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


def _reserve(descriptor: int, size: int) -> None:
    """Take the disk's room for a file, where the file system can: no other gets it, and writing takes less time.

    Its length, which shows how much came, stays (fallocate(2)).
    """
    ctypes.CDLL(None).fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size))
