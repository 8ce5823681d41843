"""Attacks on a live gate and their controls: what the attacker changes, which check must notice, and whether it did.

In every attack the attacker holds a stolen launch file, or those of some machines of a group that a true owner
announced: they can ask for challenges, and sign what they make up with the launch key and with an evidence key of
their own. The broker's own release counter is read after each.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from glasshouse.attestation.claims import CheckResult, Claims, composite
from glasshouse.attestation.evidence import EVIDENCE_TYPE, Evidence
from glasshouse.broker.client.owner_client import Reply
from glasshouse.errors import Code, InternalError
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.messages import Challenge
from glasshouse.tamper.hardware_attacks import HARDWARE_ATTACKS, one_tpm
from glasshouse.tamper.line_attacks import LINE_ATTACKS, goes_on
from glasshouse.tamper.stage import Actor, Owner, any_measurement, stage
from glasshouse.tamper.tpm_stage import StagedTpm, TpmMaker
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import State

_HOUR_US = 3600 * 1_000_000
_SHORT_S = 2
# What the attacks' deployment may release to groups: room for the largest, twice over.
GROUP_RELEASES = 4
LINE_RELEASES = 13
_Play: TypeAlias = Callable[[Owner], Reply]


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack."""

    name: str  # what it is called
    changed: str  # what the attacker changed, in words
    check: str  # the number of the check that must notice; empty for a control
    expected: Code | None  # the code that must come back; None for a control
    play: _Play  # plays it against the owner's broker and returns the broker's last answer
    counted: int = 0  # by how much it moves the broker's counter


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    """A machine with perfect evidence in its hands."""

    actor: Actor
    challenge: Challenge
    evidence: bytes

    @classmethod
    def enter(cls, owner: Owner, launch: LaunchFile | None = None) -> Self:
        actor = Actor.enter(owner, launch)
        challenge = actor.challenge()
        return cls(actor=actor, challenge=challenge, evidence=actor.sign(actor.claims(challenge)))

    def wait(self) -> None:
        """Attest, and get the answer to wait for the others of its group."""
        if self.actor.send(self.evidence).status != 202:
            raise InternalError(Code.INTERNAL, "a machine of a group was not answered to wait for the others")

    def ask(self) -> Reply:
        return self.actor.ask(self.challenge, self.evidence)

    def open(self, reply: Reply) -> None:
        """See that the broker released the package's key."""
        if self.actor.open(reply.content(), self.challenge, self.evidence) != self.actor.owner.package_key:
            raise InternalError(Code.INTERNAL, "the broker released another key than the package's")


def _with(edit: Callable[[Claims], Claims]) -> _Play:
    """Return the attack that sends perfect claims, edited, with a true composite and both signatures."""
    return lambda owner: _send_edited(Actor.enter(owner), edit)


def _send_edited(actor: Actor, edit: Callable[[Claims], Claims]) -> Reply:
    return actor.send(actor.sign(edit(actor.claims(actor.challenge()))))


def _with_token_of(owner: Owner, mine: LaunchFile, other: LaunchFile) -> Reply:
    return _send_edited(Actor.enter(owner, mine), lambda claims: replace(claims, token=other.token))


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
    return _with_token_of(owner, stolen, owner.launch(key=stolen.key()))


def _one_runtime(owner: Owner) -> Reply:
    machine = _Machine.enter(owner)
    reply = machine.actor.send(machine.evidence)
    machine.open(reply)
    return reply


def _another_measurement(owner: Owner) -> Reply:
    first, second = (_Machine.enter(owner, launch) for launch in owner.group(2))
    first.wait()
    patched = replace(second.actor.claims(second.challenge), measurement=any_measurement())
    if second.actor.send(second.actor.sign(patched)).problem().code is not Code.MEASUREMENT_UNKNOWN:
        raise InternalError(Code.INTERNAL, "a runtime without a reference was not refused for that")
    return first.ask()


def _missing(owner: Owner) -> Reply:
    # The deadline is the end of the first challenge that was answered, and no challenge outlives its token.
    places = owner.client().add_group(owner.deployment, machines=3, ranks=1)
    lives = (_SHORT_S, 600)
    launches = [owner.launch(group=place, lifetime_s=life) for place, life in zip(places, lives, strict=False)]
    short, long = (_Machine.enter(owner, launch) for launch in launches)
    short.wait()
    long.wait()
    while (reply := long.ask()).status == 202:
        time.sleep(0.1)
    return reply


def _another_index(owner: Owner) -> Reply:
    key = SigningKey.generate()
    places = owner.client().add_group(owner.deployment, machines=2, ranks=1)
    mine, other = (owner.launch(key=key, group=place) for place in places)
    return _with_token_of(owner, mine, other)


def _another_group(owner: Owner) -> Reply:
    key, client = SigningKey.generate(), owner.client()
    places = [client.add_group(owner.deployment, machines=2, ranks=1)[0] for _ in range(2)]
    earlier, mine = (owner.launch(key=key, group=place) for place in places)
    return _with_token_of(owner, mine, earlier)


def _one_for_two(owner: Owner) -> Reply:
    first, second = (_Machine.enter(owner, launch) for launch in owner.group(2))
    first.wait()
    twin = replace(second.actor, evidence=first.actor.evidence)
    return twin.send(twin.sign(twin.claims(twin.challenge())))


def _two_machines(owner: Owner) -> Reply:
    first, second = (_Machine.enter(owner, launch) for launch in owner.group(2))
    first.wait()
    replies = [(second, second.actor.send(second.evidence)), (first, first.ask())]
    for machine, reply in replies:
        machine.open(reply)
    return replies[-1][1]


_CHANGED = {
    "composite hash mismatch": "the environment digest, after the composite over the claims was made",
    "manifest hash mismatch": "the manifest hash: a package that the deployment is not for",
    "container id mismatch": "the container id: the launch file was carried to another container",
    "stale timestamp": "the times: claims made an hour before the challenge",
    "anti-debug disabled": "the hardening report: dumpable and unwatched, as it reports",
    "runtime state spoofed": "the state: released instead of measured",
    "anti-debug profile downgrade": "the profile: standard where the policy demands strict",
    "nonce replay": "nothing but the nonce: perfect evidence for a challenge that was answered before",
    "JWT claim mismatch": "the launch token: a genuine one for the same launch key, but of another run",
    "group: a patched machine": "the measurement of one machine; another asks for the release that it was waiting for",
    "group: a missing machine": "nothing: one of three machines never comes, and the others ask until the deadline",
    "group: another's place": "the launch token: a genuine one for the same key, of another machine of the group",
    "group: another group's token": "the launch token: a genuine one for the same key and place, of an earlier group",
    "group: one runtime as two": "the evidence key: one machine's, named by another, so that one of them suffices",
}


def _attacks(refused: Mapping[str, tuple[str, Code, _Play]]) -> tuple[Attack, ...]:
    """Return attacks by name: each with the check that must notice, its code and the play."""
    return tuple(Attack(name, _CHANGED[name], *row) for name, row in refused.items())


ATTACKS = _attacks(
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
    }
)
CONTROL = Attack("valid control", "nothing", "", None, _one_runtime, counted=1)
GROUP_ATTACKS = _attacks(
    {
        "group: a patched machine": ("14", Code.RANK_REFUSED, _another_measurement),
        "group: a missing machine": ("14", Code.RANK_REFUSED, _missing),
        "group: another's place": ("3", Code.TOKEN_CLAIM, _another_index),
        "group: another group's token": ("3", Code.TOKEN_CLAIM, _another_group),
        "group: one runtime as two": ("13", Code.RELEASE_BUDGET, _one_for_two),
    }
)
LINES = tuple(Attack(name, *row) for name, row in LINE_ATTACKS.items())
HARDWARE = tuple(Attack(name, *row) for name, row in HARDWARE_ATTACKS.items())
HARDWARE_CONTROL = Attack("valid TPM", "nothing", "", None, one_tpm, counted=1)
LINE_CONTROL = Attack("valid line", "nothing: the next leg, from what was counted", "", None, goes_on, counted=1)
GROUP_CONTROL = Attack("valid group", "nothing: two machines", "", None, _two_machines, counted=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttackResult:
    """The broker's answer to one attack."""

    attack: Attack
    actual_check: str  # number of the check that refused; empty for none
    actual: Code | None  # the code; None for a release
    released: bool  # whether the broker answered with a release
    counter_before: int  # the broker's own release counter
    counter_after: int

    @property
    def held(self) -> bool:
        """Whether it went as it must: refused by this check and no other, or released; and what was counted."""
        attack, moved = self.attack, self.counter_after - self.counter_before
        same = (attack.expected, attack.check) == (self.actual, self.actual_check)
        must = attack.expected is None
        return same and self.released is must and moved == attack.counted

    def to_json(self) -> dict[str, Json]:
        """Return the row of `glasshouse tamper --json`."""
        return {
            "actual": self.actual,
            "actual_check": self.actual_check,
            "changed": self.attack.changed,
            "counter_after": self.counter_after,
            "counter_before": self.counter_before,
            "expected": self.attack.expected,
            "expected_check": self.attack.check,
            "held": self.held,
            "released": self.released,
            "story": self.attack.name,
        }


def run_attacks() -> list[AttackResult]:
    """Play all attacks, then the controls; raises `PeerError` without a broker."""
    with stage() as owner:
        groups, lines = owner.another(releases=GROUP_RELEASES), owner.another(releases=LINE_RELEASES)
        machines = owner.another(releases=1, tpm=StagedTpm(maker=TpmMaker(), boot=b"the owner's image"))
        one, several = [(owner, attack) for attack in ATTACKS], [(groups, attack) for attack in GROUP_ATTACKS]
        several += [(lines, attack) for attack in LINES] + [(machines, attack) for attack in HARDWARE]
        controls = (owner, CONTROL), (groups, GROUP_CONTROL), (lines, LINE_CONTROL), (machines, HARDWARE_CONTROL)
        return [play(*each) for each in (*one, *several, *controls)]


def play(owner: Owner, attack: Attack) -> AttackResult:
    """Play one attack against an owner's broker."""
    before = owner.releases()
    reply = attack.play(owner)
    # A machine of a group that waits for the others was not refused, and nothing was released to it.
    problem = reply.problem() if reply.status >= 400 else None
    return AttackResult(
        attack=attack,
        actual_check="" if problem is None else problem.check,
        actual=None if problem is None else problem.code,
        released=reply.status == 200,
        counter_before=before,
        counter_after=owner.releases(),
    )
