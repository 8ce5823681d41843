"""What the custodian leaves to the worker in secret memory: the keys of the assets that it may read, and no other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.package.index import DIGEST_NAMES, MAX_ASSETS, Entry, check_job, check_text
from glasshouse.package.layout import MAX_INDEX_BYTES, VERSIONS, check_chunk_bytes
from glasshouse.package.paths import check_paths
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import GROUP_SECRET_BYTES, KEY_BYTES, Suite
from glasshouse.wire.group import MAX_RANKS
from glasshouse.wire.record import APART, LEFT_OUT, Record, Sha256, digest, fixed, integer, items, octets, raw

LENGTH_BYTES = 8
RESUME_PART_BYTES = 384
"""At most, of one part of a checkpoint in a grant."""
# An index entry grows by its id, its offset and its key.
MAX_GRANT_BYTES = LENGTH_BYTES + MAX_INDEX_BYTES + MAX_ASSETS * 128 + MAX_RANKS * RESUME_PART_BYTES


_Key: TypeAlias = Annotated[bytes, octets(KEY_BYTES)]
_VERSION = integer(min(VERSIONS), max(VERSIONS))
# Entry and key of each asset.
_ASSETS = {
    version: items(
        MAX_ASSETS,
        fixed(
            id=integer(1),
            path=raw(check_text),
            bytes=integer(),
            offset=integer(),
            **{DIGEST_NAMES[version]: digest()},
            key=octets(KEY_BYTES),
        ),
    )
    for version in VERSIONS
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePart(Record, name="grant.resume.parts"):
    """What opens one rank's part of a checkpoint, whose chunks lie in the file that comes with the grant."""

    bytes: Annotated[int, integer(1)]  # of the plaintext
    chunk_bytes: int  # plaintext bytes of a full chunk
    front_sha256: Sha256  # what every chunk is bound to
    key: _Key = field(repr=False)
    offset: int  # of the first chunk in the file
    rank: int
    suite: Suite

    def __post_init__(self) -> None:
        check_chunk_bytes(self.chunk_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume(Record, name="grant.resume"):
    """The checkpoint that a leg of a line goes on from: the parts of this machine's ranks, in their order."""

    parts: Annotated[tuple[ResumePart, ...], items(MAX_RANKS, min_items=1)]
    seq: Annotated[int, integer(1)]
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant(Record, name="grant", max_bytes=MAX_GRANT_BYTES):
    """Everything that opens a package's assets. Holds keys: its repr shows none.

    Law: ``Grant.parse(g.encode()) == g``, also with anything behind the encoded bytes.
    """

    version: Annotated[int, _VERSION]  # of the package format
    job: Annotated[dict[str, Json], raw(check_job)] = field(repr=False)  # the workload's parameters
    suite: Suite
    chunk_bytes: int  # plaintext bytes of a full chunk
    header_sha256: Sha256  # what every chunk is bound to
    assets: Annotated[tuple[Entry, ...], APART] = field(repr=False)  # what may be read
    keys: Annotated[tuple[bytes, ...], APART] = field(repr=False)  # one for each asset, in the same order
    # What the ranks of this run share; None for a run in one process.
    group_secret: Annotated[bytes | None, octets(GROUP_SECRET_BYTES), LEFT_OUT] = field(default=None, repr=False)
    resume: Annotated[Resume | None, LEFT_OUT] = None  # None where the job begins from the beginning

    def __post_init__(self) -> None:
        check_chunk_bytes(self.chunk_bytes)
        if len(self.keys) != len(self.assets) or any(len(key) != KEY_BYTES for key in self.keys):
            raise FormatError(Code.SCHEMA, "a grant without one key for each asset")
        if self.group_secret is not None and len(self.group_secret) != GROUP_SECRET_BYTES:
            raise FormatError(Code.SCHEMA, "a group secret of another length")
        check_paths(entry.path for entry in self.assets)

    def to_json(self) -> dict[str, Json]:
        rows = [
            (entry.id, entry.path, entry.bytes, entry.offset, entry.digest, key)
            for entry, key in zip(self.assets, self.keys, strict=True)
        ]
        return {**Record.to_json(self), "assets": _ASSETS[self.version].write(rows)}

    @classmethod
    def from_json(cls, value: Json, where: str | None = None, **apart: Any) -> Grant:
        """Inverse of `to_json`; raises as `parse` does."""
        rest = dict(value) if isinstance(value, dict) else {}
        version = _VERSION.read(rest.get("version"), "grant.version")
        rows = _ASSETS[version].read(rest.pop("assets", None), "grant.assets")
        entries = tuple(
            Entry(id=number, path=path, bytes=size, offset=offset, digest=sha)
            for number, path, size, offset, sha, _ in rows
        )
        keys = tuple(row[-1] for row in rows)
        return super(Grant, cls).from_json(rest, where, assets=entries, keys=keys, **apart)

    def encode(self) -> bytes:
        """Return the length (8 bytes, big endian) and the canonical JSON."""
        body = Record.encode(self)
        return len(body).to_bytes(LENGTH_BYTES, "big") + body

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, **apart: Any) -> Grant:
        """Inverse of `encode`; the buffer may be larger than the grant.

        Raises:
            FormatError: `too-large`, `not-canonical` or `schema-invalid`.
            PackageError: `package-path` or `package-limit`.
        """
        view = memoryview(data)
        length = int.from_bytes(view[:LENGTH_BYTES], "big")
        if length > MAX_GRANT_BYTES or LENGTH_BYTES + length > len(view):
            raise FormatError(Code.TOO_LARGE, "a grant that is longer than its memory or its limit")
        return super(Grant, cls).parse(view[LENGTH_BYTES : LENGTH_BYTES + length], **apart)
