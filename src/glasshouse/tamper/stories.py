"""The nine stories of one runtime, and their control: what the attacker changes, and which check must notice.

In every story the attacker holds a stolen launch file: they can ask for challenges, and sign whatever
they make up with the launch key and with an evidence key of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from glasshouse.attestation.claims import composite
from glasshouse.attestation.evidence import EVIDENCE_TYPE, Evidence
from glasshouse.attestation.hardening import CheckResult
from glasshouse.broker.client.owner_client import Reply
from glasshouse.errors import Code, InternalError
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import dsse
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import State

__all__ = ["CONTROL", "STORIES", "Story"]

_HOUR_US = 3600 * 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """One attack.

    Attributes:
        name: what it is called.
        changed: what the attacker changed, in words.
        check: the number of the check that must notice; empty for the control.
        expected: the code that must come back; None for the control.
        tell: plays it against the owner's broker and returns what the broker answered last.
        counted: by how much a release moves the broker's counter.
    """

    name: str
    changed: str
    check: str
    expected: Code | None
    tell: Callable[[Owner], Reply]
    counted: int = 1


def _composite_mismatch(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    edited = replace(claims, environment_sha256=secrets.token_bytes(32))
    evidence = Evidence(claims=edited, composite=composite(claims), hardware=())
    keys = [actor.evidence, actor.launch.key()]
    return actor.send(dsse.sign(EVIDENCE_TYPE, evidence.encode(), keys).encode())


def _manifest_mismatch(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    return actor.send(actor.sign(replace(claims, manifest_sha256=secrets.token_bytes(32))))


def _container_mismatch(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    return actor.send(actor.sign(replace(claims, container_id="another-container")))


def _stale_timestamp(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    early = replace(claims, issued_us=claims.issued_us - _HOUR_US, started_us=claims.started_us - _HOUR_US)
    return actor.send(actor.sign(early))


def _anti_debug_disabled(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    traceable = {**claims.hardening.agent, "not-dumpable": CheckResult.FAILED, "watched": CheckResult.FAILED}
    report = replace(claims.hardening, profile=Profile.OFF, anti_debug=False, agent=traceable)
    return actor.send(actor.sign(replace(claims, hardening=report)))


def _state_spoofed(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    return actor.send(actor.sign(replace(claims, state=State.RELEASED)))


def _profile_downgrade(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    weaker = {**claims.hardening.worker, "landlock": CheckResult.UNAVAILABLE}
    report = replace(claims.hardening, profile=Profile.STANDARD, worker=weaker)
    return actor.send(actor.sign(replace(claims, hardening=report)))


def _nonce_replay(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    challenge = actor.challenge()
    claims = actor.claims(challenge)
    first = actor.send(actor.sign(replace(claims, state=State.CREATED)))
    if first.status == 200:
        raise InternalError(Code.INTERNAL, "the broker released to a runtime that was not measured")
    return actor.send(actor.sign(claims))


def _token_claim_mismatch(owner: Owner) -> Reply:
    stolen = owner.launch()
    other = owner.launch(key=stolen.key())
    actor = Actor.enter(owner, stolen)
    claims = actor.claims(actor.challenge())
    return actor.send(actor.sign(replace(claims, token=other.token)))


def _control(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    challenge = actor.challenge()
    evidence = actor.sign(actor.claims(challenge))
    reply = actor.send(evidence)
    if actor.open(reply.content(), challenge, evidence) != owner.package_key:
        raise InternalError(Code.INTERNAL, "the broker released another key than the package's")
    return reply


STORIES: tuple[Story, ...] = (
    Story(
        name="composite hash mismatch",
        changed="the environment digest, after the composite over the claims was made",
        check="9",
        expected=Code.COMPOSITE_MISMATCH,
        tell=_composite_mismatch,
    ),
    Story(
        name="manifest hash mismatch",
        changed="the manifest hash: a package that the deployment is not for",
        check="6",
        expected=Code.MANIFEST_MISMATCH,
        tell=_manifest_mismatch,
    ),
    Story(
        name="container id mismatch",
        changed="the container id: the launch file was carried to another container",
        check="7",
        expected=Code.CONTAINER_MISMATCH,
        tell=_container_mismatch,
    ),
    Story(
        name="stale timestamp",
        changed="the times: claims made an hour before the challenge",
        check="5",
        expected=Code.EVIDENCE_STALE,
        tell=_stale_timestamp,
    ),
    Story(
        name="anti-debug disabled",
        changed="the hardening report: dumpable and unwatched, and saying so",
        check="11a",
        expected=Code.ANTI_DEBUG_DISABLED,
        tell=_anti_debug_disabled,
    ),
    Story(
        name="runtime state spoofed",
        changed="the state: released instead of measured",
        check="10",
        expected=Code.STATE_MISMATCH,
        tell=_state_spoofed,
    ),
    Story(
        name="anti-debug profile downgrade",
        changed="the profile: standard where the policy demands strict",
        check="11b",
        expected=Code.ANTI_DEBUG_DOWNGRADED,
        tell=_profile_downgrade,
    ),
    Story(
        name="nonce replay",
        changed="nothing but the nonce: perfect evidence for a challenge that was answered before",
        check="2",
        expected=Code.NONCE_REPLAYED,
        tell=_nonce_replay,
    ),
    Story(
        name="JWT claim mismatch",
        changed="the launch token: a genuine one for the same launch key, but of another run",
        check="3",
        expected=Code.TOKEN_CLAIM,
        tell=_token_claim_mismatch,
    ),
)

CONTROL = Story(name="valid control", changed="nothing", check="", expected=None, tell=_control)
