"""The sealed index: the job's parameters and every asset's name, size and digest (spec/sealed-package.md 5).

What follows from the order and the sizes, ids and offsets, is not written, so it cannot be written
wrong: assets lie one behind another in the order of their paths, numbered from 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.package.layout import MAX_INDEX_BYTES, VERSIONS, sealed_size
from glasshouse.package.paths import check_paths
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.record import choice, digest, fixed, integer, items, raw

INDEX_ID = 0
MAX_ASSETS = 1 << 14
FORMATS = {version: f"glasshouse-index/{version}" for version in VERSIONS}
DIGEST_NAMES = {1: "sha256", 2: "blake3"}
"""The member that holds an asset's digest, 32 bytes, in each version of the format."""

Digest: TypeAlias = bytes  # within Entry, `bytes` is a length


def check_text(value: Json) -> str:
    """Return a path as it is: `check_paths` judges it, with the code that paths have."""
    if not isinstance(value, str):
        raise FormatError(Code.SCHEMA, "a path that is not text")
    return value


def check_job(job: Json) -> dict[str, Json]:
    """Return the job if it is an object; raises `FormatError`."""
    if not isinstance(job, dict):
        raise FormatError(Code.SCHEMA, "index.job is not an object")
    return dict(job)


_LAYOUTS = {
    version: fixed(
        format=choice((FORMATS[version],)),
        job=raw(check_job),
        assets=items(MAX_ASSETS, fixed(path=raw(check_text), bytes=integer(), **{DIGEST_NAMES[version]: digest()})),
    )
    for version in VERSIONS
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One asset."""

    id: int  # its number in the package, from 1
    path: str  # relative, with `/` between components
    bytes: int  # plaintext length
    digest: Digest  # of the plaintext, 32 bytes, by the hash of the package's version (`content`)
    offset: int  # where its first sealed chunk begins in the file


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """What is inside a package.

    Law: ``Index.parse(i.encode(), …) == i`` with the same chunk size and asset offset, and the reverse.
    """

    job: dict[str, Json]  # the workload's parameters, canonical JSON (no floats)
    assets: tuple[Entry, ...]  # in ascending order of their paths' UTF-8 bytes
    version: int  # of the package format, as in the header

    @classmethod
    def of(
        cls,
        *,
        job: dict[str, Json],
        files: Iterable[tuple[str, int, bytes]],
        chunk_bytes: int,
        assets_offset: int,
        version: int,
    ) -> Index:
        """Number and place the assets.

        Args:
            files: (path, plaintext bytes, digest of the plaintext), in order.
            assets_offset: where the asset area begins in the file.

        Raises:
            PackageError: `package-path` or `package-limit`.
        """
        entries: list[Entry] = []
        offset = assets_offset
        for number, (path, size, sha) in enumerate(files, start=1):
            if number > MAX_ASSETS:
                raise PackageError(Code.PACKAGE_LIMIT, f"more than {MAX_ASSETS} assets; pack small files together")
            entries.append(Entry(id=number, path=path, bytes=size, digest=sha, offset=offset))
            offset += sealed_size(size, chunk_bytes)
        check_paths(entry.path for entry in entries)
        return cls(job=job, assets=tuple(entries), version=version)

    def encode(self) -> bytes:
        """Return the canonical bytes that are sealed."""
        files = [(entry.path, entry.bytes, entry.digest) for entry in self.assets]
        return encode(_LAYOUTS[self.version].write((FORMATS[self.version], self.job, files)))

    @classmethod
    def parse(
        cls, data: bytes | bytearray | memoryview, *, chunk_bytes: int, assets_offset: int, version: int
    ) -> Index:
        """Inverse of `encode`, for the version that the signed manifest states; raises `FormatError`, and as `of`."""
        value = decode(data, max_bytes=MAX_INDEX_BYTES)
        _, job, files = _LAYOUTS[version].read(value, "index")
        return cls.of(job=job, files=files, chunk_bytes=chunk_bytes, assets_offset=assets_offset, version=version)
