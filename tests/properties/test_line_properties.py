"""A line never goes on twice, whatever befalls machines, answers, owners and the gate's database."""

from __future__ import annotations

import pytest
from hypothesis import settings

from simulators.line_model import Model, Protections, forked, played
from simulators.line_under_fire import LineUnderFire

EVENTS = 6


def test_no_schedule_of_six_events_forks_a_line() -> None:
    worlds = played(Model(), EVENTS)
    assert worlds.total() == 8**EVENTS == 262_144
    assert forked(worlds) == {}
    furthest = max(worlds, key=lambda world: len(world.tickets) + len(world.releases))
    assert len(furthest.tickets) >= 4, "the model is of something that goes on"


@pytest.mark.parametrize(
    ("without", "fork"),
    [
        (Protections(fencing=False), "a leg that went on although the next had begun"),
        (Protections(tickets=False), "one leg, two machines"),
        (Protections(tickets=False), "two checkpoints of one number"),
        (Protections(tickets=False), "two legs that went on from one checkpoint"),
        (Protections(beside=False), "one leg, two machines"),
    ],
)
def test_without_any_of_its_protections_some_schedules_fork_it(without: Protections, fork: str) -> None:
    assert forked(played(Model(without), 4))[fork] > 0


TestLineUnderFire = LineUnderFire.TestCase
TestLineUnderFire.settings = settings(max_examples=12, stateful_step_count=20, deadline=None, database=None)
