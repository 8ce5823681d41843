"""The attacks of groups: all machines of one are released to, or none is, whatever one of them tries.

In every attack the attacker holds the launch files of some machines of a group, which a true owner announced.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Self

from glasshouse.broker.client.owner_client import Reply
from glasshouse.errors import Code, InternalError
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.messages import Challenge
from glasshouse.tamper.attacks import Attack, attacks, send_edited
from glasshouse.tamper.stage import Actor, Owner, any_measurement
from glasshouse.wire.crypto import SigningKey

GROUP_RELEASES = 4
"""What the attacks' deployment may release: room for the largest group, twice over."""

_SHORT_S = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    """A machine of a group with perfect evidence in its hands."""

    actor: Actor
    challenge: Challenge
    evidence: bytes

    @classmethod
    def enter(cls, owner: Owner, launch: LaunchFile) -> Self:
        actor = Actor.enter(owner, launch)
        challenge = actor.challenge()
        return cls(actor=actor, challenge=challenge, evidence=actor.sign(actor.claims(challenge)))

    def wait(self) -> None:
        """Attest, and get the answer to wait for the others."""
        if self.actor.send(self.evidence).status != 202:
            raise InternalError(Code.INTERNAL, "a machine of a group was not answered to wait for the others")

    def ask(self) -> Reply:
        return self.actor.ask(self.challenge, self.evidence)


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


def _with_token_of(owner: Owner, mine: LaunchFile, other: LaunchFile) -> Reply:
    return send_edited(Actor.enter(owner, mine), lambda claims: replace(claims, token=other.token))


def _one_for_two(owner: Owner) -> Reply:
    first, second = (Actor.enter(owner, launch) for launch in owner.group(2))
    challenge = first.challenge()
    _Machine(actor=first, challenge=challenge, evidence=first.sign(first.claims(challenge))).wait()
    twin = replace(second, evidence=first.evidence)
    return twin.send(twin.sign(twin.claims(twin.challenge())))


def _control(owner: Owner) -> Reply:
    first, second = (_Machine.enter(owner, launch) for launch in owner.group(2))
    first.wait()
    replies = [(second, second.actor.send(second.evidence)), (first, first.ask())]
    for machine, reply in replies:
        if machine.actor.open(reply.content(), machine.challenge, machine.evidence) != owner.package_key:
            raise InternalError(Code.INTERNAL, "the broker released another key than the package's")
    return replies[-1][1]


_CHANGED = {
    "group: a patched machine": "the measurement of one machine; another asks for the release that it was waiting for",
    "group: a missing machine": "nothing: one of three machines never comes, and the others ask until the deadline",
    "group: another's place": "the launch token: a genuine one for the same key, of another machine of the group",
    "group: another group's token": "the launch token: a genuine one for the same key and place, of an earlier group",
    "group: one runtime as two": "the evidence key: one machine's, named by another, so that one of them suffices",
}
GROUP_ATTACKS = attacks(
    _CHANGED,
    {
        "group: a patched machine": ("14", Code.RANK_REFUSED, _another_measurement),
        "group: a missing machine": ("14", Code.RANK_REFUSED, _missing),
        "group: another's place": ("3", Code.TOKEN_CLAIM, _another_index),
        "group: another group's token": ("3", Code.TOKEN_CLAIM, _another_group),
        "group: one runtime as two": ("13", Code.RELEASE_BUDGET, _one_for_two),
    },
)

GROUP_CONTROL = Attack(
    name="valid group", changed="nothing: two machines", check="", expected=None, play=_control, counted=2
)
