"""Exact reads and writes on binary streams, and one sealed asset: opened anywhere, straight into its user's buffer.

Laws: sealed bytes are copied into this process's memory before anything looks at them; no byte reaches a destination
unless its whole chunk is authentic; when a call fails, all of its destination is zero; what a chunk is opened with
follows from its number alone, so that none opens in the place of another; memory beyond the destination is two chunks,
whatever the asset's size. Source: spec/sealed-package.md, section 4.
"""

from __future__ import annotations

import io
import os
from _thread import allocate_lock  # `threading` costs the agent 7 ms uncompiled
from typing import BinaryIO

from glasshouse.errors import Code, PackageError
from glasshouse.package.index import Entry
from glasshouse.package.layout import bound_cipher, chunk_count, stream_binding, stream_nonce
from glasshouse.wire.crypto import TAG_BYTES, Suite, zero


class Positioned:
    """Reads at offsets of a seekable stream, into the caller's buffer.

    A plain file is read with `preadv`, which shares no position: several threads, and processes
    that inherited the descriptor, may read at once. Any other stream is sought under a lock; use one
    `Positioned` for each such stream.

    The bytes are copied out before anything looks at them. A memory map would save the copy, but a
    host that changes the file between the cipher's two looks at it (authenticate, decrypt) could then
    make unauthenticated plaintext pass, and one that truncates it could end the process with SIGBUS.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        # A wrapper's `fileno` may be that of other bytes (gzip).
        raw = stream.raw if isinstance(stream, io.BufferedReader) else stream
        self._fd = raw.fileno() if type(raw) is io.FileIO and hasattr(os, "preadv") else None
        self._lock = allocate_lock()

    def read(self, offset: int, length: int) -> bytearray:
        """Return bytes from `offset` on; raises as `read_exactly`."""
        data = bytearray(length)
        self.read_exactly(offset, memoryview(data))
        return data

    def read_exactly(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; raises `PackageError` (`package-truncated`) where the stream ends before."""
        if self._fd is not None:
            self._read(offset, out)
            return
        with self._lock:
            self._stream.seek(offset)
            self._read(offset, out)

    def _read(self, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            if self._fd is not None:
                count = os.preadv(self._fd, [out[done:]], offset + done)
            else:
                count = self._stream.readinto(out[done:])  # type: ignore[attr-defined]  # typeshed: BinaryIO lacks it
            if not count:
                raise PackageError(Code.PACKAGE_TRUNCATED, "the file ends before its content does")
            done += count


def size_of(stream: BinaryIO) -> int:
    """Return a seekable stream's length."""
    return stream.seek(0, os.SEEK_END)


def write_all(out: BinaryIO, data: memoryview) -> None:
    """Write everything; an unbuffered file may take less at a time."""
    done = 0
    while done < len(data):
        count = out.write(data[done:])
        if not count:
            raise OSError("a stream that takes no more bytes")
        done += count


def as_bytes(destination: object) -> memoryview:
    """Return a view of single bytes over a bytearray, memoryview, numpy array or other buffer; raises `ValueError`."""
    view = memoryview(destination)  # type: ignore[arg-type]  # PEP 688: no static name before 3.12
    if view.readonly or not view.c_contiguous:
        raise ValueError("a destination is writable and contiguous")
    if view.nbytes == 0:  # a shape with a zero in it cannot be cast
        return memoryview(bytearray())
    return view.cast("B")


class SealedAsset:
    """An asset as the ciphertext that it is, also for a cipher of the caller's own, on a GPU. Holds the asset's key.

    Args:
        source: the whole package.
        version: of the package format, which names the hash of the asset's digest.
        chunk_bytes: plaintext bytes of every chunk but the last.
    """

    def __init__(
        self,
        source: Positioned,
        entry: Entry,
        *,
        version: int,
        suite: Suite,
        chunk_bytes: int,
        header_sha256: bytes,
        key: bytes,
    ) -> None:
        self.entry, self.version, self.suite, self.chunk_bytes = entry, version, suite, chunk_bytes
        self.header_sha256, self.key = header_sha256, key
        self.size = entry.bytes  # of the plaintext
        self.chunks = chunk_count(entry.bytes, chunk_bytes)  # at least one
        self.associated_data = stream_binding(header_sha256, entry.id)
        self._source = source

    def plain_bytes(self, chunk: int) -> int:
        """Return the plaintext bytes of a chunk."""
        self._check(chunk)
        return min(self.chunk_bytes, self.size - chunk * self.chunk_bytes)

    def nonce(self, chunk: int) -> bytes:
        """Return the 12 bytes that a chunk is opened under."""
        self._check(chunk)
        return stream_nonce(chunk, last=chunk == self.chunks - 1)

    def read_sealed(self, chunk: int, out: memoryview) -> None:
        """Read neighbouring chunks, each ciphertext and tag, from `chunk` on; raises as `Positioned.read_exactly`."""
        self._check(chunk)
        self._source.read_exactly(self.entry.offset + chunk * (self.chunk_bytes + TAG_BYTES), out)

    def _check(self, chunk: int) -> None:
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"an asset of {self.chunks} chunks has no chunk {chunk}")


class AssetReader:
    """Random access to the plaintext of one asset. Safe to share between threads; reads take turns."""

    def __init__(self, asset: SealedAsset) -> None:
        self.asset = asset
        self.size = asset.size  # plaintext bytes
        self._cipher = bound_cipher(suite=asset.suite, key=asset.key, binding=asset.associated_data)
        self._lock = allocate_lock()
        self._sealed = memoryview(bytearray(min(asset.size, asset.chunk_bytes) + TAG_BYTES))
        self._scratch: memoryview | None = None
        self._held = -1  # the chunk whose plaintext is in the scratch buffer

    def read_into(self, offset: int, destination: object) -> int:
        """Open the bytes from `offset` on into `destination`.

        Returns:
            Bytes read: the destination's length, or less where the asset ends.

        Raises:
            PackageError: `package-tampered` or `package-truncated`; the destination is zero then.
        """
        if offset < 0:
            raise ValueError("a negative offset")
        view = as_bytes(destination)
        count = max(0, min(len(view), self.size - offset))
        with self._lock:
            try:
                self._fill(offset, view[:count])
            except BaseException:
                zero(view[:count])
                raise
        return count

    def open_chunk(self, index: int, out: memoryview) -> None:
        """Open one whole chunk into `out`, which is as long as its plaintext; raises as `read_into`."""
        with self._lock:
            self._open(index, out)

    def close(self) -> None:
        """Wipe the plaintext that this reader holds; a later read opens its chunk anew."""
        with self._lock:
            self._held = -1
            if self._scratch is not None:
                zero(self._scratch)

    def __enter__(self) -> AssetReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            index, skip = divmod(offset + done, self.asset.chunk_bytes)
            length = self.asset.plain_bytes(index)
            if skip == 0 and length <= len(view) - done:
                self._open(index, view[done : done + length])
                done += length
                continue
            part = min(length - skip, len(view) - done)
            view[done : done + part] = self._chunk(index)[skip : skip + part]
            done += part

    def _chunk(self, index: int) -> memoryview:
        """Return a chunk's plaintext in the scratch buffer; small neighbouring reads open it once."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(len(self._sealed) - TAG_BYTES))
        out = self._scratch[: self.asset.plain_bytes(index)]
        if self._held != index:
            self._held = -1
            self._open(index, out)
            self._held = index
        return out

    def _open(self, index: int, out: memoryview) -> None:
        sealed = self._sealed[: len(out) + TAG_BYTES]
        self.asset.read_sealed(index, sealed)
        self._cipher.open_into(index, last=index == self.asset.chunks - 1, sealed=sealed, out=out)
