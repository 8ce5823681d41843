"""The gate: challenge and evidence.

Each decision is one transaction, or one savepoint of a transaction that it shares (`group_commit`): the challenge's
consumption, the budget, the audit record and the stored answer are committed together before the answer is sent. The
numbered checks are `handshake.broker_side`'s; check 2 is decided here on the database's records, check 13 in `releases`
and check 14 in `group_release`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, RowMapping, bindparam, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from glasshouse.attestation.evidence import SignedEvidence
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.verify import check_1_envelope, check_1_payload, check_4_signatures
from glasshouse.broker.decide.decisions import ApiAnswer, Decision, Effect
from glasshouse.broker.decide.group_release import GroupReleases
from glasshouse.broker.decide.releases import group_facts, make_release, write_release
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.broker_state import BrokerState
from glasshouse.broker.store.database import OvertakenError
from glasshouse.broker.store.database_schema import challenges, launches
from glasshouse.errors import Code, GlasshouseError, InternalError, RefusedError
from glasshouse.handshake import broker_side
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.token_checks import check_challenge_request, check_standing
from glasshouse.handshake.tokens import TokenClaims
from glasshouse.wire.kdf import sha256

_SWEEP_EVERY_US = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class GateLimits:
    """How many challenges one deployment or launch may have."""

    challenge_lifetime_us: int = 120 * 1_000_000  # from challenge to evidence
    outstanding: int = 16  # unanswered challenges of one deployment at a time, beside the first of each launch
    outstanding_per_launch: int = 4  # of them, those of one launch
    per_launch: int = 256  # of one launch altogether; each leaves a tombstone until its token expires


# Statements are built once: to build one costs as much as to run it. An update sets the columns that its values name;
# its other parameters are named otherwise.
_BY_NONCE = (
    select(challenges.c.nonce, challenges.c.body, challenges.c.used_us, challenges.c.replays, *recorded.LAUNCH_COLUMNS)
    .select_from(recorded.LAUNCH_SOURCE.join(challenges, challenges.c.jti == launches.c.jti))
    .where(challenges.c.nonce == bindparam("nonce"))
)
_BY_REQUEST = select(challenges.c.body, challenges.c.used_us).where(
    challenges.c.request_sha256 == bindparam("request_sha256")
)
_NAMED = challenges.c.nonce == bindparam("challenge")
_TAKE = update(challenges).where(_NAMED, challenges.c.used_us.is_(None))
_KEEP = update(challenges).where(_NAMED)
_REPLAYS = select(challenges.c.replays).where(challenges.c.nonce == bindparam("nonce"))
_REPLAYED = update(challenges).where(_NAMED).values(replays=challenges.c.replays + 1)
_ISSUE = insert(challenges)
_CHALLENGES = select(func.count()).select_from(challenges)
_OF_LAUNCH = challenges.c.jti == bindparam("jti")
_OUTSTANDING = _CHALLENGES.where(challenges.c.used_us.is_(None), challenges.c.expires_us > bindparam("now_us"))
# The last of a launch is among those that end last: a challenge's end is never before an earlier one's.
_ENDS = challenges.alias()
_LAST_END = select(func.max(_ENDS.c.expires_us)).where(_ENDS.c.jti == bindparam("jti")).scalar_subquery()
_LAST_OF_LAUNCH = select(challenges.c.body).where(_OF_LAUNCH, challenges.c.expires_us == _LAST_END)
_ROOM = select(
    _OUTSTANDING.where(challenges.c.deployment == bindparam("deployment")).scalar_subquery(),
    _OUTSTANDING.where(_OF_LAUNCH).scalar_subquery(),
    _CHALLENGES.where(_OF_LAUNCH).scalar_subquery(),
)


class _CrowdedError(RefusedError):
    """A deployment has too many challenges open, and not because of the launch of this request."""


class ReleaseGate:
    """Decides who is given a package key."""

    def __init__(self, broker: BrokerState, limits: GateLimits) -> None:
        self._broker = broker
        self._limits = limits
        self._groups = GroupReleases(broker)
        self.ask = self._groups.ask
        self._swept_us = 0

    def challenge(self, body: bytes) -> Decision:
        """Read a challenge request; what is returned answers it.

        Raises:
            CheckFailedError: the request's own checks.
            RefusedError: `deployment-unknown`, `too-many-challenges`. The decision: the same, as of its time.
        """
        broker = self._broker
        token = check_challenge_request(body, broker_public=broker.public, now_us=broker.clock_us())
        request_sha256 = sha256(body)

        def known(connection: Connection) -> tuple[bytes | None, int, bool]:
            standing = recorded.standing(connection, token.deployment, broker_public=broker.public)
            launch = recorded.launch_record(connection, token.jti)
            if standing is None or launch is None:
                raise RefusedError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such deployment")
            # Where the clock was set back since the launch, its time: the dates of a run never go back.
            now_us = max(broker.clock_us(), launch.created_us)
            check_standing(token, record=standing.record, launch=launch, broker_public=broker.public, now_us=now_us)
            # The same request again, by a runtime whose answer was lost or from a recording,
            # is the same challenge again: a recording cannot use up what a deployment may have open.
            again = connection.execute(_BY_REQUEST, {"request_sha256": request_sha256}).one_or_none()
            if again is None:
                return None, now_us, self._check_room(connection, token.deployment, token.jti, now_us)
            return _check_2(again.body, used=again.used_us is not None, now_us=now_us).encode(), now_us, False

        def decide(connection: Connection) -> ApiAnswer:
            # The time of the decision, not of arrival: a wait for the lock cannot outlive an expiry.
            recorded.lock_deployment(connection, token.deployment)
            again, now_us, first = known(connection)
            return ApiAnswer(body=again or self._issued(connection, token, request_sha256, now_us, first=first))

        # A recording that is played again takes no lock, nor does a request for which there is no room.
        try:
            again, _, _ = broker.database.read(known)
        except _CrowdedError as refusal:  # as for machines of a group that start together: they come again
            return Decision(decide=partial(ApiAnswer.refusal, refusal), effect=Effect.NOTHING, repeats=token.jti)
        if again is not None:
            return Decision(decide=lambda: ApiAnswer(body=again), effect=Effect.CHARGE)
        return Decision(decide=partial(broker.database.write, decide))

    def _issued(
        self, connection: Connection, token: TokenClaims, request_sha256: bytes, now_us: int, *, first: bool
    ) -> bytes:
        """Make and store a challenge for a token whose standing was checked, and for which there is room."""
        # Later than all of this launch before it, whatever the clock shows: later evidence takes the place of earlier.
        last = () if first else connection.execute(_LAST_OF_LAUNCH, {"jti": token.jti}).scalars()
        now_us = max([now_us, *(Challenge.parse(body).issued_us + 1 for body in last)])
        end_us = token.expires_s * 1_000_000
        challenge = Challenge(
            nonce=secrets.token_bytes(32),
            deployment=token.deployment,
            issued_us=now_us,
            expires_us=min(now_us + self._limits.challenge_lifetime_us, end_us),
        )
        body = challenge.encode()
        values = {
            "nonce": challenge.nonce,
            "deployment": token.deployment,
            "jti": token.jti,
            "request_sha256": request_sha256,
            "body": body,
            "expires_us": challenge.expires_us,
            "keep_until_us": end_us,
        }
        connection.execute(_ISSUE, values)
        # Here: what a refused request had swept would be taken back with it. By the clock, not by this launch's time:
        # where the clock was set back since, that would be over which others still have before them.
        clock_us = self._broker.clock_us()
        if abs(clock_us - self._swept_us) >= _SWEEP_EVERY_US:  # not each time: what is over only takes space
            recorded.sweep(connection, clock_us)
            self._swept_us = clock_us
        audit_log.append(connection, "challenge", now_us, deployment=token.deployment, run_id=token.run_id)
        return body

    def _check_room(self, connection: Connection, deployment: str, jti: str, now_us: int) -> bool:
        """Return whether this would be its launch's first challenge; raises `RefusedError`, `too-many-challenges`."""
        values = {"deployment": deployment, "jti": jti, "now_us": now_us}
        limits = self._limits
        outstanding, of_launch, ever = connection.execute(_ROOM, values).one()
        if of_launch >= limits.outstanding_per_launch or ever >= limits.per_launch:
            raise RefusedError(Code.TOO_MANY_CHALLENGES, "too many challenges of this launch")
        # A launch that has none gets one: others of its deployment cannot keep it out.
        if of_launch and outstanding >= limits.outstanding:
            raise _CrowdedError(Code.TOO_MANY_CHALLENGES, "too many challenges of this deployment")
        return bool(ever == 0)

    def evidence(self, body: bytes) -> Decision:
        """Read evidence; what is returned decides on it: a release, or a refusal with the first check's code.

        Raises:
            CheckFailedError: checks 1 and 4, and `nonce-unknown`. Nothing was written then, and no lock taken.
        """
        opened, clock_us = check_1_envelope(body), self._broker.clock_us
        nonce = opened.nonce
        # What is read here, challenge and launch, is never changed once it is written.
        found = self._broker.database.read(
            lambda connection: connection.execute(_BY_NONCE, {"nonce": nonce}).mappings().one_or_none()
        )
        asked = broker_side.check_2_known(found)
        # Before anything is consumed, counted, recorded or refused: a nonce is no secret.
        check_4_signatures(
            opened.envelope, evidence_public=opened.evidence_public, launch_public=asked["launch_public"]
        )
        signed = check_1_payload(opened)  # not before: it is dear
        if asked["replays"]:  # used, and a replay was recorded before: a recording played again writes nothing
            _check_2(asked["body"], used=True, now_us=clock_us())

        def decide(connection: Connection) -> ApiAnswer:
            now_us = clock_us()
            # Evidence that the launch and evidence keys signed uses the challenge up, whatever comes after.
            taken = {"challenge": nonce, "used_us": now_us, "evidence_sha256": signed.sha256}
            if connection.execute(_TAKE, taken).rowcount != 1:
                return self._replayed(connection, asked, signed.sha256, now_us)
            answer = self._decided(connection, asked, signed, body, now_us)
            connection.execute(_KEEP, {"challenge": nonce, "status": answer.status, "answer": answer.body})
            return answer

        # A recording of what was answered, or came too late: no sign of life of the address that it comes from.
        fresh = asked["used_us"] is None and clock_us() < Challenge.parse(asked["body"]).expires_us
        effect = Effect.CREDIT if fresh else Effect.CHARGE
        return Decision(decide=partial(self._broker.database.write, decide), effect=effect)

    def _replayed(self, connection: Connection, asked: RowMapping, evidence_sha256: bytes, now_us: int) -> ApiAnswer:
        # None when it was swept since it was looked up.
        replays = broker_side.check_2_known(
            connection.execute(_REPLAYS, {"nonce": asked["nonce"]}).scalar_one_or_none()
        )
        try:
            _check_2(asked["body"], used=True, now_us=now_us)
        except CheckFailedError as refusal:
            answer = ApiAnswer.refusal(refusal)
            if replays == 0:  # one record for each challenge: a recording cannot fill the disk
                _audit_refusal(connection, refusal, asked, evidence_sha256, now_us)
        else:
            raise InternalError(Code.INTERNAL, "check 2 passed a used challenge")
        connection.execute(_REPLAYED, {"challenge": asked["nonce"]})
        return answer

    def _decided(
        self, connection: Connection, asked: RowMapping, signed: SignedEvidence, message: bytes, now_us: int
    ) -> ApiAnswer:
        """Run the other checks on a challenge that this transaction consumed; a refusal is an answer too."""
        launch = recorded.as_launch(asked)
        try:
            challenge = _check_2(asked["body"], used=False, now_us=now_us)
            now_us = max(now_us, challenge.issued_us)
            recorded.lock_deployment(connection, asked["deployment"])
            standing = recorded.standing(connection, asked["deployment"], broker_public=self._broker.public)
            if standing is None:
                raise InternalError(Code.INTERNAL, "a challenge without its deployment")
            appraisal = broker_side.appraise(
                signed,
                challenge=challenge,
                record=standing.record,
                launch=launch,
                broker_public=self._broker.public,
                now_us=now_us,
            )
            if launch.group is not None:
                return self._groups.accept(connection, standing, launch, challenge, appraisal, message, now_us)
            release = make_release(self._broker, connection, standing, challenge, appraisal, now_us)
            # The counter moves only once everything else has succeeded.
            write_release(connection, standing.record, release, now_us)
            return ApiAnswer(body=release.body)
        except (SQLAlchemyError, OvertakenError):
            raise
        except Exception as error:  # whatever happens, the challenge is consumed and nothing is released
            # What is not a refusal is a defect of the broker: the answer has its code and no detail.
            refusal = error if isinstance(error, RefusedError) else InternalError(Code.INTERNAL, "the broker failed")
            if refusal is error:  # a runtime that meets a defect of the broker comes again, and so does its group
                self._groups.refused(connection, launch, Challenge.parse(asked["body"]), refusal.code, now_us)
            _audit_refusal(connection, refusal, asked, signed.sha256, now_us)
            return ApiAnswer.refusal(refusal)


def _audit_refusal(
    connection: Connection, refusal: GlasshouseError, asked: RowMapping, evidence_sha256: bytes, now_us: int
) -> None:
    audit_log.append(
        connection,
        "refusal",
        now_us,
        check=str(getattr(refusal, "check", "")),
        code=refusal.code.value,
        deployment=asked["deployment"],
        evidence_sha256=evidence_sha256.hex(),
        run_id=asked["run_id"],
        **group_facts(recorded.as_launch(asked).group),
    )


def _check_2(body: bytes, *, used: bool, now_us: int) -> Challenge:
    """Make the rest of check 2 on a stored challenge; raises `CheckFailedError`.

    A challenge that we stored was issued before now, even where this machine's clock was set back since,
    or another broker's runs a little ahead.
    """
    challenge = Challenge.parse(body)
    return broker_side.check_2_unused(challenge, used=used, now_us=max(now_us, challenge.issued_us))
