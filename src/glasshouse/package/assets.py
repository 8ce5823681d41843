"""Opens one sealed asset: anywhere, any length, straight into the buffer that uses it.

Laws: no byte reaches a destination unless its whole chunk is authentic; when a call fails, all of its
destination is zero; memory beyond the destination is two chunks, whatever the asset's size.
"""

from __future__ import annotations

import hmac
import io
from _thread import allocate_lock  # `threading` costs the agent 7 ms uncompiled
from typing import BinaryIO

from glasshouse.errors import Code, PackageError
from glasshouse.package.chunks import SealedAsset
from glasshouse.package.content import content_hash
from glasshouse.package.layout import stream_cipher
from glasshouse.package.streams import as_bytes, write_all
from glasshouse.wire.crypto import TAG_BYTES, zero


class AssetReader:
    """Random and sequential access to one asset. Safe to share between threads; reads take turns.

    Args:
        sealed: its chunks, and what opens them.
        version: of the package format, which names the hash of the asset's digest.
    """

    def __init__(self, sealed: SealedAsset, version: int) -> None:
        self.size = sealed.size  # plaintext bytes
        self._asset, self._version = sealed, version
        self._cipher = stream_cipher(
            suite=sealed.suite, key=sealed.key, header_sha256=sealed.header_sha256, asset_id=sealed.entry.id
        )
        self._lock = allocate_lock()
        largest = min(sealed.size, sealed.chunk_bytes)
        self._sealed = memoryview(bytearray(largest + TAG_BYTES))
        self._scratch_bytes = largest
        self._scratch: memoryview | None = None
        self._held = -1  # the chunk whose plaintext is in the scratch buffer

    def read_into(self, offset: int, destination: object) -> int:
        """Open the bytes from `offset` on into `destination`.

        Args:
            offset: first byte, from 0.
            destination: a writable contiguous buffer (bytearray, numpy array, a tensor's storage).

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

    def verify(self) -> None:
        """Open the whole asset and check its digest.

        Raises:
            PackageError: `package-tampered`, `package-truncated` or `asset-digest-mismatch`.
        """
        self._walk(None)

    def copy_to(self, out: BinaryIO) -> None:
        """Write the whole asset to `out`, chunk by authentic chunk, and check its digest.

        Raises:
            PackageError: as `verify`; what was written by then is to be thrown away.
        """
        self._walk(out)

    def stream(self) -> io.BufferedReader:
        """Return the asset as a seekable binary file; closing it closes this reader."""
        return io.BufferedReader(_AssetStream(self), buffer_size=1 << 16)

    def close(self) -> None:
        """Wipe the plaintext that this reader holds; a later read opens its chunk anew."""
        with self._lock:
            self._wipe()

    def __enter__(self) -> AssetReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            index, skip = divmod(offset + done, self._asset.chunk_bytes)
            length = self._asset.plain_bytes(index)
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
            self._scratch = memoryview(bytearray(self._scratch_bytes))
        out = self._scratch[: self._asset.plain_bytes(index)]
        if self._held != index:
            self._held = -1
            self._open(index, out)
            self._held = index
        return out

    def _open(self, index: int, out: memoryview) -> None:
        sealed = self._sealed[: len(out) + TAG_BYTES]
        self._asset.read_sealed(index, sealed)
        self._cipher.open_into(index, last=index == self._asset.chunks - 1, sealed=sealed, out=out)

    def _walk(self, out: BinaryIO | None) -> None:
        digest = content_hash(self._version)
        with self._lock:
            try:
                for index in range(self._asset.chunks):
                    plain = self._chunk(index)
                    digest.update(plain)
                    if out is not None:
                        write_all(out, plain)
            finally:
                self._wipe()
        if not hmac.compare_digest(digest.digest(), self._asset.entry.digest):
            raise PackageError(Code.ASSET_DIGEST, "an asset that is not what its owner's index says")

    def _wipe(self) -> None:
        self._held = -1
        if self._scratch is not None:
            zero(self._scratch)


class _AssetStream(io.RawIOBase):
    """An `AssetReader` with a position."""

    def __init__(self, reader: AssetReader) -> None:
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        count = self._reader.read_into(self._position, buffer)
        self._position += count
        return count

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError("no such position")
        self._position = base + offset
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()
