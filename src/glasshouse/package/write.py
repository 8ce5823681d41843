"""Seals a package in one pass over its content (spec/sealed-package.md 7, docs/adr/0002).

Every length follows from the sizes of the sources, so header and manifest are as long with zeros as
with digests: assets are streamed first, the index after them, and the front is written last. A file
that was not finished has no magic and is not a package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

from glasshouse.errors import Code, PackageError, UsageError
from glasshouse.package.index import INDEX_ID, Index, check_job
from glasshouse.package.layout import (
    DEFAULT_CHUNK_BYTES,
    MAX_ASSETS_BYTES,
    MAX_INDEX_BYTES,
    VERSION,
    key_commitment,
    sealed_size,
)
from glasshouse.package.manifest import Manifest
from glasshouse.package.sealer import Progress, Sealer, Source
from glasshouse.package.streams import write_all
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import KEY_BYTES, SigningKey, Suite, hpke_seal, sha256
from glasshouse.wire.policy import Floor


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedManifest:
    """What `write` made."""

    envelope: bytes  # the signed manifest, as it stands in the package
    manifest: Manifest  # the same, parsed


def write(
    out: BinaryIO,
    *,
    sources: Sequence[Source],
    job: dict[str, Json],
    workload: str,
    floor: Floor,
    owner: SigningKey,
    owner_sealing: bytes,
    recipients: Sequence[bytes],
    package_key: bytes | bytearray | memoryview,
    package_id: str,
    suite: Suite = Suite.AES_256_GCM,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    progress: Progress | None = None,
) -> SealedManifest:
    """Seal `sources` into `out`, from its beginning.

    Args:
        out: a seekable binary stream; what it held is replaced.
        sources: the files, in any order.
        job: the workload's parameters; canonical JSON, so no floats.
        workload: `mlp`, `lora` or `script`.
        floor: what the owner demands of every runtime.
        owner: signs the manifest.
        owner_sealing: the owner's HPKE public key.
        recipients: HPKE public keys to which outputs are sealed.
        package_key: 32 random bytes, for this package alone.
        package_id: 16 random bytes as hex.
        chunk_bytes: plaintext bytes of a full chunk.
        progress: called with (plaintext bytes done, plaintext bytes in all) after each chunk.

    Raises:
        PackageError: `package-path`, `package-limit` or `source-changed`.
        FormatError: `schema-invalid`.
        UsageError: `file-missing` when a source cannot be read.
        OSError: from `out`.
    """
    if len(package_key) != KEY_BYTES:
        raise UsageError(Code.USAGE, "a package key is 32 bytes")
    # A recipient's key that cannot be used would show only at the end of the training.
    for recipient in (*recipients, owner_sealing):
        hpke_seal(b"", recipient=recipient, info=b"")
    ordered = sorted(sources, key=lambda source: source.path.encode("utf-8", "surrogatepass"))
    draft = _draft(ordered, job, chunk_bytes)
    assets_bytes = sum(sealed_size(source.bytes, chunk_bytes) for source in ordered)
    if assets_bytes > MAX_ASSETS_BYTES:
        raise PackageError(Code.PACKAGE_LIMIT, f"{assets_bytes} bytes of assets; the limit is {MAX_ASSETS_BYTES}")
    manifest = Manifest(
        package_id=package_id,
        suite=suite,
        chunk_bytes=chunk_bytes,
        workload=workload,
        floor=floor,
        recipients=tuple(recipients),
        owner_signing=owner.public,
        owner_sealing=owner_sealing,
        key_commitment=key_commitment(package_key, package_id),
        index_sha256=bytes(32),
        index_bytes=sealed_size(len(draft.encode()), chunk_bytes),
        assets_bytes=assets_bytes,
    )
    header = manifest.header(len(manifest.sign(owner)))
    sealer = Sealer(header, package_key)

    out.seek(header.assets_offset)
    digests = sealer.assets(ordered, out, progress)
    out.truncate()
    index = _draft(ordered, job, chunk_bytes, digests=digests, assets_offset=header.assets_offset)
    sealed_index = sealer.small(INDEX_ID, index.encode())
    manifest = replace(manifest, index_sha256=sha256(sealed_index))
    envelope = manifest.sign(owner)
    front = header.encode() + envelope + sealed_index
    if len(front) != header.assets_offset:
        raise AssertionError("the front of a package has another length than planned")
    out.seek(0)
    write_all(out, memoryview(front))
    out.flush()
    return SealedManifest(envelope=envelope, manifest=manifest)


def _draft(
    sources: Sequence[Source],
    job: dict[str, Json],
    chunk_bytes: int,
    *,
    digests: Sequence[bytes] | None = None,
    assets_offset: int = 0,
) -> Index:
    """Return the index; with zeros for digests it has its final length already."""
    known = digests or [bytes(32)] * len(sources)
    files = [(source.path, source.bytes, digest) for source, digest in zip(sources, known, strict=True)]
    index = Index.of(
        job=check_job(job), files=files, chunk_bytes=chunk_bytes, assets_offset=assets_offset, version=VERSION
    )
    if (size := sealed_size(len(index.encode()), chunk_bytes)) > MAX_INDEX_BYTES:
        raise PackageError(Code.PACKAGE_LIMIT, f"an index of {size} bytes; the limit is {MAX_INDEX_BYTES}")
    return index
