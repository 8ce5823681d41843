"""An unpacked tree from another's hand, read as the machine that it is for would walk it.

Laws: `/` is the tree's root, for links and `..` too, and nothing outside of it is opened or listed, also while the tree
is being changed; only regular files are opened; what is read and looked at is bounded.
"""

# What the measurement calls takes and gives text.
# ruff: noqa: PTH115
from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType

from glasshouse.attestation.measurements.installation import Disk
from glasshouse.jobs.owner.home import descend

BROUGHT = "/\0brought"
"""Where added files are: no file system has such a name."""

MAX_FILE_BYTES = 512 << 20
MAX_BYTES = 4 << 30
MAX_CONTENT_BYTES = 256 << 10
MAX_CONTENTS_BYTES = 4 << 20  # each line of them may be a path to look at
MAX_ENTRIES = 500_000
MAX_LOOKED_AT = 512 << 20  # characters of paths whose parts are looked at for links, and a few for each part
_PART_COSTS = 16
_MAX_LINKS = 40
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class ImageTree(Disk):
    """The files below a folder that stands for `/`; methods raise `OSError` for what is missing or beyond a limit."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._descriptor = os.open(self._root, _FLAGS | os.O_DIRECTORY)
        self._links: dict[str, str | None] = {}
        self._reals: dict[str, str] = {}
        self._looked_at = MAX_LOOKED_AT
        self._brought: dict[str, dict[str, bytes | None]] = {BROUGHT: {}}
        self._entries, self._bytes, self._contents, self._lock = MAX_ENTRIES, MAX_BYTES, MAX_CONTENTS_BYTES, Lock()

    def bring(self, files: Mapping[str, bytes]) -> None:
        """Add files, by their names below `BROUGHT`."""
        for name, content in files.items():
            folder, _, last = f"{BROUGHT}/{name}".rpartition("/")
            self._brought.setdefault(folder, {})[last] = content
            while folder != BROUGHT:
                folder, _, last = folder.rpartition("/")
                self._brought.setdefault(folder, {})[last] = None

    def __enter__(self) -> ImageTree:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def names(self, directory: str, suffix: str = "") -> list[str]:
        if not self.is_folder(directory):
            return []
        return sorted(name for name, _ in self.listed(directory) if name.endswith(suffix))

    def listed(self, directory: str) -> Iterator[tuple[str, bool]]:
        if (brought := self._brought.get(directory)) is not None:
            yield from ((name, content is None) for name, content in brought.items())
            return
        opened = self._folder(self.real(directory).split("/"), directory)
        try:
            self._count_entry()  # an empty folder is opened too
            with os.scandir(opened) as entries:
                for entry in entries:
                    self._count_entry()
                    is_link = entry.is_symlink()
                    is_folder = entry.is_dir(follow_symlinks=False)
                    yield entry.name, self.is_folder(f"{directory}/{entry.name}") if is_link else is_folder
        finally:
            os.close(opened)

    def _count_entry(self) -> None:
        self._entries -= 1
        if self._entries < 0:
            raise OSError(f"the tree has more than {MAX_ENTRIES} names to look at")

    def is_folder(self, path: str) -> bool:
        return path in self._brought or stat.S_ISDIR(self._mode(self.real(path)))

    def is_file(self, path: str) -> bool:
        return self._content_of(path) is not None or stat.S_ISREG(self._mode(self.real(path)))

    def is_there(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return self._content_of(path) is not None or self._mode(f"{self.real(folder)}/{name}") != 0

    def real(self, path: str) -> str:
        if path.startswith(BROUGHT):
            return path
        if path not in self._reals:
            self._reals[path] = self._lead(path)
        return self._reals[path]

    def _lead(self, path: str) -> str:
        left, found, links = path.split("/")[::-1], "", 0
        while left:
            one = left.pop()
            with self._lock:
                self._looked_at -= _PART_COSTS + len(found)
            if self._looked_at < 0:
                raise OSError("the tree has more and longer paths than are followed")
            if one == "..":
                found = found.rpartition("/")[0]  # above the root is the root
            elif one not in ("", "."):
                target = self._target(f"{found}/{one}")
                if target is None:
                    found = f"{found}/{one}"
                    continue
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, f"{path} of the tree leads through more than {_MAX_LINKS} links")
                if target.startswith("/"):
                    found = ""
                left.extend(target.split("/")[::-1])
        return found or "/"

    def digest(self, path: str, buffer: bytearray) -> bytes:
        if (content := self._content_of(path)) is not None:
            return hashlib.sha256(content).digest()
        digest, view = hashlib.sha256(), memoryview(buffer)
        descriptor = self._opened(path)
        left = MAX_FILE_BYTES
        try:
            while read := os.readv(descriptor, [buffer]):
                digest.update(view[:read])
                left -= read
                with self._lock:
                    self._bytes -= read
                if left < 0 or self._bytes < 0:
                    raise _too_long(path)
        finally:
            os.close(descriptor)
        return digest.digest()

    def content(self, path: str) -> bytes:
        if (content := self._content_of(path)) is None:
            with os.fdopen(self._opened(path), "rb") as file:
                content = file.read(MAX_CONTENT_BYTES + 1)
        self._contents -= len(content)
        if len(content) > MAX_CONTENT_BYTES or self._contents < 0:
            limits = f"{MAX_CONTENT_BYTES >> 10} KiB are of a file, and {MAX_CONTENTS_BYTES >> 20} MiB together"
            raise OSError(f"{path} of the tree is to be read as a whole: {limits}")
        return content

    def _opened(self, path: str) -> int:
        *folders, name = self.real(path).split("/")
        folder = self._folder(folders, path)
        try:
            # Looked at before it is opened: opening a device has its driver's effects.
            _check(os.stat(name, dir_fd=folder, follow_symlinks=False), path)
            descriptor = os.open(name, _FLAGS | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            _check(os.fstat(descriptor), path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _content_of(self, path: str) -> bytes | None:
        folder, _, name = path.rpartition("/")
        return self._brought.get(folder, {}).get(name)

    def _target(self, path: str) -> str | None:
        """Return a link's target; None for no link. The path to it has none."""
        if path not in self._links:
            try:
                self._links[path] = os.readlink(self._root + path)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
                    raise
                self._links[path] = None
        return self._links[path]

    def _mode(self, path: str) -> int:
        """Return the mode of what a path without links names; 0 for nothing."""
        if path.startswith(BROUGHT):
            return 0
        try:
            return os.lstat(self._root + path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def _folder(self, names: list[str], path: str) -> int:
        """Open a folder; a link on the way, which was put there since it was looked at, is an error."""
        try:
            return descend(os.dup(self._descriptor), filter(None, names), os.O_RDONLY)
        except OSError as error:
            raise OSError(error.errno, f"{path} of the tree cannot be opened: {error.strerror}") from None


def _check(found: os.stat_result, path: str) -> None:
    """Raise `OSError` for what is not read, before a sparse terabyte is."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{path} of the tree is no regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise _too_long(path)


def _too_long(path: str) -> OSError:
    return OSError(
        f"{path} of the tree is more than is read: {MAX_FILE_BYTES >> 20} MiB a file, {MAX_BYTES >> 30} GiB together"
    )
