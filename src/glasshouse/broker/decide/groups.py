"""Groups: how they and their machines are recorded, their one change, for good, and the owner's requests about them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from sqlalchemy import Connection, bindparam, func, insert, select, update

from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.http_api import GroupRefusal, GroupRequest
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import challenges, groups, lines, members
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, InternalError, UsageError
from glasshouse.handshake.messages import Challenge, Pending
from glasshouse.handshake.records import GroupRecord, GroupState, LaunchRecord
from glasshouse.wire.canonical import Json
from glasshouse.wire.group import ID_BYTES, Group
from glasshouse.wire.policy import GROUP_EGRESS

_ID = re.compile(f"[0-9a-f]{{{2 * ID_BYTES}}}")

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
    """Return how a group is recorded; raises `UsageError`, `run-unknown`."""
    row = connection.execute(_GROUP, {"group": group_id}).one_or_none()
    if row is None:
        raise _unknown()
    named = {field.name: getattr(row, field.name) for field in fields(GroupRecord)}
    return GroupRecord(**named | {"state": GroupState(row.state), "code": row.code and Code(row.code)})


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
    found = group_record(connection, group.id)
    if found.deployment != deployment:
        raise _unknown()  # it may be another owner's
    if (found.machines, found.ranks) != (group.machines, group.ranks):
        raise UsageError(Code.USAGE, "a launch for another group than was announced")
    if found.state is not GroupState.OPEN:
        raise UsageError(Code.USAGE, f"a launch for a group that was {found.state}")
    taken = select(members.c.jti).where(members.c.group_id == group.id, members.c.machine == group.machine)
    if connection.execute(taken).first():
        raise UsageError(Code.USAGE, f"machine {group.machine} of this group was launched before")
    connection.execute(insert(members).values(jti=jti, group_id=group.id, machine=group.machine))


@dataclass(frozen=True, slots=True)
class GroupRequests:
    """Carries out the owner's requests about groups."""

    broker: BrokerState
    quota: Quota

    def add_group(self, body: bytes, _parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Announce a group and give it its id.

        Raises:
            FormatError: `schema-invalid`.
            RefusedError: `owner-quota`.
            UsageError: `deployment-unknown`, or `policy-impossible` for more machines than releases are left, or than
                one where the deployment's policy allows them no connection to each other.
        """
        request = GroupRequest.parse(body)
        group_id, now_us, machines = secrets.token_bytes(ID_BYTES), self.broker.clock_us(), request.machines

        def decide(connection: Connection) -> None:
            public = self.broker.public
            standing = recorded.standing_of(connection, request.deployment, scope, broker_public=public)
            if machines > 1 and GROUP_EGRESS not in standing.record.policy.egress:
                raise UsageError(
                    Code.POLICY_IMPOSSIBLE,
                    f"{machines} machines whose deployment's policy allows them no connection to each other",
                )
            left = standing.record.policy.release_budget - standing.released
            # Of a line only the first leg counts, and here it is not said which leg this is for.
            a_line = select(lines.c.id).where(lines.c.deployment == request.deployment, lines.c.leg > 0).limit(1)
            if machines > left and connection.execute(a_line).first() is None:
                raise UsageError(
                    Code.POLICY_IMPOSSIBLE, f"a group of {machines} machines where {left} releases are left"
                )
            self.quota.spend(connection, scope, "group", now_us)
            values = request.to_json()
            state = {"id": group_id, "state": GroupState.OPEN.value, "created_us": now_us}
            connection.execute(insert(groups).values(**values, **state))
            audit_log.append(
                connection,
                "group",
                now_us,
                deployment=request.deployment,
                group=group_id.hex(),
                machines=machines,
                ranks=request.ranks,
            )

        self.broker.database.write(decide)
        return ApiAnswer.of({"group": group_id.hex()})

    def group(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Return how a group stands; raises `UsageError`, `run-unknown`."""
        group_id = _group_id(parameters)

        def look(connection: Connection) -> dict[str, Json]:
            found = self._found(connection, group_id, scope)
            count = select(func.count()).select_from(members).where(members.c.group_id == group_id)
            return {
                "accepted": len(accepted_machines(connection, group_id)),
                "deadline_us": found.deadline_us,
                "deployment": found.deployment,
                "launched": int(connection.execute(count).scalar_one()),
                "machines": found.machines,
                "ranks": found.ranks,
                "refused": None if found.code is None else {"code": found.code.value, "machine": found.culprit},
                "state": found.state.value,
            }

        return ApiAnswer.of(self.broker.database.read(look))

    def refuse_group(self, body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Refuse a group that still waits, because one of its machines has ended.

        Raises:
            FormatError: `schema-invalid`.
            UsageError: `run-unknown`, or a machine that the group does not have.
        """
        ended, group_id, now_us = GroupRefusal.parse(body), _group_id(parameters), self.broker.clock_us()

        def decide(connection: Connection) -> str:
            found = self._found(connection, group_id, scope)
            if ended.machine >= found.machines:
                raise UsageError(Code.USAGE, f"machine {ended.machine} of a group of {found.machines}")
            recorded.lock_deployment(connection, found.deployment)
            refuse(connection, group_id, machine=ended.machine, code=ended.code, now_us=now_us)
            return group_record(connection, group_id).state.value

        return ApiAnswer.of({"state": self.broker.database.write(decide)})

    def _found(self, connection: Connection, group_id: bytes, scope: Scope) -> GroupRecord:
        found = group_record(connection, group_id)
        standing = recorded.standing(connection, found.deployment, broker_public=self.broker.public)
        if standing is None or not scope.covers(standing.owner):
            raise _unknown()
        return found


def _group_id(parameters: Mapping[str, str]) -> bytes:
    if not _ID.fullmatch(parameters["group"]):
        raise _unknown()
    return bytes.fromhex(parameters["group"])


def _unknown() -> UsageError:
    return UsageError(Code.RUN_UNKNOWN, "this broker has no such group")
