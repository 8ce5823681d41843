"""Seals the content of a package: reads and hashes one chunk while those before are encrypted and written.

Memory is five chunks, whatever the sizes. Hash and cipher release the interpreter's lock, so that
the second thread nearly halves the time where there is a second core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import UnsupportedOperation
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO, TypeAlias

from glasshouse.errors import Code, PackageError, UsageError
from glasshouse.package.content import content_hash
from glasshouse.package.layout import Header, asset_key, chunk_count, stream_cipher
from glasshouse.package.streams import write_all
from glasshouse.wire.crypto import TAG_BYTES, ChunkCipher, zero

Size: TypeAlias = int
Progress: TypeAlias = Callable[[int, int], None]

_WORTH_A_THREAD_BYTES = 1 << 17
# With two, each thread waits for the other to wake up at every chunk.
_BUFFERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file to be sealed."""

    path: str  # its name in the package
    bytes: Size  # its length; a source that turns out shorter or longer is refused
    open: Callable[[], BinaryIO]  # returns the content as a binary stream; called once, closed by the writer


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
                buffer, size = pipeline.buffer(), min(self._chunk_bytes, source.bytes - index * self._chunk_bytes)
                _fill(stream, buffer[:size], source)
                digest(buffer[:size])
                pipeline.put(_Chunk(cipher, index, index == chunks - 1, buffer, size))
                yield size
            if stream.read(1) or _stamp(stream) != before:
                raise _changed(source)

    def _cipher(self, asset_id: int) -> ChunkCipher:
        return stream_cipher(
            suite=self._suite,
            key=asset_key(self._key, asset_id, self._suite, self._header_sha256),
            header_sha256=self._header_sha256,
            asset_id=asset_id,
        )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The `bytes` first bytes of a buffer, to be sealed."""

    cipher: ChunkCipher
    index: int
    last: bool
    buffer: memoryview
    bytes: Size


class _Pipeline:
    """Buffers of plaintext: one is filled while those before it are sealed and written in a second thread.

    Leaving it waits for that thread and wipes them.
    """

    def __init__(self, out: BinaryIO, largest: int) -> None:
        self._out = out
        self._plain = [memoryview(bytearray(largest)) for _ in range(_BUFFERS)]
        self._sealed = memoryview(bytearray(largest + TAG_BYTES))
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for plain in self._plain:
            self._free.put(plain)
        self._filled: SimpleQueue[_Chunk | None] = SimpleQueue()
        self._error: BaseException | None = None
        # Handing over costs some tens of microseconds: neither small chunks nor a single core win them back.
        worth_it = largest >= _WORTH_A_THREAD_BYTES and _cores() > 1
        self._thread = Thread(target=self._write) if worth_it else None

    def buffer(self) -> memoryview:
        """Return a buffer that is free; raises what writing another one raised."""
        plain = self._free.get()
        if self._error is not None:
            raise self._error
        return plain

    def put(self, chunk: _Chunk) -> None:
        """Have a chunk sealed and written behind those before it; its buffer is free after that."""
        if self._thread is None:
            self._seal(chunk)
            self._free.put(chunk.buffer)
        else:
            self._filled.put(chunk)

    def __enter__(self) -> _Pipeline:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is not None:
            self._filled.put(None)
            self._thread.join()
        for plain in self._plain:
            zero(plain)
        if kind is None and self._error is not None:
            raise self._error

    def _write(self) -> None:
        while (chunk := self._filled.get()) is not None:
            try:
                if self._error is None:
                    self._seal(chunk)
            except BaseException as error:
                self._error = error
            self._free.put(chunk.buffer)

    def _seal(self, chunk: _Chunk) -> None:
        part = self._sealed[: chunk.bytes + TAG_BYTES]
        chunk.cipher.seal_into(chunk.index, last=chunk.last, plaintext=chunk.buffer[: chunk.bytes], out=part)
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
    """Return the kernel's record of a file's last change, or None for a stream that is no file."""
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
