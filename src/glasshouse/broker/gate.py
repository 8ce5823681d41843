"""The gate: challenge and evidence.

Each decision is one transaction: the challenge's consumption, the budget, the audit record and the
stored answer are committed together before the answer is returned. The numbered checks themselves are
`handshake.broker_side`'s; check 2 and check 13 are decided here on what only the database knows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from glasshouse.broker import audit, store
from glasshouse.broker.database import Database
from glasshouse.broker.http import Answer
from glasshouse.broker.keys import KeyFile
from glasshouse.broker.schema import challenges, deployments, releases
from glasshouse.errors import Code, GlasshouseError, InternalError, RefusedError
from glasshouse.handshake import broker_side
from glasshouse.handshake.broker_side import Appraisal, Challenge, CheckFailedError, DeploymentRecord
from glasshouse.wire.kdf import sha256
from glasshouse.wire.signing import SigningKey

__all__ = ["Gate", "GateLimits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateLimits:
    """How much one deployment or launch may ask for.

    Attributes:
        challenge_lifetime_us: from challenge to evidence.
        outstanding: unanswered challenges of one deployment at a time.
        per_launch: challenges of one launch altogether; each leaves a tombstone until its token expires.
    """

    challenge_lifetime_us: int = 120 * 1_000_000
    outstanding: int = 16
    per_launch: int = 256


class Gate:
    """Decides who is given a package key.

    Args:
        database: where everything is kept.
        key_file: opens package keys.
        key: the broker's signing key.
        clock_us: microseconds since the epoch.
        limits: see `GateLimits`.
    """

    def __init__(
        self,
        database: Database,
        key_file: KeyFile,
        key: SigningKey,
        clock_us: Callable[[], int],
        limits: GateLimits,
    ) -> None:
        self._database = database
        self._key_file = key_file
        self._key = key
        self._clock_us = clock_us
        self._limits = limits

    def challenge(self, body: bytes, _parameters: Mapping[str, str]) -> Answer:
        """Answer a challenge request; nothing is stored for one that is not signed as it must be.

        Raises:
            CheckFailedError, RefusedError: the request's own checks, `deployment-unknown` or
                `too-many-challenges`.
        """
        arrived_us = self._clock_us()
        token = broker_side.check_challenge_request(body, broker_public=self._key.public, now_us=arrived_us)
        request_sha256 = sha256(body)

        def decide(connection: Connection) -> Answer:
            # The time of the decision, not of arrival: a wait for the lock cannot outlive an expiry.
            now_us = self._clock_us()
            record = store.deployment_record(connection, token.deployment)
            launch = store.launch_record(connection, token.jti)
            if record is None or launch is None:
                raise RefusedError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such deployment")
            broker_side.check_standing(
                token, record=record, launch=launch, broker_public=self._key.public, now_us=now_us
            )
            store.lock_deployment(connection, record.deployment)
            # The same request again, by a runtime whose answer was lost or by somebody who recorded it,
            # is the same challenge again: a recording cannot use up what a deployment may have open.
            again = _by_request(connection, request_sha256)
            if again is not None:
                _check_2(again, used=again["used_us"] is not None, now_us=now_us)
                return Answer(body=again["body"])
            self._check_room(connection, record.deployment, launch.jti, now_us)
            challenge = broker_side.make_challenge(
                secrets.token_bytes(32),
                record.deployment,
                now_us=now_us,
                lifetime_us=min(self._limits.challenge_lifetime_us, launch.expires_us - now_us),
            )
            values = {
                "nonce": challenge.nonce,
                "deployment": record.deployment,
                "jti": launch.jti,
                "request_sha256": request_sha256,
                "body": challenge.encode(),
                "expires_us": challenge.expires_us,
                "keep_until_us": launch.expires_us,
            }
            connection.execute(insert(challenges).values(**values))
            audit.append(connection, "challenge", now_us, deployment=record.deployment, run_id=launch.run_id)
            return Answer(body=challenge.encode())

        self._database.write(lambda connection: store.sweep(connection, arrived_us))
        return self._database.write(decide)

    def evidence(self, body: bytes, _parameters: Mapping[str, str]) -> Answer:
        """Decide on evidence: a release, or a refusal with the code of the first check that failed.

        Raises:
            CheckFailedError: check 1, and `nonce-unknown`: no challenge was named, nothing is stored.
        """
        nonce = broker_side.peek_nonce(body)
        evidence_sha256 = sha256(body)
        # Looked up without the write lock first: who names no challenge of ours cannot hold up who does.
        if self._database.read(lambda connection: _by_nonce(connection, nonce)) is None:
            broker_side.check_2_challenge(None, used=False, now_us=self._clock_us())

        def decide(connection: Connection) -> Answer:
            now_us = self._clock_us()
            taken = connection.execute(
                update(challenges)
                .where(challenges.c.nonce == nonce, challenges.c.used_us.is_(None))
                .values(used_us=now_us, evidence_sha256=evidence_sha256)
            ).rowcount
            row = _by_nonce(connection, nonce)
            if row is None:
                broker_side.check_2_challenge(None, used=False, now_us=now_us)
                raise InternalError(Code.INTERNAL, "check 2 passed without a challenge")
            if not taken:
                return self._replayed(connection, row, evidence_sha256, now_us)
            answer = self._decided(connection, row, body, evidence_sha256, now_us)
            connection.execute(
                update(challenges).where(challenges.c.nonce == nonce).values(status=answer.status, answer=answer.body)
            )
            return answer

        return self._database.write(decide)

    def _check_room(self, connection: Connection, deployment: str, jti: str, now_us: int) -> None:
        count = select(func.count()).select_from(challenges)
        outstanding = connection.execute(
            count.where(
                challenges.c.deployment == deployment, challenges.c.used_us.is_(None), challenges.c.expires_us > now_us
            )
        ).scalar_one()
        ever = connection.execute(count.where(challenges.c.jti == jti)).scalar_one()
        if outstanding >= self._limits.outstanding or ever >= self._limits.per_launch:
            raise RefusedError(Code.TOO_MANY_CHALLENGES, "too many challenges of this deployment or launch")

    def _replayed(self, connection: Connection, row: RowMapping, evidence_sha256: bytes, now_us: int) -> Answer:
        try:
            _check_2(row, used=True, now_us=now_us)
        except CheckFailedError as refusal:
            answer = Answer.refusal(refusal)
            if row["replays"] == 0:  # one record for each challenge: a recording cannot fill the disk
                self._audit_refusal(connection, refusal, row, evidence_sha256, now_us)
        else:
            raise InternalError(Code.INTERNAL, "check 2 passed a used challenge")
        connection.execute(
            update(challenges).where(challenges.c.nonce == row["nonce"]).values(replays=challenges.c.replays + 1)
        )
        return answer

    def _decided(
        self, connection: Connection, row: RowMapping, message: bytes, evidence_sha256: bytes, now_us: int
    ) -> Answer:
        """Run checks 2 to 13 on a challenge that this transaction consumed; a refusal is an answer too."""
        try:
            challenge = _check_2(row, used=False, now_us=now_us)
            released = store.lock_deployment(connection, row["deployment"])
            record = store.deployment_record(connection, row["deployment"])
            launch = store.launch_record(connection, row["jti"])
            if record is None or launch is None:
                raise InternalError(Code.INTERNAL, "a challenge without its deployment or launch")
            appraisal = broker_side.appraise(
                message,
                challenge=challenge,
                record=record,
                launch=launch,
                broker_public=self._key.public,
                now_us=now_us,
            )
            return self._released(connection, record, challenge, appraisal, released=released, now_us=now_us)
        except SQLAlchemyError:
            raise
        except Exception as error:  # whatever happens, the challenge is consumed and nothing is released
            # What is not a refusal is a defect of ours: the runtime is told so, and nothing of it.
            refusal = error if isinstance(error, RefusedError) else InternalError(Code.INTERNAL, "the broker failed")
            self._audit_refusal(connection, refusal, row, evidence_sha256, now_us)
            return Answer.refusal(refusal)

    def _released(
        self,
        connection: Connection,
        record: DeploymentRecord,
        challenge: Challenge,
        appraisal: Appraisal,
        *,
        released: int,
        now_us: int,
    ) -> Answer:
        """Check 13, and the release. The counter moves only once everything else has succeeded."""
        claims, hpke_sha256 = appraisal.claims, sha256(appraisal.claims.hpke_public)
        known = _known_runtime(connection, record.deployment, hpke_sha256, claims.evidence_public, claims.run_id)
        broker_side.check_13_budget(released_to=released, known=known, policy=record.policy)
        release = broker_side.build_release(
            appraisal,
            package_key=store.package_key(connection, record, self._key_file),
            broker_key=self._key,
            challenge=challenge,
            record=record,
            now_us=now_us,
        )
        here = (releases.c.deployment == record.deployment) & (releases.c.hpke_sha256 == hpke_sha256)
        if known:
            again = {"answers": releases.c.answers + 1, "contact_us": now_us}
            connection.execute(update(releases).where(here).values(**again))
        else:
            self._count(connection, record)
            values = {
                "deployment": record.deployment,
                "hpke_sha256": hpke_sha256,
                "evidence_public": claims.evidence_public,
                "run_id": claims.run_id,
                "released_us": now_us,
                "contact_us": now_us,
            }
            connection.execute(insert(releases).values(**values))
        audit.append(
            connection,
            "release",
            now_us,
            assurance=claims.assurance.value,
            counted=0 if known else 1,
            deployment=record.deployment,
            evidence_sha256=appraisal.evidence_sha256.hex(),
            hpke_sha256=hpke_sha256.hex(),
            profile=claims.hardening.profile.value,
            run_id=claims.run_id,
        )
        return Answer(body=release)

    def _count(self, connection: Connection, record: DeploymentRecord) -> None:
        moved = connection.execute(
            update(deployments)
            .where(deployments.c.id == record.deployment, deployments.c.releases < record.policy.release_budget)
            .values(releases=deployments.c.releases + 1)
        ).rowcount
        if moved != 1:
            raise CheckFailedError("13", Code.RELEASE_BUDGET, "the deployment's release budget is used up")

    def _audit_refusal(
        self, connection: Connection, refusal: GlasshouseError, row: RowMapping, evidence_sha256: bytes, now_us: int
    ) -> None:
        launch = store.launch_record(connection, row["jti"])
        audit.append(
            connection,
            "refusal",
            now_us,
            check=str(getattr(refusal, "check", "")),
            code=refusal.code.value,
            deployment=row["deployment"],
            evidence_sha256=evidence_sha256.hex(),
            run_id=launch.run_id if launch else "",
        )


def _check_2(row: RowMapping, *, used: bool, now_us: int) -> Challenge:
    """Check 2 on a stored challenge; raises `CheckFailedError`.

    A challenge that we stored was issued before now, even where this machine's clock was set back since,
    or another broker's runs a little ahead.
    """
    challenge = Challenge.parse(row["body"])
    return broker_side.check_2_challenge(challenge, used=used, now_us=max(now_us, challenge.issued_us))


def _by_nonce(connection: Connection, nonce: bytes) -> RowMapping | None:
    return connection.execute(select(challenges).where(challenges.c.nonce == nonce)).mappings().one_or_none()


def _by_request(connection: Connection, request_sha256: bytes) -> RowMapping | None:
    query = select(challenges).where(challenges.c.request_sha256 == request_sha256)
    return connection.execute(query).mappings().one_or_none()


def _known_runtime(
    connection: Connection, deployment: str, hpke_sha256: bytes, evidence_public: bytes, run_id: str
) -> bool:
    """Return whether this runtime was released to before: its run and both of its keys, or none of them.

    Raises:
        CheckFailedError: `release-budget-exhausted` for one of the three beside another runtime's.
    """
    rows = connection.execute(
        select(releases).where(
            (releases.c.evidence_public == evidence_public)
            | (releases.c.run_id == run_id)
            | ((releases.c.deployment == deployment) & (releases.c.hpke_sha256 == hpke_sha256))
        )
    ).mappings()
    found = [(row["deployment"], row["hpke_sha256"], row["evidence_public"], row["run_id"]) for row in rows]
    if not found:
        return False
    if found == [(deployment, hpke_sha256, evidence_public, run_id)]:
        return True
    # Otherwise one runtime's budget could carry the log of a second one, one log two runs, or one run two receipts.
    raise CheckFailedError(
        "13", Code.RELEASE_BUDGET, "a run or keys that were attested before, with others beside them"
    )
