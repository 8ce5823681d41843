"""Machines of one group before the gate, each with the challenge that it answered last."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glasshouse.broker.client.owner_client import Reply
from glasshouse.handshake.messages import Challenge, Pending
from glasshouse.tamper.stage import Actor, Owner

__all__ = ["Machine", "group", "group_id", "pending"]


@dataclass
class Machine:
    """One machine of a group, and the last challenge that it answered."""

    actor: Actor
    challenge: Challenge
    evidence: bytes

    @classmethod
    def enter(cls, actor: Actor) -> Machine:
        challenge = actor.challenge()
        # By the broker's clock, which some stories move on.
        times = {"issued_us": challenge.issued_us, "started_us": challenge.issued_us}
        return cls(actor, challenge, actor.sign(replace(actor.claims(challenge), **times)))

    def again(self) -> Machine:
        """The same runtime, with the same keys, answers a new challenge."""
        return Machine.enter(self.actor)

    def attest(self) -> Reply:
        return self.actor.send(self.evidence)

    def ask(self) -> Reply:
        return self.actor.ask(self.challenge, self.evidence)

    def key(self, reply: Reply) -> bytes:
        return self.actor.open(reply.content(), self.challenge, self.evidence)


def group(owner: Owner, machines: int) -> list[Machine]:
    return [Machine.enter(Actor.enter(owner, launch)) for launch in owner.group(machines)]


def group_id(machine: Machine) -> bytes:
    place = machine.actor.launch.claims().group
    assert place is not None
    return place.id


def pending(reply: Reply) -> Pending:
    assert reply.status == 202
    return Pending.parse(reply.body)
