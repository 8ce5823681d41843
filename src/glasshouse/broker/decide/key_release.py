"""The gate's decision on evidence: a release, a refusal, or pending, until every machine of its group was accepted.

Each decision is one transaction, or one savepoint of a transaction that it shares (`GroupCommit`): the challenge's
consumption, the budget, the audit record and the stored answer are committed together before the answer is sent. The
numbered checks are `handshake.broker_side`'s; check 2 is decided in `challenges` on the database's records, check 13 in
`releases`, check 14 here (spec/key-release.md section 6.1), check 15 in `lines.leg_release`.
Laws: all decisions of a group are made with its deployment's row taken, so that broker processes make them one after
the other; every machine of a group is released to, in one transaction, or none of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection, RowMapping, bindparam, select, update
from sqlalchemy.exc import SQLAlchemyError

from glasshouse.attestation.detached import check_blobs, split
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.root_table import check_12_apart
from glasshouse.attestation.verify import check_1_message
from glasshouse.broker.decide.challenges import check_2
from glasshouse.broker.decide.decisions import ApiAnswer, Decision, Effect, Rest
from glasshouse.broker.decide.groups import (
    ACCEPTED,
    accepted_machines,
    current,
    group_of,
    group_record,
    is_overtaken,
    pending,
    refuse,
    settle,
)
from glasshouse.broker.decide.hardware.beside import HardwareShelf
from glasshouse.broker.decide.hardware.evidence_reading import ReadEvidence, read_evidence
from glasshouse.broker.decide.lines.leg_release import check_15, keep_leg, line_facts
from glasshouse.broker.decide.releases import Release, check_13, group_facts, make_release, others_keys, write_release
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState, OvertakenError
from glasshouse.broker.store.database_schema import challenges, groups, members
from glasshouse.broker.store.line_rows import NOTHING_KEPT, LineMemory
from glasshouse.broker.store.recorded import DeploymentStanding
from glasshouse.errors import Code, GlasshouseError, InternalError, RefusedError
from glasshouse.handshake import broker_side
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.records import GroupState, LaunchRecord, check_14_group, rank_refused
from glasshouse.wire.group import Group

# Built once: to build one costs as much as to run it. An update sets the columns that its values name, and no other.
_NAMED = challenges.c.nonce == bindparam("challenge")
_TAKE = update(challenges).where(_NAMED, challenges.c.used_us.is_(None))
_KEEP = update(challenges).where(_NAMED)
_REPLAYS = select(challenges.c.replays).where(challenges.c.nonce == bindparam("nonce"))
_REPLAYED = update(challenges).where(_NAMED).values(replays=challenges.c.replays + 1)
_OF_GROUP = members.c.group_id == bindparam("group")
_KEYS = select(members.c.machine, members.c.evidence_public, members.c.keys_sha256).where(_OF_GROUP, ACCEPTED)
_WAITING = (
    select(*recorded.LAUNCH_COLUMNS, challenges.c.nonce, challenges.c.body, members.c.evidence)
    .select_from(recorded.WAITING_SOURCE)
    .where(_OF_GROUP, ACCEPTED)
    .order_by(members.c.machine)
)
_ACCEPT = update(members).where(members.c.jti == bindparam("launch"))
_BEGIN = update(groups).where(groups.c.id == bindparam("group"), groups.c.deadline_us.is_(None))


class _BlamedError(Exception):
    """One machine of a group does not pass: `error` is its own refusal."""

    def __init__(self, machine: int, error: CheckFailedError) -> None:
        super().__init__(machine)
        self.machine = machine
        self.error = error


@dataclass(frozen=True, slots=True)
class ReleaseGate:
    """Decides who is given a package key."""

    broker: BrokerState
    memory: LineMemory = NOTHING_KEPT
    hardware: HardwareShelf = field(default_factory=HardwareShelf)

    def evidence(self, body: bytes) -> Decision | Rest:
        """Read evidence; what is returned decides on it: a release, or a refusal with the first check's code.

        Args:
            body: of two parts the first alone; then what is to be read is returned.

        Raises:
            CheckFailedError: checks 1 and 4, and `nonce-unknown`. Nothing was written then, and no lock taken.
        """
        return read_evidence(self.broker, body, self._authentic)

    def _authentic(self, read: ReadEvidence) -> Decision:
        nonce, evidence_sha256 = read.asked["nonce"], read.signed.sha256

        def decide(connection: Connection) -> ApiAnswer:
            now_us = self.broker.clock_us()
            # Evidence that the launch and evidence keys signed uses the challenge up, whatever comes after.
            taken = {"challenge": nonce, "used_us": now_us, "evidence_sha256": evidence_sha256}
            if connection.execute(_TAKE, taken).rowcount != 1:
                return self._replayed(connection, read.asked, evidence_sha256, now_us)
            answer = self._decided(connection, read, now_us)
            connection.execute(_KEEP, {"challenge": nonce, "status": answer.status, "answer": answer.body})
            return answer

        # A recording of what was answered, or came too late: no sign of life of the address that it comes from.
        effect = Effect.CREDIT if read.is_fresh else Effect.CHARGE
        ahead = partial(self.hardware.appraise_ahead, self.broker, read) if read.blobs else None
        return Decision(decide=partial(self.broker.database.write, decide), effect=effect, ahead=ahead)

    def _replayed(self, connection: Connection, asked: RowMapping, evidence_sha256: bytes, now_us: int) -> ApiAnswer:
        # None when it was swept since it was looked up.
        replays = broker_side.check_2_known(
            connection.execute(_REPLAYS, {"nonce": asked["nonce"]}).scalar_one_or_none()
        )
        try:
            check_2(asked["body"], used=True, now_us=now_us)
        except CheckFailedError as refusal:
            answer = ApiAnswer.refusal(refusal)
            if replays == 0:  # one record for each challenge: a recording cannot fill the disk
                _audit_refusal(connection, refusal, asked, evidence_sha256, now_us)
        else:
            raise InternalError(Code.INTERNAL, "check 2 passed a used challenge")
        connection.execute(_REPLAYED, {"challenge": asked["nonce"]})
        return answer

    def _decided(self, connection: Connection, read: ReadEvidence, now_us: int) -> ApiAnswer:
        """Run the other checks on a challenge that this transaction consumed; a refusal is an answer too."""
        asked, launch = read.asked, recorded.as_launch(read.asked)
        try:
            challenge = check_2(asked["body"], used=False, now_us=now_us)
            now_us = max(now_us, challenge.issued_us)
            recorded.lock_deployment(connection, asked["deployment"])
            standing = recorded.standing(connection, asked["deployment"], broker_public=self.broker.public)
            if standing is None:
                raise InternalError(Code.INTERNAL, "a challenge without its deployment")
            appraisal = self.hardware.appraise(
                connection, self.broker, standing, launch, challenge, read.signed, blobs=read.blobs, now_us=now_us
            )
            if launch.group is not None:
                return self._accept(connection, standing, launch, challenge, appraisal, read.message, now_us)
            # The counter moves only once everything else has succeeded.
            made = make_release(self.broker, connection, standing, launch, challenge, appraisal, self.memory, now_us)
            return self._written(connection, standing, made, now_us)
        except (SQLAlchemyError, OvertakenError):
            raise
        except Exception as error:  # whatever happens, the challenge is consumed and nothing is released
            # What is not a refusal is a defect of the broker: the answer has its code and no detail.
            refusal = error if isinstance(error, RefusedError) else InternalError(Code.INTERNAL, "the broker failed")
            if refusal is error:  # a runtime that meets a defect of the broker comes again, and so does its group
                self._group_refused(connection, launch, Challenge.parse(asked["body"]), refusal.code, now_us)
            _audit_refusal(connection, refusal, asked, read.signed.sha256, now_us)
            return ApiAnswer.refusal(refusal)

    def _accept(
        self,
        connection: Connection,
        standing: DeploymentStanding,
        launch: LaunchRecord,
        challenge: Challenge,
        appraisal: broker_side.Appraisal,
        message: bytes,
        now_us: int,
    ) -> ApiAnswer:
        """Decide on a group's machine whose evidence passed checks 1 to 12: a release, or pending.

        The caller holds the deployment's row.

        Raises:
            CheckFailedError: checks 13 to 15.
        """
        group = group_of(launch)
        record = current(connection, group.id, now_us)
        if record.state is GroupState.RELEASED:  # once more to a machine that lost its answer
            release = make_release(self.broker, connection, standing, launch, challenge, appraisal, self.memory, now_us)
            if not release.known:
                raise InternalError(Code.INTERNAL, "a group that was released without one of its machines")
            return self._written(connection, standing, release, now_us)
        check_14_group(record)
        if is_overtaken(connection, launch, challenge):
            return pending(record, accepted=len(accepted_machines(connection, group.id)))
        keys_sha256 = self._check_13(connection, standing, launch, appraisal)
        check_15(
            connection, standing, launch, self.memory, again=False, broker_public=self.broker.public, now_us=now_us
        )
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
                    return pending(group_record(connection, group.id), accepted=len(waiting))
                return self._release_all(connection, standing, waiting, group, now_us)
        except _BlamedError as blamed:
            refuse(connection, group.id, machine=blamed.machine, code=blamed.error.code, now_us=now_us)
            mine = blamed.machine == group.machine
            raise (blamed.error if mine else rank_refused(blamed.machine, blamed.error.code)) from None

    def _group_refused(
        self, connection: Connection, launch: LaunchRecord, challenge: Challenge, code: Code, now_us: int
    ) -> None:
        """Refuse the group of a machine whose evidence was refused, if it still waits.

        Evidence that came late does not count against the machine: it may have been held back on the way.
        """
        if launch.group is None or code is Code.NONCE_EXPIRED or is_overtaken(connection, launch, challenge):
            return
        refuse(connection, launch.group.id, machine=launch.group.machine, code=code, now_us=now_us)

    def _check_13(
        self,
        connection: Connection,
        standing: DeploymentStanding,
        launch: LaunchRecord,
        appraisal: broker_side.Appraisal,
    ) -> bytes:
        """Run check 13 for a machine of a group that waits: room for all of it, and keys of no other release."""
        group = group_of(launch)
        keys_sha256, known = check_13(connection, standing, launch, appraisal)
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
            _BlamedError: of one of them: its evidence does not pass any more, or shows another's device.
            OvertakenError: another process was faster, and the transaction is to be run again.
        """
        made: dict[bytes, Release] = {}
        # The clock may have stepped back since one was challenged: no release is dated before its challenge.
        now_us = max(now_us, *(Challenge.parse(row["body"]).issued_us for row in waiting))
        for row in waiting:
            try:
                made[row["nonce"]] = self._made(connection, standing, row, now_us)
                check_12_apart(release.appraisal.roots for release in made.values())
            except CheckFailedError as error:
                raise _BlamedError(row["machine"], error) from None
        if len({release.leg and release.leg.start for release in made.values()}) != 1:
            raise InternalError(Code.INTERNAL, "machines of one group that begin in different places")
        for nonce, release in made.items():
            write_release(self.broker, connection, standing, release, now_us)
            connection.execute(_KEEP, {"challenge": nonce, "status": 200, "answer": release.body})
        if not settle(connection, last.id, GroupState.RELEASED, now_us=now_us):
            raise OvertakenError
        for release in made.values():
            self._keep(release)
        return ApiAnswer(body=next(one.body for one in made.values() if one.launch.group == last))

    def _made(self, connection: Connection, standing: DeploymentStanding, row: RowMapping, now_us: int) -> Release:
        """Appraise a machine's stored evidence as of now, and make its release."""
        launch, challenge = recorded.as_launch(row), Challenge.parse(row["body"])
        envelope, rest = split(row["evidence"])
        signed = check_1_message(envelope)
        blobs = check_blobs(signed.evidence, rest)
        appraisal = self.hardware.appraise(
            connection, self.broker, standing, launch, challenge, signed, blobs=blobs, now_us=now_us
        )
        return make_release(self.broker, connection, standing, launch, challenge, appraisal, self.memory, now_us)

    def _written(
        self, connection: Connection, standing: DeploymentStanding, release: Release, now_us: int
    ) -> ApiAnswer:
        # All of a leg or nothing: what is kept beside the database may yet fail, as on a full disk.
        with nullcontext() if release.leg is None else connection.begin_nested():
            write_release(self.broker, connection, standing, release, now_us)
            self._keep(release)
        return ApiAnswer(body=release.body)

    def _keep(self, release: Release) -> None:
        keep_leg(self.memory, release.launch, release.leg, evidence_public=release.appraisal.claims.evidence_public)


def _audit_refusal(
    connection: Connection, refusal: GlasshouseError, asked: RowMapping, evidence_sha256: bytes, now_us: int
) -> None:
    launch = recorded.as_launch(asked)
    audit_log.append(
        connection,
        "refusal",
        now_us,
        check=str(getattr(refusal, "check", "")),
        code=refusal.code.value,
        deployment=asked["deployment"],
        evidence_sha256=evidence_sha256.hex(),
        run_id=asked["run_id"],
        **group_facts(launch.group),
        **line_facts(launch.line),
    )
