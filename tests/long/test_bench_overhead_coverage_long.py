"""Coverage, power and size of the estimator over many simulated runs of known truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from glasshouse.bench.overhead.analysis import analyse
from glasshouse.bench.overhead.blocks import replay
from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.estimate import Word, claim, estimate
from glasshouse.bench.overhead.interval import detectable
from glasshouse.bench.overhead.sensitivity import ordinary_least_squares, randomisation_test
from simulators.simulate import NO_WARMUP, World, contrast_sets, legs, make_design, naive_interval, run_world

pytestmark = pytest.mark.long

RUNS = 4000
WORLDS = {
    "noise": World(),
    "drift and step": World(drift=0.05, steps=1, step_size=0.05),
    "three steps": World(steps=3, step_size=0.05),
    "interference of a block's period": World(wave=0.03, period=4),
    "interference": World(wave=0.03, period=7.3),
    "slow interference": World(wave=0.03, period=31),
    "spikes": World(spikes=0.05),
    "process pairs": World(pair_sd=0.003),
    "all": World(drift=0.05, steps=1, step_size=0.05, wave=0.01, spikes=0.02, pair_sd=0.003),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(("sessions", "blocks"), [(12, 20), (3, 20), (1, 40)])
def test_the_interval_holds_the_truth(name: str, sessions: int, blocks: int) -> None:
    # On the log scale a planted overhead shifts every contrast alike, so one size stands for all; whole artifacts with
    # each size are below.
    world = replace(WORLDS[name], overhead=0.005)
    if sessions == 1:
        # Blocks of one pair cannot tell its effect from protection's; what is held is the truth for that pair.
        world = replace(world, pair_sd=0.0)
    rng = np.random.default_rng(11)
    held = 0
    for run in range(RUNS):
        found = estimate(contrast_sets(world, make_design(run, sessions=sessions, blocks_per_session=blocks), rng))
        wide = found.interval()
        assert wide is not None
        held += wide.holds(world.overhead)
    # 0.95 less four standard errors of the simulation; trimming makes heavy tails conservative.
    assert 0.936 <= held / RUNS <= 0.99


@pytest.mark.parametrize("first", list(Arm))
def test_a_sequential_pair_does_not(first: Arm) -> None:
    rng = np.random.default_rng(12)
    found = [naive_interval(*legs(WORLDS["drift and step"], rng, slices=80, first=first)) for _ in range(RUNS)]
    assert sum(low <= 0 <= high for low, high in found) / RUNS < 0.15


def test_an_effect_as_large_as_said_is_seen_four_times_in_five() -> None:
    world = World(pair_sd=0.003)
    rng = np.random.default_rng(13)
    errors = [estimate(contrast_sets(world, make_design(run), rng)).mean for run in range(500)]
    size = float(np.sqrt(np.mean([error.standard_error**2 for error in errors if error is not None])))
    mean = errors[0]
    assert mean is not None
    effect = detectable(replace(mean, standard_error=size))
    planted = replace(world, overhead=effect)
    seen = 0
    for run in range(RUNS):
        wide = estimate(contrast_sets(planted, make_design(run), rng)).interval()
        seen += wide is not None and wide.low > 0
    assert seen / RUNS == pytest.approx(0.8, abs=0.04)


def test_equivalence_at_the_margin_is_claimed_one_time_in_twenty_at_most() -> None:
    world = World(overhead=0.005)
    rng = np.random.default_rng(14)
    words = [claim(estimate(contrast_sets(world, make_design(run), rng)), margin=0.005).word for run in range(RUNS)]
    assert words.count(Word.EQUIVALENT) / RUNS <= 0.065


def test_a_null_machine_is_called_biased_one_time_in_forty() -> None:
    rng = np.random.default_rng(15)
    words = [claim(estimate(contrast_sets(World(), make_design(run), rng)), margin=0.001).word for run in range(RUNS)]
    assert words.count(Word.BIAS_SUSPECTED) / RUNS == pytest.approx(0.025, abs=0.011)
    assert words.count(Word.OVERHEAD) / RUNS <= 0.035


def test_the_sensitivity_set_has_its_size() -> None:
    world = World(drift=0.05, steps=1, step_size=0.05)
    runs, low, held = 300, 0, 0
    for run in range(runs):
        design = make_design(run, sessions=1, blocks_per_session=30, warmup=NO_WARMUP)
        blocks = [
            list(session.included) for session in replay(design, run_world(world, design, np.random.default_rng(run)))
        ]
        low += randomisation_test(blocks, seed=design.seed, draws=199).p <= 0.05
        squares = ordinary_least_squares(blocks)
        assert squares is not None
        held += squares.interval(0.95).holds(0.0)
    assert 0.01 <= low / runs <= 0.1
    assert held / runs >= 0.9


@pytest.mark.parametrize("overhead", [0.0, 0.005, 0.02])
def test_whole_artifacts_hold_the_truth(overhead: float) -> None:
    runs, held = 60, 0
    for run in range(runs):
        design = make_design(run, sessions=12, blocks_per_session=8)
        world = World(overhead=overhead, noise=0.003, pair_sd=0.002)
        found = analyse(design, run_world(world, design, np.random.default_rng(run))).result
        assert found is not None
        wide = found.interval()
        held += wide is not None and wide.holds(overhead)
    assert held / runs >= 0.85
