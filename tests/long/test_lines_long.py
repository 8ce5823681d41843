"""Lines for longer: more events in a row, and more of what befalls the real gate."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from simulators.line_model import Model, forked, played
from simulators.line_under_fire import LineUnderFire


def test_no_schedule_of_seven_events_forks_a_line() -> None:
    worlds = played(Model(), 7)
    assert worlds.total() == 8**7
    assert forked(worlds) == {}


class LineUnderLongFire(LineUnderFire):
    """The same, for longer."""


TestLineUnderLongFire = LineUnderLongFire.TestCase
TestLineUnderLongFire.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
