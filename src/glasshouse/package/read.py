"""Opens a sealed package: header, signature, key commitment, index; in that order (spec/sealed-package.md 6)."""

from __future__ import annotations

import hmac
import io
from typing import BinaryIO

from glasshouse.errors import Code, PackageError
from glasshouse.package.grant import Grant, Resume
from glasshouse.package.index import INDEX_ID, Entry, Index
from glasshouse.package.layout import HEADER_BYTES, Header, asset_key, check_commitment, plain_size, sealed_size
from glasshouse.package.manifest import Manifest, parse_signed
from glasshouse.package.streams import AssetReader, Positioned, SealedAsset, size_of
from glasshouse.wire.crypto import sha256


class Package:
    """A package whose public part has been checked; the stream must stay open while it is used.

    Attributes:
        manifest: what the owner signed.
        envelope: the bytes that were checked, for evidence and for the broker.
        header: the fixed header; it agrees with the manifest.
        header_sha256: what every chunk is bound to.
    """

    def __init__(self, *, source: Positioned, header: Header, envelope: bytes, manifest: Manifest) -> None:
        self.header = header
        self.header_sha256 = header.sha256
        self.envelope = envelope
        self.manifest = manifest
        self._source = source

    @classmethod
    def open(cls, stream: BinaryIO, *, owner_signing: bytes | None = None) -> Package:
        """Read and check what can be checked without a key, in a seekable stream over the whole package.

        Raises:
            PackageError: `package-not-recognised`, `unsupported`, `package-limit`, `package-truncated`,
                `package-tampered` or `package-owner-mismatch`.
            FormatError: `too-large`, `not-canonical`, `schema-invalid`, `wrong-type` or `signature-invalid`.
        """
        source, total = Positioned(stream), size_of(stream)
        header = Header.parse(source.read(0, min(total, HEADER_BYTES)))
        if total < header.total_bytes:
            raise PackageError(
                Code.PACKAGE_TRUNCATED, f"a package of {total} bytes whose header states {header.total_bytes}"
            )
        if total > header.total_bytes:
            raise PackageError(Code.PACKAGE_TAMPERED, f"{total - header.total_bytes} bytes behind a package's end")
        envelope = bytes(source.read(HEADER_BYTES, header.envelope_bytes))
        manifest = parse_signed(envelope, owner_signing)
        if manifest.header(header.envelope_bytes) != header:
            raise PackageError(Code.PACKAGE_TAMPERED, "a package whose header is not that of its signed manifest")
        return cls(source=source, header=header, envelope=envelope, manifest=manifest)

    def unlock(self, package_key: bytes | bytearray | memoryview) -> Index:
        """Open the index; the key's commitment is checked before any cipher sees the key.

        Raises:
            PackageError: `key-commitment-mismatch`, `package-tampered`, `package-truncated`, `package-path` or
                `package-limit`.
            FormatError: `not-canonical` or `schema-invalid`.
        """
        manifest = self.manifest
        check_commitment(package_key, manifest.package_id, manifest.key_commitment)
        sealed = self._source.read(self.header.index_offset, manifest.index_bytes)
        if not hmac.compare_digest(sha256(sealed), manifest.index_sha256):
            raise PackageError(Code.PACKAGE_TAMPERED, "a sealed index that is not the one that the owner signed")
        index = Index.parse(
            self._open_index(package_key, sealed),
            chunk_bytes=manifest.chunk_bytes,
            assets_offset=self.header.assets_offset,
            version=manifest.version,
        )
        if sum(sealed_size(entry.bytes, manifest.chunk_bytes) for entry in index.assets) != manifest.assets_bytes:
            raise PackageError(Code.PACKAGE_TAMPERED, "an index whose assets do not fill the package")
        return index

    def grant(
        self,
        package_key: bytes | bytearray | memoryview,
        index: Index,
        *,
        group_secret: bytes | None = None,
        resume: Resume | None = None,
    ) -> Grant:
        """Derive the keys of all assets of `unlock`'s index; in the custodian alone."""
        return Grant(
            version=self.manifest.version,
            job=index.job,
            suite=self.manifest.suite,
            chunk_bytes=self.manifest.chunk_bytes,
            header_sha256=self.header_sha256,
            assets=index.assets,
            keys=tuple(self._key(package_key, entry.id) for entry in index.assets),
            group_secret=group_secret,
            resume=resume,
        )

    def asset(self, entry: Entry, package_key: bytes | bytearray | memoryview) -> AssetReader:
        """Return a reader of one asset of `unlock`'s index."""
        return self._reader(self._source, entry, package_key)

    def _reader(self, source: Positioned, entry: Entry, package_key: bytes | bytearray | memoryview) -> AssetReader:
        sealed = SealedAsset(
            source,
            entry,
            version=self.manifest.version,
            suite=self.manifest.suite,
            chunk_bytes=self.manifest.chunk_bytes,
            header_sha256=self.header_sha256,
            key=self._key(package_key, entry.id),
        )
        return AssetReader(sealed)

    def _open_index(self, package_key: bytes | bytearray | memoryview, sealed: bytearray) -> bytearray:
        chunk_bytes = self.manifest.chunk_bytes
        size = plain_size(len(sealed), chunk_bytes)
        if size is None:
            raise PackageError(Code.PACKAGE_TAMPERED, "a sealed index of an impossible length")
        plain = bytearray(size)
        whole = Entry(id=INDEX_ID, path="", bytes=len(plain), digest=b"", offset=0)
        reader = self._reader(Positioned(io.BytesIO(sealed)), whole, package_key)
        for chunk in range(reader.asset.chunks):
            at = chunk * chunk_bytes
            reader.open_chunk(chunk, memoryview(plain)[at : at + chunk_bytes])
        return plain

    def _key(self, package_key: bytes | bytearray | memoryview, asset_id: int) -> bytes:
        return asset_key(package_key, asset_id, self.manifest.suite, self.header_sha256)
