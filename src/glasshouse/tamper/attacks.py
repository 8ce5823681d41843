"""The nine attacks of one runtime, and their control: what the attacker changes, and which check must notice.

In every attack the attacker holds a stolen launch file: they can ask for challenges, and sign what they make up with
the launch key and with an evidence key of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from glasshouse.attestation.claims import Claims, composite
from glasshouse.attestation.evidence import EVIDENCE_TYPE, Evidence
from glasshouse.attestation.hardening import CheckResult
from glasshouse.broker.client.owner_client import Reply
from glasshouse.errors import Code, InternalError
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import dsse
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import State

_HOUR_US = 3600 * 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One attack."""

    name: str  # what it is called
    changed: str  # what the attacker changed, in words
    check: str  # the number of the check that must notice; empty for the control
    expected: Code | None  # the code that must come back; None for the control
    play: Callable[[Owner], Reply]  # plays it against the owner's broker and returns the broker's last answer
    counted: int = 1  # by how much a release moves the broker's counter


def _with(edit: Callable[[Claims], Claims]) -> Callable[[Owner], Reply]:
    """Return the attack that sends perfect claims, edited, with a true composite and both signatures."""
    return lambda owner: send_edited(Actor.enter(owner), edit)


def send_edited(actor: Actor, edit: Callable[[Claims], Claims]) -> Reply:
    """Send an actor's claims, edited, for a challenge of its own."""
    return actor.send(actor.sign(edit(actor.claims(actor.challenge()))))


def _composite_mismatch(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    edited = replace(claims, environment_sha256=secrets.token_bytes(32))
    evidence = Evidence(claims=edited, composite=composite(claims), hardware=())
    keys = [actor.evidence, actor.launch.key()]
    return actor.send(dsse.sign(EVIDENCE_TYPE, evidence.encode(), keys).encode())


def _stale(claims: Claims) -> Claims:
    return replace(claims, issued_us=claims.issued_us - _HOUR_US, started_us=claims.started_us - _HOUR_US)


def _traceable(claims: Claims) -> Claims:
    agent = {**claims.hardening.agent, "not-dumpable": CheckResult.FAILED, "watched": CheckResult.FAILED}
    report = replace(claims.hardening, profile=Profile.OFF, anti_debug=False, agent=agent)
    return replace(claims, hardening=report)


def _weaker(claims: Claims) -> Claims:
    worker = {**claims.hardening.worker, "landlock": CheckResult.UNAVAILABLE}
    return replace(claims, hardening=replace(claims.hardening, profile=Profile.STANDARD, worker=worker))


def _nonce_replay(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    if actor.send(actor.sign(replace(claims, state=State.CREATED))).status == 200:
        raise InternalError(Code.INTERNAL, "the broker released to a runtime that was not measured")
    return actor.send(actor.sign(claims))


def _token_claim_mismatch(owner: Owner) -> Reply:
    stolen = owner.launch()
    other = owner.launch(key=stolen.key())
    return send_edited(Actor.enter(owner, stolen), lambda claims: replace(claims, token=other.token))


def _control(owner: Owner) -> Reply:
    actor = Actor.enter(owner)
    challenge = actor.challenge()
    evidence = actor.sign(actor.claims(challenge))
    reply = actor.send(evidence)
    if actor.open(reply.content(), challenge, evidence) != owner.package_key:
        raise InternalError(Code.INTERNAL, "the broker released another key than the package's")
    return reply


ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="composite hash mismatch",
        changed="the environment digest, after the composite over the claims was made",
        check="9",
        expected=Code.COMPOSITE_MISMATCH,
        play=_composite_mismatch,
    ),
    Attack(
        name="manifest hash mismatch",
        changed="the manifest hash: a package that the deployment is not for",
        check="6",
        expected=Code.MANIFEST_MISMATCH,
        play=_with(lambda claims: replace(claims, manifest_sha256=secrets.token_bytes(32))),
    ),
    Attack(
        name="container id mismatch",
        changed="the container id: the launch file was carried to another container",
        check="7",
        expected=Code.CONTAINER_MISMATCH,
        play=_with(lambda claims: replace(claims, container_id="another-container")),
    ),
    Attack(
        name="stale timestamp",
        changed="the times: claims made an hour before the challenge",
        check="5",
        expected=Code.EVIDENCE_STALE,
        play=_with(_stale),
    ),
    Attack(
        name="anti-debug disabled",
        changed="the hardening report: dumpable and unwatched, and saying so",
        check="11a",
        expected=Code.ANTI_DEBUG_DISABLED,
        play=_with(_traceable),
    ),
    Attack(
        name="runtime state spoofed",
        changed="the state: released instead of measured",
        check="10",
        expected=Code.STATE_MISMATCH,
        play=_with(lambda claims: replace(claims, state=State.RELEASED)),
    ),
    Attack(
        name="anti-debug profile downgrade",
        changed="the profile: standard where the policy demands strict",
        check="11b",
        expected=Code.ANTI_DEBUG_DOWNGRADED,
        play=_with(_weaker),
    ),
    Attack(
        name="nonce replay",
        changed="nothing but the nonce: perfect evidence for a challenge that was answered before",
        check="2",
        expected=Code.NONCE_REPLAYED,
        play=_nonce_replay,
    ),
    Attack(
        name="JWT claim mismatch",
        changed="the launch token: a genuine one for the same launch key, but of another run",
        check="3",
        expected=Code.TOKEN_CLAIM,
        play=_token_claim_mismatch,
    ),
)

CONTROL = Attack(name="valid control", changed="nothing", check="", expected=None, play=_control)
