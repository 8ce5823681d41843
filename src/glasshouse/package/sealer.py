"""Seals the content of a package: reads and hashes one chunk while the one before is encrypted and written.

Memory is three chunks, whatever the sizes. Hash and cipher release the interpreter's lock, so that
the second thread nearly halves the time where there is a second core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import UnsupportedOperation
from typing import BinaryIO, TypeAlias

from glasshouse.errors import Code, PackageError, UsageError
from glasshouse.package.content import content_hash
from glasshouse.package.layout import Header, asset_key, chunk_count, stream_cipher
from glasshouse.package.streams import write_all
from glasshouse.wire.aead import TAG_BYTES, ChunkCipher, zero

__all__ = ["Progress", "Sealer", "Source"]

Size: TypeAlias = int
Progress: TypeAlias = Callable[[int, int], None]

_WORTH_A_THREAD_BYTES = 1 << 17


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file to be sealed.

    Attributes:
        path: its name in the package.
        bytes: its length; a source that turns out shorter or longer is refused.
        open: returns the content as a binary stream; called once, closed by the writer.
    """

    path: str
    bytes: Size
    open: Callable[[], BinaryIO]


class Sealer:
    """Seals the streams of one package.

    Args:
        header: the package's header, final.
        package_key: 32 bytes.
    """

    def __init__(self, header: Header, package_key: bytes | bytearray | memoryview) -> None:
        self._chunk_bytes = header.chunk_bytes
        self._suite = header.suite
        self._version = header.version
        self._header_sha256 = header.sha256
        self._key = package_key

    def assets(self, sources: Sequence[Source], out: BinaryIO, progress: Progress | None = None) -> list[bytes]:
        """Seal every source behind the other.

        Returns:
            The digest of each one's plaintext, by the hash of the package's version.

        Raises:
            PackageError: `source-changed`.
            UsageError: `file-missing`.
            OSError: from `out`.
        """
        total = sum(source.bytes for source in sources)
        largest = min(self._chunk_bytes, max((source.bytes for source in sources), default=0))
        digests: list[bytes] = []
        done = 0
        with _Pipeline(out, largest) as pipeline:
            for number, source in enumerate(sources, start=1):
                digest = content_hash(self._version)
                for length in self._chunks(number, source, pipeline, digest.update):
                    done += length
                    if progress is not None:
                        progress(done, total)
                digests.append(digest.digest())
        return digests

    def small(self, asset_id: int, data: bytes) -> bytes:
        """Seal what is in memory already."""
        cipher = self._cipher(asset_id)
        chunks = chunk_count(len(data), self._chunk_bytes)
        out = bytearray()
        for index in range(chunks):
            plain = data[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]
            sealed = bytearray(len(plain) + TAG_BYTES)
            cipher.seal_into(index, last=index == chunks - 1, plaintext=plain, out=sealed)
            out += sealed
        return bytes(out)

    def _chunks(
        self, number: int, source: Source, pipeline: _Pipeline, digest: Callable[[memoryview], object]
    ) -> Iterator[int]:
        """Seal one source; yield the length of each chunk when it is read."""
        cipher = self._cipher(number)
        chunks = chunk_count(source.bytes, self._chunk_bytes)
        with _opened(source) as stream:
            before = _stamp(stream)
            for index in range(chunks):
                piece = pipeline.buffer(min(self._chunk_bytes, source.bytes - index * self._chunk_bytes))
                _fill(stream, piece, source)
                digest(piece)
                pipeline.put(cipher, index, last=index == chunks - 1, plain=piece)
                yield len(piece)
            if stream.read(1) or _stamp(stream) != before:
                raise _changed(source)

    def _cipher(self, asset_id: int) -> ChunkCipher:
        return stream_cipher(
            suite=self._suite,
            key=asset_key(self._key, asset_id, self._suite, self._header_sha256),
            header_sha256=self._header_sha256,
            asset_id=asset_id,
        )


class _Pipeline:
    """Two buffers of plaintext: one is filled while the other is sealed and written in a second thread.

    Leaving it waits for that thread and wipes both.
    """

    def __init__(self, out: BinaryIO, largest: int) -> None:
        self._out = out
        self._plain = [memoryview(bytearray(largest)) for _ in range(2)]
        self._sealed = memoryview(bytearray(largest + TAG_BYTES))
        self._turn = 0
        self._pending: Future[None] | None = None
        # Handing over costs some tens of microseconds: neither small chunks nor a single core win them back.
        worth_it = largest >= _WORTH_A_THREAD_BYTES and _cores() > 1
        self._thread = ThreadPoolExecutor(max_workers=1) if worth_it else None

    def buffer(self, length: int) -> memoryview:
        """Return the buffer that nobody is reading."""
        return self._plain[self._turn][:length]

    def put(self, cipher: ChunkCipher, index: int, *, last: bool, plain: memoryview) -> None:
        """Seal and write `plain`, the buffer's content, once the chunk before it is written."""
        self._wait()
        if self._thread is None:
            self._seal(cipher, index, last, plain)
            return
        self._pending = self._thread.submit(self._seal, cipher, index, last, plain)
        self._turn = 1 - self._turn

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            for plain in self._plain:
                zero(plain)

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _seal(self, cipher: ChunkCipher, index: int, last: bool, plain: memoryview) -> None:
        part = self._sealed[: len(plain) + TAG_BYTES]
        cipher.seal_into(index, last=last, plaintext=plain, out=part)
        write_all(self._out, part)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _opened(source: Source) -> BinaryIO:
    try:
        return source.open()
    except OSError as error:
        raise _unreadable(source, error) from error


def _fill(stream: BinaryIO, piece: memoryview, source: Source) -> None:
    done = 0
    while done < len(piece):
        try:
            count = stream.readinto(piece[done:])  # type: ignore[attr-defined]  # typeshed: BinaryIO lacks it
        except OSError as error:
            raise _unreadable(source, error) from error
        if not count:
            raise _changed(source)
        done += count


def _stamp(stream: BinaryIO) -> tuple[int, ...] | None:
    """Return what the kernel says of a file's last change, or None for a stream that is no file."""
    try:
        status = os.fstat(stream.fileno())
    except (UnsupportedOperation, AttributeError):
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _unreadable(source: Source, error: OSError) -> UsageError:
    """Say that it is an input that failed: other errors of the system are taken for the output's."""
    return UsageError(Code.FILE_MISSING, f"{source.path[:64]!a} cannot be read: {error.strerror}")


def _changed(source: Source) -> PackageError:
    return PackageError(
        Code.SOURCE_CHANGED,
        f"{source.path[:64]!a} changed while it was being sealed",
        hint="seal again when nothing writes to the inputs",
    )
