"""The chain of an audit log: each record holds the hash of the one before it.

An owner checks with it what a gate returned; commands that do so load no database library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, VerificationError
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import lengths_prefixed, sha256
from glasshouse.wire.record import Record, Sha256, raw, text

GENESIS = bytes(32)
_LABEL = b"glasshouse audit v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRecord(Record, name="audit record"):
    """One decision; without secrets."""

    event: Annotated[str, text()]
    facts: Annotated[Mapping[str, str | int], raw()]  # ids, codes, digests
    previous: Sha256  # hash of the record before, or `GENESIS`
    sequence: int  # from 1
    time_us: int

    @property
    def sha256(self) -> bytes:
        """Hash of the record, by which the next one names it."""
        return sha256(lengths_prefixed(_LABEL, self.encode()))


def verify_chain(records: Iterable[Json], *, previous: bytes = GENESIS, sequence: int = 0) -> bytes:
    """Check that `records` follow each other, and return the hash of the last one.

    Args:
        previous, sequence: hash and number of the record before the first of them.

    Raises:
        FormatError: `schema-invalid`.
        VerificationError: `log-invalid`.
    """
    for value in records:
        record = AuditRecord.from_json(value)
        sequence += 1
        if (record.sequence, record.previous) != (sequence, previous):
            raise VerificationError(Code.LOG_INVALID, f"the audit log is broken at record {sequence}")
        previous = record.sha256
    return previous
