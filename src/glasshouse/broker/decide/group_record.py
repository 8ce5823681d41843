"""How a group is recorded, and its one change: released or refused, for good."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, select, update

from glasshouse.broker.store import audit_log
from glasshouse.broker.store.database_schema import groups, members
from glasshouse.errors import Code, RefusedError
from glasshouse.handshake.group_rules import GroupRecord, GroupState

_GROUP = select(groups).where(groups.c.id == bindparam("group"))
_DECIDE = update(groups).where(groups.c.id == bindparam("group"), groups.c.state == GroupState.OPEN.value)
_MACHINES = select(members.c.machine).where(
    members.c.group_id == bindparam("group"), members.c.evidence_sha256.is_not(None)
)
_FORGET = update(members).where(members.c.group_id == bindparam("group")).values(evidence=None)


def group_record(connection: Connection, group_id: bytes) -> GroupRecord:
    """Return how a group is recorded; raises `RefusedError`, `deployment-unknown`."""
    row = connection.execute(_GROUP, {"group": group_id}).one_or_none()
    if row is None:
        raise RefusedError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such group")
    return GroupRecord(
        id=row.id,
        deployment=row.deployment,
        machines=row.machines,
        ranks=row.ranks,
        state=GroupState(row.state),
        deadline_us=row.deadline_us,
        culprit=row.culprit,
        code=None if row.code is None else Code(row.code),
    )


def settle(
    connection: Connection,
    group_id: bytes,
    state: GroupState,
    *,
    machine: int | None = None,
    code: Code | None = None,
    now_us: int,
) -> bool:
    """Decide a group that is still open, and forget the evidence that waited; return whether it was open."""
    values = {"state": state.value, "culprit": machine, "code": code and code.value, "decided_us": now_us}
    if connection.execute(_DECIDE, {"group": group_id, **values}).rowcount != 1:
        return False
    connection.execute(_FORGET, {"group": group_id})
    return True


def refuse(connection: Connection, group_id: bytes, *, machine: int, code: Code, now_us: int) -> None:
    """Refuse a group that is still open, because of one of its machines."""
    if settle(connection, group_id, GroupState.REFUSED, machine=machine, code=code, now_us=now_us):
        audit_log.append(connection, "group-refusal", now_us, code=code.value, group=group_id.hex(), machine=machine)


def current(connection: Connection, group_id: bytes, now_us: int) -> GroupRecord:
    """Return how a group stands now: one whose deadline has passed is refused first."""
    record = group_record(connection, group_id)
    if not record.over(now_us):
        return record
    missing = set(range(record.machines)) - set(accepted_machines(connection, group_id))
    code = Code.RANK_LOST if missing else Code.INTERNAL  # all were accepted, and a defect kept us from releasing
    refuse(connection, group_id, machine=min(missing, default=0), code=code, now_us=now_us)
    return group_record(connection, group_id)


def accepted_machines(connection: Connection, group_id: bytes) -> Sequence[int]:
    """Return the machines of a group that were accepted."""
    return connection.execute(_MACHINES, {"group": group_id}).scalars().all()
