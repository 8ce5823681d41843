"""The audit log: what was decided, each record chained to the one before it by its hash.

A record is canonical JSON without secrets: event, time, ids, codes, digests. Its hash covers the
record, and the record holds the hash before it; changing, removing or reordering records breaks the
chain from there on. Who can write the database can also write a new chain: the log shows mistakes and
tampering by others, not by the broker's own operator.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, insert, select

from glasshouse.broker.schema import audit
from glasshouse.errors import Code, VerificationError
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields
from glasshouse.wire.kdf import lengths_prefixed, sha256

__all__ = ["GENESIS", "MAX_PAGE", "append", "read", "verify_chain"]

GENESIS = bytes(32)
MAX_PAGE = 500
_MAX_RECORD_BYTES = 8 * 1024
_LABEL = b"glasshouse audit v1"
_LAST = select(audit.c.sequence, audit.c.sha256).order_by(audit.c.sequence.desc()).limit(1)
_APPEND = insert(audit)


def append(connection: Connection, event: str, now_us: int, **facts: str | int) -> None:
    """Append a record within the caller's transaction.

    The sequence number is unique: of two transactions that append at once, one is run again.
    """
    last = connection.execute(_LAST).one_or_none()
    sequence, previous = (1, GENESIS) if last is None else (last.sequence + 1, last.sha256)
    value: dict[str, Json] = {
        "event": event,
        "facts": dict(facts),
        "previous": previous.hex(),
        "sequence": sequence,
        "time_us": now_us,
    }
    record = encode(value)
    connection.execute(_APPEND, {"sequence": sequence, "record": record, "sha256": _hash(record)})


def read(connection: Connection, after: int) -> list[Json]:
    """Return up to `MAX_PAGE` records with a sequence number greater than `after`."""
    rows = connection.execute(
        select(audit.c.record).where(audit.c.sequence > after).order_by(audit.c.sequence).limit(MAX_PAGE)
    )
    return [decode(row.record, max_bytes=_MAX_RECORD_BYTES) for row in rows]


def verify_chain(records: Iterable[Json], *, previous: bytes = GENESIS, sequence: int = 0) -> bytes:
    """Check that `records` follow each other, and return the hash of the last one.

    Args:
        records: as `read` gave them, in order.
        previous, sequence: hash and number of the record before the first of them.

    Raises:
        VerificationError: `log-invalid`.
    """
    for value in records:
        fields = Fields(value, "audit record")
        sequence += 1
        if fields.integer("sequence") != sequence or fields.digest("previous") != previous:
            raise VerificationError(Code.LOG_INVALID, f"the audit log is broken at record {sequence}")
        previous = _hash(encode(value))
    return previous


def _hash(record: bytes) -> bytes:
    return sha256(lengths_prefixed(_LABEL, record))
