"""The chain of an audit log, without the database: each record holds the hash of the one before it.

An owner checks with it what a gate returned; commands that do so load no database library.
"""

from __future__ import annotations

from collections.abc import Iterable

from glasshouse.errors import Code, VerificationError
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.fields import Fields
from glasshouse.wire.kdf import lengths_prefixed, sha256

__all__ = ["GENESIS", "record_sha256", "verify_chain"]

GENESIS = bytes(32)
_LABEL = b"glasshouse audit v1"


def verify_chain(records: Iterable[Json], *, previous: bytes = GENESIS, sequence: int = 0) -> bytes:
    """Check that `records` follow each other, and return the hash of the last one.

    Args:
        records: as `audit.read` returned them, in order.
        previous, sequence: hash and number of the record before the first of them.

    Raises:
        VerificationError: `log-invalid`.
    """
    for value in records:
        fields = Fields(value, "audit record")
        sequence += 1
        if fields.integer("sequence") != sequence or fields.digest("previous") != previous:
            raise VerificationError(Code.LOG_INVALID, f"the audit log is broken at record {sequence}")
        previous = record_sha256(encode(value))
    return previous


def record_sha256(record: bytes) -> bytes:
    """Return the hash of a record, canonical JSON, by which the next one names it."""
    return sha256(lengths_prefixed(_LABEL, record))
