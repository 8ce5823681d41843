"""The audit log: what was decided, each record chained to the one before it by its hash.

Changing, removing or reordering records breaks the chain from there on. Who can write the database can also write a new
chain: the log shows mistakes and tampering by others, not by the broker's own operator. An owner who calls over the
network has a chain of their own, of what concerns them; the broker signs its head, and an owner who kept an earlier
head detects a new chain too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Insert, Select, bindparam, insert, select

from glasshouse.broker.http_api import GENESIS, AuditRecord
from glasshouse.broker.store.database_schema import audit, deployments, groups, own_audit, owners, packages
from glasshouse.wire.canonical import Json, decode

MAX_PAGE = 500
_MAX_RECORD_BYTES = 8 * 1024
_LAST = select(audit.c.sequence, audit.c.sha256).order_by(audit.c.sequence.desc()).limit(1)
_APPEND = insert(audit)
_OWN = own_audit.c.owner == bindparam("of")
_OWN_LAST = select(own_audit.c.sequence, own_audit.c.sha256).where(_OWN).order_by(own_audit.c.sequence.desc()).limit(1)
_OWN_APPEND = insert(own_audit)
_ENROLLED = select(owners.c.owner).where(owners.c.owner == bindparam("of"))
_OF_DEPLOYMENT = (
    select(owners.c.owner)
    .join(packages, packages.c.owner == owners.c.owner)
    .join(deployments, deployments.c.package_id == packages.c.package_id)
    .where(deployments.c.id == bindparam("deployment"))
)
_OF_GROUP = select(groups.c.deployment).where(groups.c.id == bindparam("group"))


def append(connection: Connection, event: str, now_us: int, of: bytes | None = None, /, **facts: str | int) -> None:
    """Append a record within the caller's transaction, and to the chain of the owner whom it concerns.

    The sequence number is unique: of two transactions that append at once, one is run again.

    Args:
        of: the owner whom it concerns; None where that follows from the facts' deployment or group.
        facts: no secrets.
    """
    owner = _concerned(connection, of, facts)
    chains: list[tuple[Insert, tuple[int, bytes], dict[str, bytes]]] = [(_APPEND, _last(connection, _LAST, {}), {})]
    if owner is not None:
        chains.append((_OWN_APPEND, _last(connection, _OWN_LAST, {"of": owner}), {"owner": owner}))
    for statement, (sequence, previous), key in chains:
        record = AuditRecord(event=event, facts=facts, previous=previous, sequence=sequence + 1, time_us=now_us)
        values = {"sequence": record.sequence, "record": record.encode(), "sha256": record.sha256}
        connection.execute(statement, values | key)


def _last(connection: Connection, query: Select[tuple[int, bytes]], values: Mapping[str, bytes]) -> tuple[int, bytes]:
    """Return number and hash of a chain's last record; of an empty one, 0 and `GENESIS`."""
    row = connection.execute(query, values).one_or_none()
    return (0, GENESIS) if row is None else (row.sequence, row.sha256)


def _concerned(connection: Connection, of: bytes | None, facts: Mapping[str, str | int]) -> bytes | None:
    """Return the owner whose chain a record belongs to; None where they never called over the network."""
    if of is not None:
        return connection.execute(_ENROLLED, {"of": of}).scalar_one_or_none()
    deployment = facts.get("deployment")
    if deployment is None and "group" in facts:
        group = bytes.fromhex(str(facts["group"]))
        deployment = connection.execute(_OF_GROUP, {"group": group}).scalar_one_or_none()
    return connection.execute(_OF_DEPLOYMENT, {"deployment": deployment}).scalar_one_or_none()


def read(connection: Connection, after: int) -> list[Json]:
    """Return up to `MAX_PAGE` records with a sequence number greater than `after`."""
    query = select(audit.c.record).where(audit.c.sequence > after).order_by(audit.c.sequence).limit(MAX_PAGE)
    return _records(connection, query)


def read_own(connection: Connection, owner: bytes, after: int) -> tuple[list[Json], int, bytes]:
    """Return a page of an owner's own records, and number and hash of their last one."""
    mine = select(own_audit.c.record).where(own_audit.c.owner == owner, own_audit.c.sequence > after)
    records = _records(connection, mine.order_by(own_audit.c.sequence).limit(MAX_PAGE))
    return records, *_last(connection, _OWN_LAST, {"of": owner})


def _records(connection: Connection, query: Select[Any]) -> list[Json]:
    return [decode(record, max_bytes=_MAX_RECORD_BYTES) for record in connection.execute(query).scalars()]
