"""Answers machines of a group that wait for it: pending, or the release that was stored.

Law: a request that only repeats an earlier one changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, bindparam, select

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.broker.decide.decisions import OVER_PACE_US, PACE_US, ApiAnswer, Decision, Effect
from glasshouse.broker.decide.groups import accepted_machines, current, group_of, group_record, pending, refuse
from glasshouse.broker.decide.lines.leg_release import later_leg
from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import challenges, groups, members
from glasshouse.errors import Code, InternalError
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.records import (
    GroupRecord,
    GroupState,
    LaunchRecord,
    check_4_release_request,
    check_14_group,
    check_releasable,
    check_release_request,
)

# Built once.
_ASKED = (
    select(
        *recorded.LAUNCH_COLUMNS,
        challenges.c.body,
        challenges.c.status,
        challenges.c.answer,
        groups.c.decided_us,
        members.c.evidence_sha256,
        members.c.evidence_public,
    )
    .select_from(recorded.WAITING_SOURCE)
    .where(challenges.c.nonce == bindparam("nonce"))
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A request for a release, and the state of its group."""

    launch: LaunchRecord
    group: GroupRecord
    accepted: int
    refusal: CheckFailedError | None  # why what was decided may no longer be sent
    not_before_us: int  # when the last thing of theirs was dated
    undecided: bool  # whether this has to be written down first
    answer: bytes | None  # the stored release


@dataclass(frozen=True, slots=True)
class ReleaseRequests:
    """Answers release requests."""

    broker: BrokerState

    def ask(self, body: bytes) -> Decision:
        """Read a release request; what is returned answers it: pending, or the release that was stored.

        Raises:
            CheckFailedError: the request's own checks, and checks 2 to 4. The decision: check 14.
        """
        request, envelope = check_release_request(body)

        def look(connection: Connection) -> _Asked:
            row = connection.execute(_ASKED, {"nonce": request.nonce}).mappings().one_or_none()
            if row is None or row["evidence_sha256"] != request.evidence_sha256:
                raise CheckFailedError("2", Code.NONCE_UNKNOWN, "evidence that no machine of a group waits with")
            check_4_release_request(envelope, evidence_public=row["evidence_public"])
            return self._asked(connection, row)

        def settled(connection: Connection) -> _Asked:
            recorded.lock_deployment(connection, asked.launch.deployment)
            now_us, group = max(self.broker.clock_us(), asked.not_before_us), group_of(asked.launch)
            refusal = look(connection).refusal  # now: the owner may have mended it since
            if refusal is not None:
                refuse(connection, group.id, machine=group.machine, code=refusal.code, now_us=now_us)
            current(connection, group.id, now_us)
            return look(connection)

        # Without the write lock as long as there is nothing to decide: most requests are of machines that wait.
        asked, repeats = self.broker.database.read(look), request.nonce.hex()
        if asked.undecided:
            # No sign of life when it finds its group over: so does what was recorded before.
            return Decision(
                decide=lambda: _answered(self.broker.database.write(settled)), effect=Effect.NOTHING, repeats=repeats
            )
        # A machine that waits repeats this request; a recording of it is worth as much, and no more. Once it has its
        # answer it repeats it only if that was lost: of many runs recordings add up.
        every_us = PACE_US if asked.group.state is GroupState.OPEN else OVER_PACE_US
        return Decision(decide=lambda: _answered(asked), effect=Effect.NOTHING, repeats=repeats, every_us=every_us)

    def _asked(self, connection: Connection, row: RowMapping) -> _Asked:
        launch, broker_public = recorded.as_launch(row), self.broker.public
        # A clock that was set back since makes nothing that was decided untimely, nor brings back what is over.
        not_before_us = max(Challenge.parse(row["body"]).issued_us, row["decided_us"] or 0)
        now_us = max(self.broker.clock_us(), not_before_us)
        standing = recorded.standing(connection, launch.deployment, broker_public=broker_public)
        if standing is None:
            raise InternalError(Code.INTERNAL, "a launch without its deployment")
        refusal: CheckFailedError | None = None
        try:
            check_releasable(standing.record, launch, broker_public=broker_public, now_us=now_us)
        except CheckFailedError as error:
            refusal = error
        group = group_record(connection, group_of(launch).id)
        if refusal is None and launch.line is not None and group.state is GroupState.RELEASED:
            refusal = later_leg(connection, launch.line)
        return _Asked(
            launch=launch,
            group=group,
            accepted=len(accepted_machines(connection, group.id)),
            refusal=refusal,
            not_before_us=not_before_us,
            undecided=group.over(now_us) or (group.state is GroupState.OPEN and refusal is not None),
            answer=row["answer"] if row["status"] == 200 else None,
        )


def _answered(asked: _Asked) -> ApiAnswer:
    if asked.refusal is not None:
        raise asked.refusal
    check_14_group(asked.group)
    if asked.group.state is GroupState.OPEN:
        return pending(asked.group, accepted=asked.accepted)
    if asked.answer is None:
        raise InternalError(Code.INTERNAL, "a group that was released without an answer for one of its machines")
    return ApiAnswer(body=asked.answer)
