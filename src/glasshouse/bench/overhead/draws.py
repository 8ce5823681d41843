"""Randomness that any language can draw again: SHA-256 over a label, the seed and three counters.

``D(purpose, a, b, i) = SHA-256("glasshouse/overhead/v1/" ‖ purpose ‖ 0x00 ‖ seed ‖ u64(a) ‖ u64(b) ‖ u64(i))``,
integers big-endian (spec/overhead-artifact.md section 2). What is drawn for one block or one resample never
depends on how many others were drawn before it.
"""

from __future__ import annotations

import hashlib

__all__ = ["SEED_BYTES", "stream"]

SEED_BYTES = 32
_LABEL = b"glasshouse/overhead/v1/"
_DIGEST_BYTES = 32


def stream(seed: bytes, purpose: str, first: int, second: int, count_bytes: int) -> bytes:
    """Return the first `count_bytes` of ``D(purpose, first, second, 0) ‖ D(purpose, first, second, 1) ‖ …``.

    Args:
        seed: 32 bytes, fixed before the run.
        purpose: what is drawn; ASCII without NUL.
        first, second: which one of them, each below 2^64.
        count_bytes: how much is needed.

    Raises:
        ValueError: a seed of another length.
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed of {len(seed)} bytes where {SEED_BYTES} are needed")
    head = hashlib.sha256(_LABEL + purpose.encode("ascii") + b"\x00" + seed + _u64(first) + _u64(second))
    parts = []
    for index in range(-(-count_bytes // _DIGEST_BYTES)):
        part = head.copy()
        part.update(_u64(index))
        parts.append(part.digest())
    return b"".join(parts)[:count_bytes]


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "big")
