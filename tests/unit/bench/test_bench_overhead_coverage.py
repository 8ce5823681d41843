"""The 95 % interval holds the truth about 95 times in a hundred on simulated machines whose truth is known.

Short runs of what tests/long does at length; the bounds are four standard errors of the simulation wide.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.estimate import estimate
from simulators.simulate import World, contrast_sets, legs, make_design, naive_interval

RUNS = 300
LEAST = 0.95 - 4 * math.sqrt(0.95 * 0.05 / RUNS)
DRIFTING = {"drift": 0.05, "steps": 1, "step_size": 0.05, "noise": 0.01}


def _coverage(world: World, *, sessions: int, blocks: int) -> tuple[float, float]:
    """Return how often the interval held the truth, and the mean error of the estimate."""
    rng = np.random.default_rng(2)
    held, errors = 0, []
    for run in range(RUNS):
        found = estimate(contrast_sets(world, make_design(run, sessions=sessions, blocks_per_session=blocks), rng))
        wide = found.interval()
        assert wide is not None
        held += wide.holds(world.overhead)
        errors.append(found.log_ratio - world.overhead)
    return held / RUNS, float(np.mean(errors))


@pytest.mark.parametrize(
    "world",
    [
        World(overhead=0.005),
        World(**DRIFTING),
        World(overhead=0.005, **DRIFTING),
        World(overhead=0.02, **DRIFTING),
        World(overhead=0.02, wave=0.02),
        World(overhead=0.005, spikes=0.05),
        World(overhead=0.02, pair_sd=0.005),
    ],
)
def test_twelve_sessions_hold_the_truth(world: World) -> None:
    held, bias = _coverage(world, sessions=12, blocks=10)
    assert held >= LEAST
    assert abs(bias) < 0.001


def test_one_session_holds_the_truth_of_its_own_process_pair() -> None:
    held, _ = _coverage(World(**DRIFTING), sessions=1, blocks=40)
    assert held >= LEAST


def test_one_session_misses_the_truth_of_other_process_pairs() -> None:
    held, _ = _coverage(World(pair_sd=0.005, noise=0.01), sessions=1, blocks=40)
    assert held < 0.7


@pytest.mark.parametrize(("first", "bias"), [(Arm.RAW, 0.025), (Arm.PROTECTED, -0.025)])
def test_a_sequential_pair_measures_drift_where_interleaved_blocks_measure_protection(first: Arm, bias: float) -> None:
    rng = np.random.default_rng(3)
    world = World(**DRIFTING)
    found = [naive_interval(*legs(world, rng, slices=80, first=first)) for _ in range(RUNS)]
    assert sum(low <= 0 <= high for low, high in found) / RUNS < 0.2
    assert np.mean(found) == pytest.approx(bias, abs=0.006)
    held, interleaved = _coverage(world, sessions=1, blocks=40)
    assert held >= LEAST
    assert abs(interleaved) < 0.001
