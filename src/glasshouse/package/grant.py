"""What the custodian leaves to the worker in secret memory: the keys of the assets that it may read, and no other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import BinaryIO

from glasshouse.errors import Code, FormatError
from glasshouse.package.assets import AssetReader
from glasshouse.package.chunks import SealedAsset
from glasshouse.package.content import DIGEST_NAMES
from glasshouse.package.index import MAX_ASSETS, Entry, Index, check_job, find, path_field
from glasshouse.package.layout import MAX_INDEX_BYTES, VERSIONS, asset_key, check_chunk_bytes
from glasshouse.package.paths import check_paths
from glasshouse.package.read import Package
from glasshouse.package.streams import Positioned
from glasshouse.wire.aead import KEY_BYTES, Suite
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.group import SECRET_BYTES

__all__ = ["LENGTH_BYTES", "MAX_GRANT_BYTES", "Grant", "grant"]

LENGTH_BYTES = 8
# An index entry grows by its id, its offset and its key.
MAX_GRANT_BYTES = LENGTH_BYTES + MAX_INDEX_BYTES + MAX_ASSETS * 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Everything that opens a package's assets. Holds keys: its repr shows none.

    Law: ``Grant.parse(g.encode()) == g``, also with anything behind the encoded bytes.

    Attributes:
        version: of the package format.
        job: the workload's parameters.
        suite: bulk cipher.
        chunk_bytes: plaintext bytes of a full chunk.
        header_sha256: what every chunk is bound to.
        assets: what may be read.
        keys: one key for each asset, in the same order.
        group_secret: what the ranks of this run share; None for a run in one process.
    """

    version: int
    job: dict[str, Json] = field(repr=False)
    suite: Suite
    chunk_bytes: int
    header_sha256: bytes
    assets: tuple[Entry, ...] = field(repr=False)
    keys: tuple[bytes, ...] = field(repr=False)
    group_secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_chunk_bytes(self.chunk_bytes)
        if len(self.keys) != len(self.assets) or any(len(key) != KEY_BYTES for key in self.keys):
            raise FormatError(Code.SCHEMA, "a grant without one key for each asset")
        if self.group_secret is not None and len(self.group_secret) != SECRET_BYTES:
            raise FormatError(Code.SCHEMA, "a group secret of another length")
        check_paths(entry.path for entry in self.assets)

    def encode(self) -> bytes:
        """Return the length (8 bytes, big endian) and the canonical JSON."""
        assets: list[Json] = [
            {
                "bytes": entry.bytes,
                "id": entry.id,
                "key": b64encode(key),
                "offset": entry.offset,
                "path": entry.path,
                DIGEST_NAMES[self.version]: entry.digest.hex(),
            }
            for entry, key in zip(self.assets, self.keys, strict=True)
        ]
        group: dict[str, Json] = {} if self.group_secret is None else {"group_secret": b64encode(self.group_secret)}
        body = encode(
            {
                "assets": assets,
                "chunk_bytes": self.chunk_bytes,
                "header_sha256": self.header_sha256.hex(),
                "job": self.job,
                "suite": self.suite.value,
                "version": self.version,
                **group,
            }
        )
        return len(body).to_bytes(LENGTH_BYTES, "big") + body

    @classmethod
    def parse(cls, buffer: bytes | bytearray | memoryview) -> Grant:
        """Inverse of `encode`; the buffer may be larger than the grant.

        Raises:
            FormatError: `too-large`, `not-canonical` or `schema-invalid`.
            PackageError: `package-path` or `package-limit`.
        """
        view = memoryview(buffer)
        length = int.from_bytes(view[:LENGTH_BYTES], "big")
        if length > MAX_GRANT_BYTES or LENGTH_BYTES + length > len(view):
            raise FormatError(Code.TOO_LARGE, "a grant that is longer than its memory or its limit")
        fields = Fields(decode(view[LENGTH_BYTES : LENGTH_BYTES + length], max_bytes=MAX_GRANT_BYTES), "grant")
        version = fields.integer("version", low=min(VERSIONS), high=max(VERSIONS))
        entries: list[Entry] = []
        keys: list[bytes] = []
        for item in fields.items("assets", max_items=MAX_ASSETS):
            one = Fields(item, "grant.assets")
            keys.append(one.octets("key", length=KEY_BYTES))
            entries.append(
                Entry(
                    id=one.integer("id", low=1),
                    path=path_field(one),
                    bytes=one.integer("bytes"),
                    digest=one.digest(DIGEST_NAMES[version]),
                    offset=one.integer("offset"),
                )
            )
            one.end()
        found = cls(
            version=version,
            job=check_job(fields.any("job")),
            suite=Suite(fields.choice("suite", list(Suite))),
            chunk_bytes=fields.integer("chunk_bytes"),
            header_sha256=fields.digest("header_sha256"),
            assets=tuple(entries),
            keys=tuple(keys),
            group_secret=fields.octets("group_secret", length=SECRET_BYTES) if fields.has("group_secret") else None,
        )
        fields.end()
        return found

    def open(self, stream: BinaryIO | Positioned, path: str) -> AssetReader:
        """Return a reader of the asset called `path`.

        Args:
            stream: the sealed package.
            path: the asset's name.

        Raises:
            PackageError: `asset-unknown`.
        """
        entry = find(self.assets, path)
        return AssetReader(
            stream,
            entry,
            suite=self.suite,
            chunk_bytes=self.chunk_bytes,
            header_sha256=self.header_sha256,
            asset_key=self.keys[self.assets.index(entry)],
            version=self.version,
        )

    def sealed(self, source: Positioned, path: str) -> SealedAsset:
        """Return the chunks of the asset called `path`, for a cipher of the caller's own.

        Raises:
            PackageError: `asset-unknown`.
        """
        entry = find(self.assets, path)
        return SealedAsset(
            source,
            entry,
            suite=self.suite,
            chunk_bytes=self.chunk_bytes,
            header_sha256=self.header_sha256,
            key=self.keys[self.assets.index(entry)],
        )


def grant(
    package: Package,
    package_key: bytes | bytearray | memoryview,
    index: Index,
    *,
    group_secret: bytes | None = None,
) -> Grant:
    """Derive the keys of an unlocked package's assets; runs in the custodian alone."""
    suite = package.manifest.suite
    return Grant(
        version=package.manifest.version,
        job=index.job,
        suite=suite,
        chunk_bytes=package.manifest.chunk_bytes,
        header_sha256=package.header_sha256,
        assets=index.assets,
        keys=tuple(asset_key(package_key, entry.id, suite, package.header_sha256) for entry in index.assets),
        group_secret=group_secret,
    )
