"""How a group and its machines are recorded, and its one change: released or refused, for good."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, insert, select, update

from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.store import audit_log
from glasshouse.broker.store.database_schema import challenges, groups, members
from glasshouse.errors import Code, InternalError, RefusedError, UsageError
from glasshouse.handshake.group_rules import GroupRecord, GroupState
from glasshouse.handshake.messages import Challenge, Pending
from glasshouse.handshake.records import LaunchRecord
from glasshouse.wire.group import Group

_GROUP = select(groups).where(groups.c.id == bindparam("group"))
_DECIDE = update(groups).where(groups.c.id == bindparam("group"), groups.c.state == GroupState.OPEN.value)
ACCEPTED = members.c.evidence_sha256.is_not(None)
_MACHINES = select(members.c.machine).where(members.c.group_id == bindparam("group"), ACCEPTED)
_ACCEPTED_FOR = (
    select(challenges.c.body)
    .join(members, members.c.nonce == challenges.c.nonce)
    .where(members.c.jti == bindparam("launch"))
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


def is_overtaken(connection: Connection, launch: LaunchRecord, challenge: Challenge) -> bool:
    """Return whether this machine was accepted with evidence for a later challenge of its launch."""
    body = connection.execute(_ACCEPTED_FOR, {"launch": launch.jti}).scalar_one_or_none()
    return body is not None and challenge.issued_us <= Challenge.parse(body).issued_us


def group_of(launch: LaunchRecord) -> Group:
    """Return the group that a launch is of."""
    if launch.group is None:
        raise InternalError(Code.INTERNAL, "a launch without a group among those of one")
    return launch.group


def pending(group: GroupRecord, *, accepted: int) -> ApiAnswer:
    """Return the answer to a machine whose group is not complete."""
    if group.deadline_us is None:
        raise InternalError(Code.INTERNAL, "a machine that waits without a deadline")
    body = Pending(accepted=accepted, machines=group.machines, deadline_us=group.deadline_us).encode()
    return ApiAnswer(body=body, status=202)


def join_group(connection: Connection, group: Group, *, deployment: str, jti: str) -> None:
    """Record a launch as one machine of a group.

    Raises:
        UsageError: no such group of this deployment, or a machine that was launched before.
    """
    found = known_group(connection, group.id)
    if found.deployment != deployment:
        raise unknown_group()  # it may be another owner's
    if (found.machines, found.ranks) != (group.machines, group.ranks):
        raise UsageError(Code.USAGE, "a launch for another group than was announced")
    if found.state is not GroupState.OPEN:
        raise UsageError(Code.USAGE, f"a launch for a group that was {found.state}")
    taken = select(members.c.jti).where(members.c.group_id == group.id, members.c.machine == group.machine)
    if connection.execute(taken).first():
        raise UsageError(Code.USAGE, f"machine {group.machine} of this group was launched before")
    connection.execute(insert(members).values(jti=jti, group_id=group.id, machine=group.machine))


def known_group(connection: Connection, group_id: bytes) -> GroupRecord:
    """Return how a group is recorded; raises `UsageError`, `run-unknown`: the caller is the owner."""
    try:
        return group_record(connection, group_id)
    except RefusedError:
        raise unknown_group() from None


def unknown_group() -> UsageError:
    """Return the error of a group that there is not, or that is another owner's."""
    return UsageError(Code.RUN_UNKNOWN, "this broker has no such group")
