"""Groups at the gate: every machine of one is released to, or none of them is (spec/key-release.md section 6.1).

Laws: all decisions of a group are made with its deployment's row taken, so that broker processes make them one after
the other; a release to all is one transaction; a group that was released or refused stays so; a request
that only repeats an earlier one changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, bindparam, select, update

from glasshouse.broker.decide.releases import Release, Releases, group_facts, others_keys
from glasshouse.broker.http.endpoints import Answer, Decision
from glasshouse.broker.http.intake import OVER_PACE_US, PACE_US, Effect
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import Database, OvertakenError
from glasshouse.broker.store.database_schema import challenges, groups, members
from glasshouse.broker.store.recorded import Standing
from glasshouse.errors import Code, InternalError, RefusedError
from glasshouse.handshake import broker_side
from glasshouse.handshake.broker_side import Appraisal, Challenge, CheckFailedError, LaunchRecord
from glasshouse.handshake.group_rules import (
    GroupRecord,
    GroupState,
    check_4_release_request,
    check_14_group,
    check_release_request,
    rank_refused,
)
from glasshouse.handshake.messages import Pending
from glasshouse.wire.group import Group

__all__ = ["Groups", "group_record", "refuse"]

_RELEASED, _PENDING = 200, 202

# Statements are built once; a parameter of an update is not named as a column is, for that would set the column.
_GROUP = select(groups).where(groups.c.id == bindparam("group"))
_ACCEPTED = members.c.evidence_sha256.is_not(None)
_OF_GROUP = members.c.group_id == bindparam("group")
_MACHINES = select(members.c.machine).where(_OF_GROUP, _ACCEPTED)
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
_ACCEPT = (
    update(members)
    .where(members.c.jti == bindparam("launch"))
    .values(
        nonce=bindparam("answered"),
        evidence_sha256=bindparam("digest"),
        evidence_public=bindparam("key"),
        keys_sha256=bindparam("both"),
        evidence=bindparam("message"),
    )
)
_BEGIN = (
    update(groups)
    .where(groups.c.id == bindparam("group"), groups.c.deadline_us.is_(None))
    .values(deadline_us=bindparam("until_us"))
)
_DECIDE = (
    update(groups)
    .where(groups.c.id == bindparam("group"), groups.c.state == GroupState.OPEN.value)
    .values(
        state=bindparam("into"), culprit=bindparam("machine"), code=bindparam("reason"), decided_us=bindparam("now_us")
    )
)
_FORGET = update(members).where(_OF_GROUP).values(evidence=None)
_ANSWER = (
    update(challenges)
    .where(challenges.c.nonce == bindparam("challenge"))
    .values(status=bindparam("with_status"), answer=bindparam("release"))
)


class Groups:
    """Decides for groups.

    Args:
        database: where everything is kept.
        releases: makes and writes releases.
        broker_public: the broker's own key.
        clock_us: microseconds since the epoch.
    """

    def __init__(
        self, database: Database, releases: Releases, broker_public: bytes, clock_us: Callable[[], int]
    ) -> None:
        self._database = database
        self._releases = releases
        self._public = broker_public
        self._clock_us = clock_us

    def accept(
        self,
        connection: Connection,
        standing: Standing,
        launch: LaunchRecord,
        challenge: Challenge,
        appraisal: Appraisal,
        message: bytes,
        now_us: int,
    ) -> Answer:
        """Decide on a group's machine whose evidence passed checks 1 to 12: a release, or pending.

        The caller holds the deployment's row.

        Raises:
            CheckFailedError: checks 13 and 14.
        """
        group = _of(launch)
        record = self._current(connection, group.id, now_us)
        if record.state is GroupState.RELEASED:
            return self._again(connection, standing, launch, challenge, appraisal, now_us)
        check_14_group(record)
        if _overtaken(connection, launch, challenge):
            return _pending(record, accepted=len(connection.execute(_MACHINES, {"group": group.id}).all()))
        keys_sha256 = self._check_13(connection, standing, launch, appraisal)
        try:
            # All of it or nothing: after a defect the machine was not accepted, and may come again.
            with connection.begin_nested():
                self._remember(connection, launch, challenge, appraisal, keys_sha256, message, now_us)
                waiting = connection.execute(_WAITING, {"group": group.id}).mappings().all()
                if len(waiting) < group.machines:
                    return _pending(group_record(connection, group.id), accepted=len(waiting))
                return self._release_all(connection, standing, waiting, group, now_us)
        except _BlamedError as blamed:
            refuse(connection, group.id, machine=blamed.machine, code=blamed.error.code, now_us=now_us)
            mine = blamed.machine == group.machine
            raise (blamed.error if mine else rank_refused(blamed.machine, blamed.error.code)) from None

    def _remember(
        self,
        connection: Connection,
        launch: LaunchRecord,
        challenge: Challenge,
        appraisal: Appraisal,
        keys_sha256: bytes,
        message: bytes,
        now_us: int,
    ) -> None:
        """Keep the evidence of an accepted machine; the first of a group sets its deadline."""
        group = _of(launch)
        accepted = {
            "launch": launch.jti,
            "answered": challenge.nonce,
            "digest": appraisal.evidence_sha256,
            "key": appraisal.claims.evidence_public,
            "both": keys_sha256,
            "message": message,
        }
        connection.execute(_ACCEPT, accepted)
        connection.execute(_BEGIN, {"group": group.id, "until_us": challenge.expires_us})
        audit_log.append(
            connection,
            "accepted",
            now_us,
            deployment=launch.deployment,
            evidence_sha256=appraisal.evidence_sha256.hex(),
            run_id=launch.run_id,
            **group_facts(group),
        )

    def refused(
        self, connection: Connection, launch: LaunchRecord, challenge: Challenge, code: Code, now_us: int
    ) -> None:
        """Refuse the group of a machine whose evidence was refused, if it still waits.

        Evidence that came late does not count against the machine: it may have been held back on the way.
        """
        if launch.group is None or code is Code.NONCE_EXPIRED or _overtaken(connection, launch, challenge):
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

        def settle(connection: Connection) -> _Asked:
            recorded.lock_deployment(connection, asked.launch.deployment)
            now_us, group = max(self._clock_us(), asked.not_before_us), _of(asked.launch)
            refusal = look(connection).refusal  # now: the owner may have mended it since
            if refusal is not None:
                refuse(connection, group.id, machine=group.machine, code=refusal.code, now_us=now_us)
            self._current(connection, group.id, now_us)
            return look(connection)

        # Without the write lock as long as there is nothing to decide: most requests are of machines that wait.
        asked = self._database.read(look)
        if not asked.undecided:
            # A machine that waits repeats this request; a recording of it is worth as much, and no more. Once
            # it has its answer it repeats it only if that was lost: of many runs recordings add up.
            return Decision(
                decide=lambda: _answered(asked),
                effect=Effect.NOTHING,
                repeats=request.nonce.hex(),
                every_us=PACE_US if asked.group.state is GroupState.OPEN else OVER_PACE_US,
            )
        # Nor is it a sign of life when it finds its group over: so does what was recorded before.
        return Decision(
            decide=lambda: _answered(self._database.write(settle)), effect=Effect.NOTHING, repeats=request.nonce.hex()
        )

    def _asked(self, connection: Connection, row: RowMapping) -> _Asked:
        launch = recorded.as_launch(row)
        # A clock that was set back since makes nothing that was decided untimely, nor brings back what is over.
        not_before_us = max(Challenge.parse(row["body"]).issued_us, row["decided_us"] or 0)
        now_us = max(self._clock_us(), not_before_us)
        record = recorded.deployment_record(connection, launch.deployment, broker_public=self._public)
        if record is None:
            raise InternalError(Code.INTERNAL, "a launch without its deployment")
        refusal: CheckFailedError | None = None
        try:
            broker_side.check_releasable(record, launch, broker_public=self._public, now_us=now_us)
        except CheckFailedError as error:
            refusal = error
        group = group_record(connection, _of(launch).id)
        return _Asked(
            launch=launch,
            group=group,
            accepted=len(connection.execute(_MACHINES, {"group": group.id}).all()),
            refusal=refusal,
            not_before_us=not_before_us,
            undecided=group.over(now_us) or (group.state is GroupState.OPEN and refusal is not None),
            answer=row["answer"] if row["status"] == _RELEASED else None,
        )

    def _current(self, connection: Connection, group_id: bytes, now_us: int) -> GroupRecord:
        """Return how a group stands now: one whose deadline has passed is refused first."""
        record = group_record(connection, group_id)
        if not record.over(now_us):
            return record
        here = set(connection.execute(_MACHINES, {"group": group_id}).scalars())
        missing = set(range(record.machines)) - here
        code = Code.RANK_LOST if missing else Code.INTERNAL  # all were accepted, and a defect kept us from releasing
        refuse(connection, group_id, machine=min(missing, default=0), code=code, now_us=now_us)
        return group_record(connection, group_id)

    def _again(
        self,
        connection: Connection,
        standing: Standing,
        launch: LaunchRecord,
        challenge: Challenge,
        appraisal: Appraisal,
        now_us: int,
    ) -> Answer:
        """Release once more to a machine of a released group that lost its answer."""
        keys_sha256, known = self._releases.check_13(connection, standing, appraisal)
        if not known:
            raise InternalError(Code.INTERNAL, "a group that was released without one of its machines")
        release = self._releases.make(
            standing, challenge, appraisal, keys_sha256=keys_sha256, known=True, now_us=now_us, group=launch.group
        )
        self._releases.write(connection, standing.record, release, now_us)
        return Answer(body=release.body)

    def _check_13(
        self, connection: Connection, standing: Standing, launch: LaunchRecord, appraisal: Appraisal
    ) -> bytes:
        """Run check 13 for a machine of a group that waits: room for all of it, and keys of no other release."""
        group, claims = _of(launch), appraisal.claims
        keys_sha256, known = self._releases.check_13(connection, standing, appraisal, more=group.machines)
        mine = (claims.evidence_public, keys_sha256)
        for row in connection.execute(_KEYS, {"group": group.id}):
            theirs = (row.evidence_public, row.keys_sha256)
            if row.machine == group.machine and theirs != mine:
                raise others_keys()
            if row.machine != group.machine and set(theirs) & set(mine):
                raise others_keys()
        if known:
            raise InternalError(Code.INTERNAL, "a release to a machine of a group that was not released")
        return keys_sha256

    def _release_all(
        self,
        connection: Connection,
        standing: Standing,
        waiting: Sequence[RowMapping],
        last: Group,
        now_us: int,
    ) -> Answer:
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
            self._releases.write(connection, standing.record, release, now_us)
            connection.execute(_ANSWER, {"challenge": nonce, "with_status": _RELEASED, "release": release.body})
        values = {"group": last.id, "into": GroupState.RELEASED.value, "machine": None, "reason": None}
        if connection.execute(_DECIDE, {**values, "now_us": now_us}).rowcount != 1:
            raise OvertakenError
        connection.execute(_FORGET, {"group": last.id})
        return Answer(body=next(one.body for one in made.values() if one.group == last))

    def _made(self, connection: Connection, standing: Standing, row: RowMapping, now_us: int) -> Release:
        """Appraise a machine's stored evidence as of now, and make its release."""
        launch, challenge = recorded.as_launch(row), Challenge.parse(row["body"])
        appraisal = broker_side.appraise(
            broker_side.check_1_message(row["evidence"]),
            challenge=challenge,
            record=standing.record,
            launch=launch,
            broker_public=self._public,
            now_us=now_us,
        )
        keys_sha256, known = self._releases.check_13(connection, standing, appraisal, more=_of(launch).machines)
        return self._releases.make(
            standing, challenge, appraisal, keys_sha256=keys_sha256, known=known, now_us=now_us, group=launch.group
        )


class _BlamedError(Exception):
    """One machine of a group does not pass: `error` is its own refusal."""

    def __init__(self, machine: int, error: CheckFailedError) -> None:
        super().__init__(machine)
        self.machine = machine
        self.error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A request for a release, and the state of its group.

    Attributes:
        refusal: why what was decided may no longer be sent.
        not_before_us: when the last thing of theirs was dated.
        undecided: whether this has to be written down first.
        answer: the stored release.
    """

    launch: LaunchRecord
    group: GroupRecord
    accepted: int
    refusal: CheckFailedError | None
    not_before_us: int
    undecided: bool
    answer: bytes | None


def group_record(connection: Connection, group_id: bytes) -> GroupRecord:
    """Return how a group is recorded.

    Raises:
        RefusedError: `deployment-unknown`.
    """
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


def refuse(connection: Connection, group_id: bytes, *, machine: int, code: Code, now_us: int) -> bool:
    """Refuse a group that is still open, because of one of its machines; return whether it was open."""
    values = {"group": group_id, "into": GroupState.REFUSED.value, "machine": machine, "reason": code.value}
    if connection.execute(_DECIDE, {**values, "now_us": now_us}).rowcount != 1:
        return False
    connection.execute(_FORGET, {"group": group_id})
    audit_log.append(connection, "group-refusal", now_us, code=code.value, group=group_id.hex(), machine=machine)
    return True


def _overtaken(connection: Connection, launch: LaunchRecord, challenge: Challenge) -> bool:
    """Return whether this machine was accepted with evidence for a later challenge of its launch."""
    body = connection.execute(_ACCEPTED_FOR, {"launch": launch.jti}).scalar_one_or_none()
    return body is not None and challenge.issued_us <= Challenge.parse(body).issued_us


def _answered(asked: _Asked) -> Answer:
    if asked.refusal is not None:
        raise asked.refusal
    check_14_group(asked.group)
    if asked.group.state is GroupState.OPEN:
        return _pending(asked.group, accepted=asked.accepted)
    if asked.answer is None:
        raise InternalError(Code.INTERNAL, "a group that was released without an answer for one of its machines")
    return Answer(body=asked.answer)


def _of(launch: LaunchRecord) -> Group:
    if launch.group is None:
        raise InternalError(Code.INTERNAL, "a launch without a group among those of one")
    return launch.group


def _pending(group: GroupRecord, *, accepted: int) -> Answer:
    if group.deadline_us is None:
        raise InternalError(Code.INTERNAL, "a machine that waits without a deadline")
    body = Pending(accepted=accepted, machines=group.machines, deadline_us=group.deadline_us).encode()
    return Answer(body=body, status=_PENDING)
