"""Groups at the gate: every machine of one is released to, or none of them is (spec/key-release.md section 6.1).

Laws: all decisions of a group are made with its deployment's row taken, so that broker processes make them one after
the other; a release to all is one transaction; a group that was released or refused stays so; a request that only
repeats an earlier one changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, bindparam, select, update

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.verify import check_1_message
from glasshouse.broker.decide.decisions import OVER_PACE_US, PACE_US, ApiAnswer, Decision, Effect
from glasshouse.broker.decide.group_record import accepted_machines, current, group_record, refuse, settle
from glasshouse.broker.decide.releases import Release, check_13, group_facts, make_release, others_keys, write_release
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.broker_state import BrokerState
from glasshouse.broker.store.database import OvertakenError
from glasshouse.broker.store.database_schema import challenges, groups, members
from glasshouse.broker.store.recorded import DeploymentStanding
from glasshouse.errors import Code, InternalError
from glasshouse.handshake.broker_side import Appraisal, appraise
from glasshouse.handshake.group_rules import (
    GroupRecord,
    GroupState,
    check_4_release_request,
    check_14_group,
    check_release_request,
    rank_refused,
)
from glasshouse.handshake.messages import Challenge, Pending
from glasshouse.handshake.records import LaunchRecord
from glasshouse.handshake.token_checks import check_releasable
from glasshouse.wire.group import Group

_RELEASED, _PENDING = 200, 202

# Statements are built once. An update sets the columns that its values name; its other parameters are named otherwise.
_ACCEPTED = members.c.evidence_sha256.is_not(None)
_OF_GROUP = members.c.group_id == bindparam("group")
_KEYS = select(members.c.machine, members.c.evidence_public, members.c.keys_sha256).where(_OF_GROUP, _ACCEPTED)
_SOURCE = recorded.LAUNCH_SOURCE.join(challenges, challenges.c.nonce == members.c.nonce)
_WAITING = (
    select(*recorded.LAUNCH_COLUMNS, challenges.c.nonce, challenges.c.body, members.c.evidence)
    .select_from(_SOURCE)
    .where(_OF_GROUP, _ACCEPTED)
    .order_by(members.c.machine)
)
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
    .select_from(_SOURCE)
    .where(challenges.c.nonce == bindparam("nonce"))
)
_ACCEPTED_FOR = (
    select(challenges.c.body)
    .join(members, members.c.nonce == challenges.c.nonce)
    .where(members.c.jti == bindparam("launch"))
)
_ACCEPT = update(members).where(members.c.jti == bindparam("launch"))
_BEGIN = update(groups).where(groups.c.id == bindparam("group"), groups.c.deadline_us.is_(None))
_ANSWER = update(challenges).where(challenges.c.nonce == bindparam("challenge"))


class _BlamedError(Exception):
    """One machine of a group does not pass: `error` is its own refusal."""

    def __init__(self, machine: int, error: CheckFailedError) -> None:
        super().__init__(machine)
        self.machine = machine
        self.error = error


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
class GroupReleases:
    """Decides for groups."""

    broker: BrokerState

    def accept(
        self,
        connection: Connection,
        standing: DeploymentStanding,
        launch: LaunchRecord,
        challenge: Challenge,
        appraisal: Appraisal,
        message: bytes,
        now_us: int,
    ) -> ApiAnswer:
        """Decide on a group's machine whose evidence passed checks 1 to 12: a release, or pending.

        The caller holds the deployment's row.

        Raises:
            CheckFailedError: checks 13 and 14.
        """
        group = _of(launch)
        record = current(connection, group.id, now_us)
        if record.state is GroupState.RELEASED:  # once more to a machine that lost its answer
            release = make_release(self.broker, connection, standing, challenge, appraisal, now_us, group=group)
            if not release.known:
                raise InternalError(Code.INTERNAL, "a group that was released without one of its machines")
            write_release(connection, standing.record, release, now_us)
            return ApiAnswer(body=release.body)
        check_14_group(record)
        if _is_overtaken(connection, launch, challenge):
            return _pending(record, accepted=len(accepted_machines(connection, group.id)))
        keys_sha256 = self._check_13(connection, standing, group, appraisal)
        try:
            # All of it or nothing: after a defect the machine was not accepted, and may come again.
            with connection.begin_nested():
                accepted = {
                    "launch": launch.jti,
                    "nonce": challenge.nonce,
                    "evidence_sha256": appraisal.evidence_sha256,
                    "evidence_public": appraisal.claims.evidence_public,
                    "keys_sha256": keys_sha256,
                    "evidence": message,
                }
                connection.execute(_ACCEPT, accepted)
                # The first of a group sets its deadline.
                connection.execute(_BEGIN, {"group": group.id, "deadline_us": challenge.expires_us})
                audit_log.append(
                    connection,
                    "accepted",
                    now_us,
                    deployment=launch.deployment,
                    evidence_sha256=appraisal.evidence_sha256.hex(),
                    run_id=launch.run_id,
                    **group_facts(group),
                )
                waiting = connection.execute(_WAITING, {"group": group.id}).mappings().all()
                if len(waiting) < group.machines:
                    return _pending(group_record(connection, group.id), accepted=len(waiting))
                return self._release_all(connection, standing, waiting, group, now_us)
        except _BlamedError as blamed:
            refuse(connection, group.id, machine=blamed.machine, code=blamed.error.code, now_us=now_us)
            mine = blamed.machine == group.machine
            raise (blamed.error if mine else rank_refused(blamed.machine, blamed.error.code)) from None

    def refused(
        self, connection: Connection, launch: LaunchRecord, challenge: Challenge, code: Code, now_us: int
    ) -> None:
        """Refuse the group of a machine whose evidence was refused, if it still waits.

        Evidence that came late does not count against the machine: it may have been held back on the way.
        """
        if launch.group is None or code is Code.NONCE_EXPIRED or _is_overtaken(connection, launch, challenge):
            return
        refuse(connection, launch.group.id, machine=launch.group.machine, code=code, now_us=now_us)

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
            now_us, group = max(self.broker.clock_us(), asked.not_before_us), _of(asked.launch)
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
        group = group_record(connection, _of(launch).id)
        return _Asked(
            launch=launch,
            group=group,
            accepted=len(accepted_machines(connection, group.id)),
            refusal=refusal,
            not_before_us=not_before_us,
            undecided=group.over(now_us) or (group.state is GroupState.OPEN and refusal is not None),
            answer=row["answer"] if row["status"] == _RELEASED else None,
        )

    def _check_13(
        self, connection: Connection, standing: DeploymentStanding, group: Group, appraisal: Appraisal
    ) -> bytes:
        """Run check 13 for a machine of a group that waits: room for all of it, and keys of no other release."""
        keys_sha256, known = check_13(connection, standing, appraisal, more=group.machines)
        mine = (appraisal.claims.evidence_public, keys_sha256)
        for row in connection.execute(_KEYS, {"group": group.id}):
            theirs = (row.evidence_public, row.keys_sha256)
            if theirs != mine if row.machine == group.machine else set(theirs) & set(mine):
                raise others_keys()
        if known:
            raise InternalError(Code.INTERNAL, "a release to a machine of a group that was not released")
        return keys_sha256

    def _release_all(
        self,
        connection: Connection,
        standing: DeploymentStanding,
        waiting: Sequence[RowMapping],
        last: Group,
        now_us: int,
    ) -> ApiAnswer:
        """Release to every machine of a group that was accepted.

        Raises:
            _BlamedError: the evidence of one of them does not pass any more.
            OvertakenError: another process was faster, and the transaction is to be run again.
        """
        made: dict[bytes, Release] = {}
        # The clock may have stepped back since one was challenged: no release is dated before its challenge.
        now_us = max(now_us, *(Challenge.parse(row["body"]).issued_us for row in waiting))
        for row in waiting:
            try:
                made[row["nonce"]] = self._made(connection, standing, row, now_us)
            except CheckFailedError as error:
                raise _BlamedError(row["machine"], error) from None
        for nonce, release in made.items():
            write_release(connection, standing.record, release, now_us)
            connection.execute(_ANSWER, {"challenge": nonce, "status": _RELEASED, "answer": release.body})
        if not settle(connection, last.id, GroupState.RELEASED, now_us=now_us):
            raise OvertakenError
        return ApiAnswer(body=next(one.body for one in made.values() if one.group == last))

    def _made(self, connection: Connection, standing: DeploymentStanding, row: RowMapping, now_us: int) -> Release:
        """Appraise a machine's stored evidence as of now, and make its release."""
        launch, challenge = recorded.as_launch(row), Challenge.parse(row["body"])
        group = _of(launch)
        appraisal = appraise(
            check_1_message(row["evidence"]),
            challenge=challenge,
            record=standing.record,
            launch=launch,
            broker_public=self.broker.public,
            now_us=now_us,
        )
        return make_release(
            self.broker, connection, standing, challenge, appraisal, now_us, more=group.machines, group=group
        )


def _is_overtaken(connection: Connection, launch: LaunchRecord, challenge: Challenge) -> bool:
    """Return whether this machine was accepted with evidence for a later challenge of its launch."""
    body = connection.execute(_ACCEPTED_FOR, {"launch": launch.jti}).scalar_one_or_none()
    return body is not None and challenge.issued_us <= Challenge.parse(body).issued_us


def _answered(asked: _Asked) -> ApiAnswer:
    if asked.refusal is not None:
        raise asked.refusal
    check_14_group(asked.group)
    if asked.group.state is GroupState.OPEN:
        return _pending(asked.group, accepted=asked.accepted)
    if asked.answer is None:
        raise InternalError(Code.INTERNAL, "a group that was released without an answer for one of its machines")
    return ApiAnswer(body=asked.answer)


def _of(launch: LaunchRecord) -> Group:
    if launch.group is None:
        raise InternalError(Code.INTERNAL, "a launch without a group among those of one")
    return launch.group


def _pending(group: GroupRecord, *, accepted: int) -> ApiAnswer:
    if group.deadline_us is None:
        raise InternalError(Code.INTERNAL, "a machine that waits without a deadline")
    body = Pending(accepted=accepted, machines=group.machines, deadline_us=group.deadline_us).encode()
    return ApiAnswer(body=body, status=_PENDING)
