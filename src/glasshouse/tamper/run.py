"""Tell every story to one live broker, and read its own release counter after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from glasshouse.errors import Code
from glasshouse.tamper.groups import GROUP_CONTROL, GROUP_RELEASES, GROUP_STORIES
from glasshouse.tamper.stage import Owner, stage
from glasshouse.tamper.stories import CONTROL, STORIES, Story
from glasshouse.wire.canonical import Json

__all__ = ["Row", "run_stories"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of one story.

    Attributes:
        story, changed: its name, and what the attacker changed.
        expected_check, actual_check: number of the check that must refuse, and that did; empty for none.
        expected, actual: the codes; None means a release.
        released: whether the broker answered with a release.
        counter_before, counter_after: the broker's own release counter.
        counted: by how much a release moves it.
    """

    story: str
    changed: str
    expected_check: str
    actual_check: str
    expected: Code | None
    actual: Code | None
    released: bool
    counter_before: int
    counter_after: int
    counted: int = 1

    @property
    def held(self) -> bool:
        """Whether it went as it must: refused by this check and no other, nothing counted; or released, and counted."""
        moved = self.counter_after - self.counter_before
        same = (self.expected, self.expected_check) == (self.actual, self.actual_check)
        return same and self.released is (self.expected is None) and moved == (self.counted if self.released else 0)

    def to_json(self) -> dict[str, Json]:
        return {
            "actual": None if self.actual is None else self.actual.value,
            "actual_check": self.actual_check,
            "changed": self.changed,
            "counter_after": self.counter_after,
            "counter_before": self.counter_before,
            "expected": None if self.expected is None else self.expected.value,
            "expected_check": self.expected_check,
            "held": self.held,
            "released": self.released,
            "story": self.story,
        }


def run_stories(told: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """Tell the stories of one runtime and those of groups, and then both controls.

    Args:
        told: called with each row as soon as it is known.

    Raises:
        PeerError: the broker does not start or does not answer as a broker does.
    """
    rows: list[Row] = []
    with stage() as owner:
        groups = owner.another(releases=GROUP_RELEASES)
        one, several = [(owner, story) for story in STORIES], [(groups, story) for story in GROUP_STORIES]
        for who, story in (*one, *several, (owner, CONTROL), (groups, GROUP_CONTROL)):
            rows.append(_row(who, story))
            told(rows[-1])
    return rows


def _row(owner: Owner, story: Story) -> Row:
    before = owner.releases()
    reply = story.tell(owner)
    problem = reply.problem() if reply.status >= 400 else None  # who is told to wait was not refused, nor released to
    return Row(
        story=story.name,
        changed=story.changed,
        expected_check=story.check,
        actual_check="" if problem is None else problem.check,
        expected=story.expected,
        actual=None if problem is None else problem.code,
        released=reply.status == 200,
        counter_before=before,
        counter_after=owner.releases(),
        counted=story.counted,
    )
