"""Plays every attack against one live broker, and reads its own release counter after each."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.errors import Code
from glasshouse.tamper.attacks import ATTACKS, CONTROL, Attack
from glasshouse.tamper.group_attacks import GROUP_ATTACKS, GROUP_CONTROL, GROUP_RELEASES
from glasshouse.tamper.stage import Owner, stage
from glasshouse.wire.canonical import Json


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
        """Whether it went as it must: refused by this check and no other, nothing counted; or released, and counted."""
        attack, moved = self.attack, self.counter_after - self.counter_before
        same = (attack.expected, attack.check) == (self.actual, self.actual_check)
        must = attack.expected is None
        return same and self.released is must and moved == (attack.counted if must else 0)

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
    """Play the attacks of one runtime and those of groups, and then both controls.

    Raises:
        PeerError: the broker does not start or does not answer as a broker does.
    """
    with stage() as owner:
        groups = owner.another(releases=GROUP_RELEASES)
        one, several = [(owner, attack) for attack in ATTACKS], [(groups, attack) for attack in GROUP_ATTACKS]
        return [play(*each) for each in (*one, *several, (owner, CONTROL), (groups, GROUP_CONTROL))]


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
