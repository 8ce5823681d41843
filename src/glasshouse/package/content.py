"""The digest of an asset's plaintext, by the version of the package (spec/sealed-package.md 5, docs/adr/0015).

Version 1 has SHA-256, version 2 BLAKE3: hashing was more than half of the time of sealing.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

DIGEST_NAMES = {1: "sha256", 2: "blake3"}
"""The member of the index that holds an asset's digest, 32 bytes, in each version of the format."""


class ContentHash(Protocol):
    """A running hash, as those of `hashlib`."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


def content_hash(version: int) -> ContentHash:
    """Return a fresh hash for the assets of a package of this version."""
    if version == 1:
        return hashlib.sha256()
    # Imported where a whole asset is hashed, so that neither agent nor custodian loads its native code.
    import blake3

    return blake3.blake3()
