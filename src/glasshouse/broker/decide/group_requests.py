"""The owner's requests about groups: announce one, read its state, and report that one of its machines has ended."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select

from glasshouse.broker.api.owner_calls import GroupRefusal, GroupRequest
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.decide.group_record import accepted_machines, group_record, known_group, refuse, unknown_group
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import groups, members
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, UsageError
from glasshouse.handshake.group_rules import GroupRecord, GroupState
from glasshouse.wire.canonical import Json
from glasshouse.wire.group import ID_BYTES
from glasshouse.wire.policy import GROUP_EGRESS

_ID = re.compile(f"[0-9a-f]{{{2 * ID_BYTES}}}")


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
            if machines > left:
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
        found = known_group(connection, group_id)
        standing = recorded.standing(connection, found.deployment, broker_public=self.broker.public)
        if standing is None or not scope.covers(standing.owner):
            raise unknown_group()
        return found


def _group_id(parameters: Mapping[str, str]) -> bytes:
    if not _ID.fullmatch(parameters["group"]):
        raise unknown_group()
    return bytes.fromhex(parameters["group"])
