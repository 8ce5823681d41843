"""The plaintext of a part: its files, an index and zeros up to a padded size (spec/checkpoints.md section 3).

The worker's half: it writes files one behind the other, without knowing their lengths before, and reads them anywhere.
Law: what `PartWriter` sent is what `PartReader` finds, file by file and byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.package.grant import ResumePart
from glasshouse.package.index import Entry, check_text
from glasshouse.package.paths import check_path, check_paths
from glasshouse.package.streams import AssetReader, Positioned, SealedAsset, as_bytes, write_all
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import zero
from glasshouse.wire.lines.checkpoint import padded
from glasshouse.wire.record import fixed, integer, items, raw

MAX_FILES = 1 << 16
MAX_FILE_INDEX_BYTES = 1 << 24
_TRAILER_BYTES = 16
_INDEX = fixed(files=items(MAX_FILES, fixed(bytes=integer(), path=raw(check_text))))
_ZEROS = memoryview(bytes(1 << 16))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFile:
    """One file of a part."""

    path: str  # below the job's folder
    bytes: int
    offset: int  # in the part's plaintext


class PartWriter:
    """Makes a part's plaintext, piece by piece, from files that come one after the other.

    Args:
        send: takes each piece; it may not keep it.
    """

    def __init__(self, send: Callable[[memoryview], object]) -> None:
        self._send = send
        self._files: list[tuple[int, str]] = []  # bytes and path
        self._bytes = 0

    def begin(self, path: str) -> None:
        """Begin the next file; raises `PackageError` (`package-path` or `package-limit`)."""
        if len(self._files) == MAX_FILES:
            raise PackageError(Code.PACKAGE_LIMIT, f"a checkpoint of more than {MAX_FILES} files")
        self._files.append((0, check_path(path)))

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Send the next bytes of the file that was begun last."""
        size, path = self._files[-1]
        self._files[-1] = (size + self._put(data), path)

    def finish(self) -> int:
        """Send index, zeros and what finds the index; return the length of the whole.

        Raises:
            PackageError: `package-path` or `package-limit`: a path twice, or an index that is too long.
        """
        _check_paths(path for _, path in self._files)
        index, at = encode(_INDEX.write((self._files,))), self._bytes
        if len(index) > MAX_FILE_INDEX_BYTES:
            raise PackageError(Code.PACKAGE_LIMIT, "a checkpoint whose files have too long paths together")
        self._put(index)
        self._pad(padded(self._bytes + _TRAILER_BYTES) - _TRAILER_BYTES)
        self._put(at.to_bytes(8, "big") + len(index).to_bytes(8, "big"))
        return self._bytes

    def abandon(self) -> int:
        """Send zeros up to a padded size, for a part that is never counted; return the length of the whole."""
        self._pad(padded(self._bytes))
        return self._bytes

    def _pad(self, size: int) -> None:
        while self._bytes < size:
            self._put(_ZEROS[: min(size - self._bytes, len(_ZEROS))])

    def _put(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._send(view)
        self._bytes += len(view)
        return len(view)


class _PartChunks(SealedAsset):
    """The chunks of a part, which are bound to its front."""

    def __init__(self, source: Positioned, part: ResumePart) -> None:
        super().__init__(
            source,
            Entry(id=0, path="", bytes=part.bytes, digest=b"", offset=part.offset),
            version=0,
            suite=part.suite,
            chunk_bytes=part.chunk_bytes,
            header_sha256=part.front_sha256,
            key=part.key,
        )
        self.associated_data = part.front_sha256


class PartReader:
    """The files of one part, opened as they are read.

    Every method raises `PackageError`, `checkpoint-tampered`, for what is not the part that was sealed.

    Attributes:
        files: by their paths, in the order in which they lie.

    Args:
        source: the file of this machine's parts.
    """

    def __init__(self, source: Positioned, part: ResumePart) -> None:
        self._reader = AssetReader(_PartChunks(source, part))
        size = self._reader.size
        trailer = self._read(size - _TRAILER_BYTES, _TRAILER_BYTES)
        at, length = int.from_bytes(trailer[:8], "big"), int.from_bytes(trailer[8:], "big")
        self._end = at + length  # from here on there are zeros
        if length > MAX_FILE_INDEX_BYTES or self._end + _TRAILER_BYTES > size:
            raise _tampered("its index is not within it")
        with _tampering():
            (rows,) = _INDEX.read(decode(self._read(at, length), max_bytes=MAX_FILE_INDEX_BYTES), "index")
            _check_paths(path for _, path in rows)
        self.files: dict[str, PartFile] = {}
        offset = 0
        for length, path in rows:
            self.files[path] = PartFile(path=path, bytes=length, offset=offset)
            offset += length
        if offset != at:
            raise _tampered("its files do not end where its index begins")

    def verify(self, begin: int = 0) -> None:
        """Open every chunk from a byte of the plaintext on: a script may see a file only when all were opened."""
        asset = self._reader.asset
        plain = memoryview(bytearray(min(asset.size, asset.chunk_bytes)))
        zeros = memoryview(bytes(len(plain)))
        try:
            for chunk in range(begin // asset.chunk_bytes, asset.chunks):
                piece, start = plain[: asset.plain_bytes(chunk)], chunk * asset.chunk_bytes
                with _tampering():
                    self._reader.open_chunk(chunk, piece)
                padding = piece[max(0, self._end - start) : max(0, asset.size - _TRAILER_BYTES - start)]
                if padding != zeros[: len(padding)]:
                    raise _tampered("its padding is not zero")
        finally:
            zero(plain)

    def read_into(self, file: PartFile, offset: int, destination: object) -> int:
        """Open a file's bytes from `offset` on into `destination`; return how many: less where the file ends."""
        view = as_bytes(destination)
        view = view[: max(0, min(len(view), file.bytes - offset))]
        with _tampering():
            self._reader.read_into(file.offset + offset, view)
        return len(view)

    def copy_to(self, file: PartFile, out: BinaryIO) -> None:
        """Write a whole file; raises `OSError` from `out`."""
        plain = memoryview(bytearray(min(file.bytes, self._reader.asset.chunk_bytes)))
        try:
            done = 0
            while done < file.bytes:
                count = self.read_into(file, done, plain)
                write_all(out, plain[:count])
                done += count
        finally:
            zero(plain)

    def close(self) -> None:
        """Wipe the plaintext that this reader holds."""
        self._reader.close()

    def _read(self, offset: int, length: int) -> bytearray:
        data = bytearray(length)
        with _tampering():
            self._reader.read_into(offset, data)
        return data


def _check_paths(paths: Iterable[str]) -> None:
    """A script's files lie in the order in which it wrote them, and may differ only in case."""
    check_paths(sorted(paths, key=lambda path: path.encode()), fold=False)


@contextmanager
def _tampering() -> Iterator[None]:
    try:
        yield
    except (FormatError, PackageError) as error:
        raise _tampered(error.message) from None


def _tampered(why: str) -> PackageError:
    return PackageError(Code.CHECKPOINT_TAMPERED, f"a part of a checkpoint that cannot be restored: {why}")
