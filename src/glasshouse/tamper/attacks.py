"""The nine attacks of one runtime, and their control: what the attacker changes, and which check must notice.

In every attack the attacker holds a stolen launch file: they can ask for challenges, and sign what they make up with
the launch key and with an evidence key of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

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
_Play: TypeAlias = Callable[[Owner], Reply]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One attack."""

    name: str  # what it is called
    changed: str  # what the attacker changed, in words
    check: str  # the number of the check that must notice; empty for the control
    expected: Code | None  # the code that must come back; None for the control
    play: _Play  # plays it against the owner's broker and returns the broker's last answer
    counted: int = 1  # by how much a release moves the broker's counter


def _with(edit: Callable[[Claims], Claims]) -> _Play:
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


def attacks(changed: Mapping[str, str], refused: Mapping[str, tuple[str, Code, _Play]]) -> tuple[Attack, ...]:
    """Return attacks, by what the attacker changed, and by the check that must notice, its code and the play."""
    return tuple(
        Attack(name=name, changed=changed[name], check=check, expected=expected, play=play)
        for name, (check, expected, play) in refused.items()
    )


_CHANGED = {
    "composite hash mismatch": "the environment digest, after the composite over the claims was made",
    "manifest hash mismatch": "the manifest hash: a package that the deployment is not for",
    "container id mismatch": "the container id: the launch file was carried to another container",
    "stale timestamp": "the times: claims made an hour before the challenge",
    "anti-debug disabled": "the hardening report: dumpable and unwatched, and saying so",
    "runtime state spoofed": "the state: released instead of measured",
    "anti-debug profile downgrade": "the profile: standard where the policy demands strict",
    "nonce replay": "nothing but the nonce: perfect evidence for a challenge that was answered before",
    "JWT claim mismatch": "the launch token: a genuine one for the same launch key, but of another run",
}
ATTACKS = attacks(
    _CHANGED,
    {
        "composite hash mismatch": ("9", Code.COMPOSITE_MISMATCH, _composite_mismatch),
        "manifest hash mismatch": (
            "6",
            Code.MANIFEST_MISMATCH,
            _with(lambda claims: replace(claims, manifest_sha256=secrets.token_bytes(32))),
        ),
        "container id mismatch": (
            "7",
            Code.CONTAINER_MISMATCH,
            _with(lambda claims: replace(claims, container_id="another-container")),
        ),
        "stale timestamp": ("5", Code.EVIDENCE_STALE, _with(_stale)),
        "anti-debug disabled": ("11a", Code.ANTI_DEBUG_DISABLED, _with(_traceable)),
        "runtime state spoofed": (
            "10",
            Code.STATE_MISMATCH,
            _with(lambda claims: replace(claims, state=State.RELEASED)),
        ),
        "anti-debug profile downgrade": ("11b", Code.ANTI_DEBUG_DOWNGRADED, _with(_weaker)),
        "nonce replay": ("2", Code.NONCE_REPLAYED, _nonce_replay),
        "JWT claim mismatch": ("3", Code.TOKEN_CLAIM, _token_claim_mismatch),
    },
)
CONTROL = Attack(name="valid control", changed="nothing", check="", expected=None, play=_control)
