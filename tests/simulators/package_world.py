"""Packages in memory: an owner, a recipient and the shortest way to a sealed job."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import BinaryIO

from glasshouse.package.content import find
from glasshouse.package.index import Index
from glasshouse.package.read import Package
from glasshouse.package.streams import AssetReader
from glasshouse.package.write import SealedManifest, Source, write
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import RecipientKey, SigningKey, Suite
from glasshouse.wire.policy import Assurance, Floor, Profile

CHUNK = 1024


def fixed(label: str, length: int) -> bytes:
    """Return bytes that look random and are the same in every run."""
    return hashlib.shake_256(label.encode()).digest(length)


OWNER = SigningKey(fixed("owner", 32))
STRANGER = SigningKey(fixed("stranger", 32))
RECIPIENT = RecipientKey(fixed("recipient", 96))
BACKUP = RecipientKey(fixed("backup", 96))
KEY = fixed("package key", 32)
PACKAGE_ID = fixed("package id", 16).hex()
RUN_ID = fixed("run id", 16).hex()
FLOOR = Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD)
FILES: dict[str, bytes] = {
    "data/empty": b"",
    "data/records": fixed("records", 3 * CHUNK + 100),
    "weights": fixed("weights", 2 * CHUNK),
}


def source(path: str, data: bytes) -> Source:
    return Source(path=path, bytes=len(data), open=lambda: io.BytesIO(data))


def seal(
    files: Mapping[str, bytes] | None = None,
    *,
    out: BinaryIO | None = None,
    job: dict[str, Json] | None = None,
    key: bytes = KEY,
    package_id: str = PACKAGE_ID,
    suite: Suite = Suite.AES_256_GCM,
    chunk_bytes: int = CHUNK,
    owner: SigningKey = OWNER,
    sources: list[Source] | None = None,
) -> tuple[bytes, SealedManifest]:
    """Seal files in memory; return the package's bytes and what `write` said."""
    stream = out if out is not None else io.BytesIO()
    content = FILES if files is None else files
    sealed = write(
        stream,
        sources=sources if sources is not None else [source(path, data) for path, data in content.items()],
        job={"epochs": 3} if job is None else job,
        workload="mlp",
        floor=FLOOR,
        owner=owner,
        owner_sealing=RECIPIENT.public,
        recipients=[RECIPIENT.public],
        package_key=key,
        package_id=package_id,
        suite=suite,
        chunk_bytes=chunk_bytes,
    )
    stream.seek(0)
    return stream.read(), sealed


def unlock(data: bytes, key: bytes = KEY) -> tuple[Package, Index]:
    package = Package.open(io.BytesIO(data), owner_signing=OWNER.public)
    return package, package.unlock(key)


def reader(data: bytes, path: str, key: bytes = KEY) -> AssetReader:
    package, index = unlock(data, key)
    return package.asset(find(index.assets, path), key)
