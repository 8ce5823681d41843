"""The files of a run elsewhere that are kept here, within what its run may leave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from glasshouse.errors import Code, PeerError
from glasshouse.providers.protocol.messages import FILE_NAME
from glasshouse.providers.serve.runs import numbered

_PIECE_BYTES = 256 << 10
# Of one run, together: a sealed log that fills its share has fewer.
_MOST_FILES = 1 << 18
_RECEIPT = "receipt.json"
_GROWING = ("events.log", "heads.log", "runtime.log")
# Of files whose size no job names: an event log of ninety days at one event a second has less.
_MAX_BYTES = {"events.log": 1 << 33, "heads.log": 1 << 33, _RECEIPT: 1 << 24, "runtime.log": 1 << 28}


class KeptFiles:
    """What a place names of one run, and how much of it is here.

    Args:
        path_of: where a file is kept; its folder need not exist.
        max_bytes: the most that the sealed files may have together.

    Attributes:
        lacking: the files that are not here whole, in the order in which they are read.
    """

    def __init__(self, path_of: Callable[[str], Path], max_bytes: int) -> None:
        self.path_of, self._max_bytes = path_of, max_bytes
        self.lacking: dict[str, None] = {}
        # What an earlier process took counts too: a place that is asked again and again may leave no more for it.
        self._there: dict[str, int] = dict(self._sealed_here())

    def named(self, files: Mapping[str, int], *, over: bool, whole: bool) -> None:
        """Take what a place names: file → bytes.

        Args:
            over: whether the run has ended.
            whole: whether that is all that it left.

        Raises:
            PeerError: `schema-invalid`: it is more than a run may leave, or less than there was.
        """
        for name, size in files.items():
            self._there[name] = self._length(name, size, over=over)
        if len(self._there) > _MOST_FILES:
            raise PeerError(Code.SCHEMA, "the place names more files than a run leaves")
        if sum(size for name, size in self._there.items() if name not in _MAX_BYTES) > self._max_bytes:
            raise PeerError(Code.SCHEMA, "the place names more bytes than the run may leave")
        # The receipt comes last, when nothing is added any more: a run whose receipt is here is here whole.
        for name in sorted(files, key=_RECEIPT.__eq__):
            self._finish(name)
            if name == _RECEIPT and not whole:
                continue
            if name in _GROWING and self._there[name] == 0:
                os.close(self._opened(self.path_of(name)))  # an empty log differs from none at all
            if self._here(name) < self._there[name]:
                self.lacking[name] = None

    def missing(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, place and length of each piece that is not here."""
        for name in list(self.lacking):
            have, size = self._here(name), self._there[name]
            if have == size:
                del self.lacking[name]
            for start in range(have, size, _PIECE_BYTES):
                yield name, start, min(_PIECE_BYTES, size - start)

    def take(self, name: str, start: int, data: bytes, count: int) -> None:
        """Keep a piece; pieces come in the order in which they were asked for.

        Args:
            name, start: of `missing`.
            count: how many bytes were to come, by the place's word.

        Raises:
            PeerError: `schema-invalid`: it is not what was asked for.
            OSError: it cannot be kept.
        """
        path, size = self.path_of(name), self._there[name]
        if len(data) != count or not data or start + len(data) > size:
            raise PeerError(Code.SCHEMA, f"the place sent other bytes of {name} than it was asked for")
        descriptor = self._opened(path if name in _GROWING else _partial(path))
        try:
            if os.fstat(descriptor).st_size != start:
                raise PeerError(Code.SCHEMA, f"the place sent a piece of {name} out of its turn")
            _write(descriptor, data, start)
        finally:
            os.close(descriptor)
        if start + len(data) == size:
            self._finish(name)
            self.lacking.pop(name, None)

    def sync(self) -> None:
        """Bring what is here to the disk."""
        for name in self._there:
            with contextlib.suppress(FileNotFoundError), self.path_of(name).open("rb") as file:
                os.fsync(file.fileno())

    def _length(self, name: str, size: int, *, over: bool) -> int:
        """Return how long a file is there, by the place's word."""
        if size > _MAX_BYTES.get(name, self._max_bytes):
            raise PeerError(Code.SCHEMA, f"the place names more bytes of {name} than a run has")
        if size < self._there.get(name, 0):
            if not over:
                raise PeerError(Code.SCHEMA, "the place names a file that has shrunk")
            # A machine that was started anew lost what its disk did not have yet; what is here stays.
            size = max(size, self._here(name))
        return size

    def _finish(self, name: str) -> None:
        """Give a file its name once it is whole, also where an earlier process took it."""
        partial = _partial(self.path_of(name))
        if name not in _GROWING and partial.exists() and partial.stat().st_size == self._there[name]:
            partial.rename(self.path_of(name))

    def _sealed_here(self) -> Iterator[tuple[str, int]]:
        """Yield each sealed file that is here, whole or in part, and its length."""
        for folder in ("outputs", "log"):
            with contextlib.suppress(FileNotFoundError):
                for path in self.path_of(numbered(folder, 0)).parent.iterdir():
                    name = f"{folder}/{path.name.removesuffix('.partial')}"
                    if FILE_NAME.fullmatch(name):
                        yield name, self._here(name)

    def _here(self, name: str) -> int:
        for path in (self.path_of(name), _partial(self.path_of(name))):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size
        return 0

    @staticmethod
    def _opened(path: Path) -> int:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, data: bytes, start: int) -> None:
    """Write all of it, or leave the file as long as it was."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.pwrite(descriptor, left, start + len(data) - len(left)) :]
    except OSError:
        os.ftruncate(descriptor, start)
        raise


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
