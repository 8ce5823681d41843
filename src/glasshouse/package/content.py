"""Assets by their names and as a whole, for owner and worker; neither agent nor custodian imports this.

The hash of an asset's digest follows from the version (spec/sealed-package.md 5, docs/adr/0015): version 1 has
SHA-256, version 2 BLAKE3, as hashing was more than half of the time of sealing.
"""

from __future__ import annotations

import hashlib
import hmac
import io
from collections.abc import Iterable
from typing import BinaryIO, Protocol

from glasshouse.errors import Code, PackageError
from glasshouse.package.grant import Grant
from glasshouse.package.index import Entry
from glasshouse.package.streams import AssetReader, Positioned, SealedAsset, write_all
from glasshouse.wire.crypto import zero


class ContentHash(Protocol):
    """A running hash, as those of `hashlib`."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


def content_hash(version: int) -> ContentHash:
    """Return a fresh hash for the assets of a package of this version."""
    if version == 1:
        return hashlib.sha256()
    import blake3  # native code, which the worker does without: it reads assets piece by piece

    return blake3.blake3()


def find(assets: Iterable[Entry], path: str) -> Entry:
    """Return the asset called `path`; raises `PackageError` (`asset-unknown`)."""
    for entry in assets:
        if entry.path == path:
            return entry
    raise PackageError(Code.ASSET_UNKNOWN, f"no input is called {path[:64]!a} here")


def granted_asset(grant: Grant, source: Positioned, path: str) -> SealedAsset:
    """Return the chunks of the asset called `path` of the sealed package, and what opens them; raises as `find`."""
    entry = find(grant.assets, path)
    return SealedAsset(
        source,
        entry,
        version=grant.version,
        suite=grant.suite,
        chunk_bytes=grant.chunk_bytes,
        header_sha256=grant.header_sha256,
        key=grant.keys[grant.assets.index(entry)],
    )


def verify_content(reader: AssetReader, out: BinaryIO | None = None) -> None:
    """Open a whole asset and check its digest; write it to `out`, chunk by authentic chunk.

    Raises:
        PackageError: `package-tampered`, `package-truncated` or `asset-digest-mismatch`; what was written by then is to
            be thrown away.
    """
    asset = reader.asset
    digest = content_hash(asset.version)
    plain = memoryview(bytearray(min(asset.size, asset.chunk_bytes)))
    try:
        for chunk in range(asset.chunks):
            piece = plain[: asset.plain_bytes(chunk)]
            reader.open_chunk(chunk, piece)
            digest.update(piece)
            if out is not None:
                write_all(out, piece)
    finally:
        zero(plain)
    if not hmac.compare_digest(digest.digest(), asset.entry.digest):
        raise PackageError(Code.ASSET_DIGEST, "an asset whose digest is not the one in its owner's index")


class AssetStream(io.RawIOBase):
    """A reader with a position, as a seekable binary file; closing it closes the reader."""

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


def open_stream(reader: AssetReader) -> io.BufferedReader:
    """Return an asset as a buffered `AssetStream`."""
    return io.BufferedReader(AssetStream(reader), buffer_size=1 << 16)
