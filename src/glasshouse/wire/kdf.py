"""HKDF-SHA-256, unambiguous concatenation, and digests that only a salt makes comparable."""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


def sha256(data: bytes | bytearray | memoryview) -> bytes:
    """Return the SHA-256 of `data`, 32 bytes."""
    return hashlib.sha256(data).digest()


def salted(salt: bytes | bytearray | memoryview, digest: bytes) -> bytes:
    """Return HMAC-SHA-256(salt, digest): it commits to the digest, and without the salt no guess can be compared."""
    return hmac.digest(salt, digest, "sha256")


def lengths_prefixed(*parts: bytes) -> bytes:
    """Concatenate parts, each behind its length as eight big-endian bytes: no other sequence gives the same bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def derive(key: bytes | bytearray | memoryview, *info: bytes, salt: bytes = b"", length: int = 32) -> bytes:
    """Derive a key with HKDF-SHA-256 (RFC 5869).

    Args:
        key: uniformly random input keying material.
        info: a label and what the key is bound to; length-prefixed before use.
    """
    return HKDF(algorithm=SHA256(), length=length, salt=salt or None, info=lengths_prefixed(*info)).derive(key)
