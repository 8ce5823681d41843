"""Challenges: the nonces that evidence answers, and how many of them a deployment and a launch may have."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, bindparam, func, insert, select

from glasshouse.attestation.roots.tpm.endorsement import credential_for
from glasshouse.attestation.roots.tpm.tpm_policy import TpmPolicy
from glasshouse.broker.decide.decisions import ApiAnswer, Decision, Effect
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import activations, challenges
from glasshouse.broker.store.key_file import Purpose
from glasshouse.errors import Code, RefusedError
from glasshouse.handshake import broker_side
from glasshouse.handshake.launch import TokenClaims
from glasshouse.handshake.messages import Challenge, TpmKeys
from glasshouse.handshake.records import check_challenge_request, check_standing
from glasshouse.wire.crypto import sha256

_SWEEP_EVERY_US = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class GateLimits:
    """How many challenges one deployment or launch may have."""

    challenge_lifetime_us: int = 120 * 1_000_000  # from challenge to evidence
    outstanding: int = 16  # unanswered challenges of one deployment at a time, beside the first of each launch
    outstanding_per_launch: int = 4  # of them, those of one launch
    per_launch: int = 256  # of one launch altogether; each leaves a tombstone until its token expires


# Statements are built once: to build one costs as much as to run it.
_BY_REQUEST = select(challenges.c.body, challenges.c.used_us).where(
    challenges.c.request_sha256 == bindparam("request_sha256")
)
_ISSUE = insert(challenges)
_ACTIVATE = insert(activations)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Activation:
    """The keys of a TPM, and what shows by being opened that it holds both (spec/hardware-evidence.md, section 3.1)."""

    keys: TpmKeys
    # None where the policy lists the attestation key by its name.
    credential: bytes | None
    secret: bytes | None

    @classmethod
    def of(cls, keys: TpmKeys, policy: TpmPolicy, now_us: int) -> _Activation:
        """Check a TPM's keys and make its credential; raises `CheckFailedError`, `tpm-key` or `tpm-endorsement`."""
        secret = secrets.token_bytes(32)
        credential = credential_for(keys.ak, keys.ek, secret, policy=policy, now_us=now_us)
        return cls(keys=keys, credential=credential, secret=None if credential is None else secret)


class _CrowdedError(RefusedError):
    """A deployment has too many challenges open, and not because of the launch of this request."""


class ChallengeIssuer:
    """Issues challenges."""

    def __init__(self, broker: BrokerState, limits: GateLimits) -> None:
        self._broker = broker
        self._limits = limits
        self._swept_us = 0

    def challenge(self, body: bytes) -> Decision:
        """Read a challenge request; what is returned answers it.

        Raises:
            CheckFailedError: the request's own checks; `tpm-key` and `tpm-endorsement`.
            RefusedError: `deployment-unknown`, `too-many-challenges`. The decision: the same, as of its time.
        """
        broker = self._broker
        token, tpm = check_challenge_request(body, broker_public=broker.public, now_us=broker.clock_us())
        request_sha256 = sha256(body)

        def known(connection: Connection) -> tuple[bytes | None, int, bool, TpmPolicy | None]:
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
            hardware = standing.record.policy.hardware
            accepted = None if hardware is None else hardware.tpm
            if again is None:
                return None, now_us, self._check_room(connection, token.deployment, token.jti, now_us), accepted
            return check_2(again.body, used=again.used_us is not None, now_us=now_us).encode(), now_us, False, None

        def decide(connection: Connection) -> ApiAnswer:
            # The time of the decision, not of arrival: a wait for the lock cannot outlive an expiry.
            recorded.lock_deployment(connection, token.deployment)
            again, now_us, first, _ = known(connection)
            return ApiAnswer(body=again or self._issued(connection, token, request_sha256, activation, now_us, first))

        # A recording that is played again takes no lock, nor does a request for which there is no room.
        try:
            again, now_us, _, accepted = broker.database.read(known)
        except _CrowdedError as refusal:  # as for machines of a group that start together: they come again
            return Decision(decide=partial(ApiAnswer.refusal, refusal), effect=Effect.NOTHING, repeats=token.jti)
        if again is not None:
            return Decision(decide=lambda: ApiAnswer(body=again), effect=Effect.CHARGE)
        # Neither does another machine's TPM, or a key that is no TPM's.
        activation = None if tpm is None or accepted is None else _Activation.of(tpm, accepted, now_us)
        return Decision(decide=partial(broker.database.write, decide), effect=Effect.CREDIT)

    def _issued(
        self,
        connection: Connection,
        token: TokenClaims,
        request_sha256: bytes,
        activation: _Activation | None,
        now_us: int,
        first: bool,
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
            credential=None if activation is None else activation.credential,
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
        if activation is not None:
            name, keys = challenge.nonce.hex(), activation.keys
            wrapped = activation.secret and self._broker.key_file.wrap(Purpose.ACTIVATION, name, activation.secret)
            named = {"nonce": challenge.nonce, "ak": keys.ak, "ek": keys.ek, "secret": wrapped}
            connection.execute(_ACTIVATE, named)
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


def check_2(body: bytes, *, used: bool, now_us: int) -> Challenge:
    """Make the rest of check 2 on a stored challenge; raises `CheckFailedError`.

    A challenge that we stored was issued before now, even where this machine's clock was set back since,
    or another broker's runs a little ahead.
    """
    challenge = Challenge.parse(body)
    return broker_side.check_2_unused(challenge, used=used, now_us=max(now_us, challenge.issued_us))
