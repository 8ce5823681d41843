"""From a job's speed and the time there is to designs; and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from glasshouse.bench.harness.plan import Calibration, Wish, calibrate, plan
from glasshouse.bench.overhead.design import Arm, Mode
from glasshouse.errors import Code, RunError, UsageError
from glasshouse.wire import pacing
from simulators.paced_arms import PacedWorld

FAST = Calibration(start_s=3.0, step_ns=5e6)
SEED = bytes(32)


def _wish(**changes: Any) -> Wish:
    values: dict[str, Any] = {"mode": "interleaved", "seed": SEED}
    return Wish(**(values | changes))


def test_ten_minutes_are_several_sessions_of_both_kinds() -> None:
    found = plan(_wish(time_s=600), FAST, spent_s=10)
    headline, null = found.designs[Mode.INTERLEAVED], found.designs[Mode.NULL]
    assert headline.sessions >= 4
    assert null.sessions >= 2
    assert headline.blocks_per_session >= 6
    assert 450 <= found.expected_s <= 600
    assert headline.seed == null.seed == SEED


@pytest.mark.parametrize("step_ns", [4e4, 5e6, 1e8, 1.9e9])
@pytest.mark.parametrize("time_s", [300, 600, 3600])
def test_slices_are_of_half_a_second_to_two(step_ns: float, time_s: int) -> None:
    found = plan(_wish(time_s=max(time_s, step_ns / 1e9 * 1500)), Calibration(start_s=1.0, step_ns=step_ns))
    for design in found.designs.values():
        assert design.slice_steps is not None
        assert 0.5e9 <= design.slice_steps * step_ns <= 2.0e9
        assert design.warmup.cap_ns >= design.warmup.least_ns
    assert found.guard_steps * step_ns >= 0.3e9
    assert found.guard_steps >= 3


def test_more_time_is_first_of_all_more_sessions() -> None:
    numbers = [plan(_wish(time_s=time_s), FAST).designs[Mode.INTERLEAVED].sessions for time_s in (300, 600, 3600)]
    assert numbers == sorted(numbers)
    assert numbers[-1] >= 12


def test_sessions_and_blocks_can_be_named() -> None:
    found = plan(_wish(sessions=3, blocks=7), FAST)
    assert {(one.sessions, one.blocks_per_session) for one in found.designs.values()} == {(3, 7)}


def test_all_has_all_three_parts() -> None:
    assert list(plan(_wish(mode="all", time_s=900), FAST).designs) == [Mode.INTERLEAVED, Mode.NULL, Mode.SEQUENTIAL]


@pytest.mark.parametrize("mode", ["interleaved", "null", "sequential", "all"])
def test_too_short_a_time_for_one_block_is_refused_with_what_is_needed(mode: str) -> None:
    with pytest.raises(UsageError, match=r"too short a time for one (block|pair).* (s|min)") as caught:
        plan(_wish(mode=mode, time_s=20), FAST)
    assert caught.value.code is Code.USAGE


def test_what_is_said_to_be_needed_is_enough() -> None:
    for mode in ("interleaved", "null"):
        least = next(time_s for time_s in range(20, 600, 5) if _fits(mode, time_s))
        assert _fits(mode, least + 60)


def _fits(mode: str, time_s: int) -> bool:
    try:
        return all(one.blocks_per_session >= 1 for one in plan(_wish(mode=mode, time_s=time_s), FAST).designs.values())
    except UsageError:
        return False


def test_a_step_slower_than_a_slice_may_be_is_refused_and_goes_sequentially() -> None:
    slow = Calibration(start_s=3.0, step_ns=2.5e9)
    with pytest.raises(UsageError, match=r"2\.50 s"):
        plan(_wish(time_s=3600), slow)
    design = plan(_wish(mode="sequential", time_s=3600), slow).designs[Mode.SEQUENTIAL]
    assert design.leg_ns is not None


def test_sequential_pairs_come_in_both_orders() -> None:
    design = plan(_wish(mode="sequential", time_s=600), FAST).designs[Mode.SEQUENTIAL]
    assert design.sessions == 4
    assert {design.launched_first(number) for number in range(4)} == set(Arm)
    assert design.warmup.least_ns == 5 * 10**9
    steps = plan(_wish(mode="sequential", sessions=2, steps=1000), FAST).designs[Mode.SEQUENTIAL]
    assert (steps.slice_steps, steps.leg_ns) == (1000, None)


def test_a_job_is_timed_by_its_own_steps() -> None:
    world = PacedWorld(step_ns=7_000_000)
    found = calibrate(world.arms(Arm.RAW))
    assert found.step_ns == pytest.approx(7e6, rel=1e-3)
    assert found.start_s == 2.0


def test_a_job_that_cannot_be_timed_says_why() -> None:
    def ends(_arm: Arm, _number: int, _report: pacing.Slice) -> pacing.Slice:
        raise RunError(Code.NONFINITE_LOSS, "the loss of step 3 is not a finite number")

    with pytest.raises(RunError, match="step 3"):
        calibrate(PacedWorld(misfortune=ends).arms(Arm.RAW))
