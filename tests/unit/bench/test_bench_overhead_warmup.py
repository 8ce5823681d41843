"""Measuring begins when the machine has settled, or says that it has not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from glasshouse.bench.overhead.analysis import analyse
from glasshouse.bench.overhead.blocks import replay
from glasshouse.bench.overhead.design import Phase, WarmupRule
from glasshouse.bench.overhead.estimate import Word, claim
from glasshouse.bench.overhead.slices import Record, SessionEnd, Slice
from glasshouse.bench.overhead.warmup import State, assess, changepoint, judge, theil_sen_slope
from glasshouse.errors import VerificationError
from simulators.simulate import World, make_design, run_world

SECOND = 10**9
RULE = WarmupRule(least_ns=30 * SECOND, cap_ns=300 * SECOND)
FLAT = [0.001, -0.001, 0.0005, -0.0005, 0.001, -0.001, 0.0005, -0.0005]


def test_theil_sen_by_hand() -> None:
    assert theil_sen_slope([0, 1, 2, 3]) == 1
    # Slopes 1, 1, 98/3 .. of (0,1,2,100): 1, 1, 98, 1, 49.5, 100/3; their median is (1 + 100/3)/2.
    assert theil_sen_slope([0, 1, 2, 100]) == pytest.approx((1 + 100 / 3) / 2)
    assert theil_sen_slope([5, 5, 5, 5, 5, 9]) == 0


def test_a_long_flat_warm_up_is_steady() -> None:
    found = assess(FLAT, 31 * SECOND, RULE)
    assert found.state is State.STEADY
    assert found.drift is not None
    assert abs(found.drift) < 0.005
    assert found.changepoint is None


def test_a_flat_but_short_warm_up_goes_on() -> None:
    assert assess(FLAT, 30 * SECOND - 1, RULE).state is State.WARMING
    assert assess(FLAT[:7], 31 * SECOND, RULE).state is State.WARMING
    assert assess(FLAT[:7], 31 * SECOND, RULE).drift is None


def test_a_drift_of_half_a_percent_over_the_window_goes_on_until_the_cap() -> None:
    rising = [0.00499 / 7 * index for index in range(8)]
    assert assess(rising, 31 * SECOND, RULE).state is State.STEADY
    rising = [0.005 / 7 * index + 1e-12 * index for index in range(8)]
    assert assess(rising, 31 * SECOND, RULE).state is State.WARMING
    assert assess(rising, 300 * SECOND, RULE).state is State.NO_STEADY_STATE
    assert assess([-value for value in rising], 31 * SECOND, RULE).state is State.WARMING


def test_only_the_window_counts() -> None:
    assert assess([1.0, 0.5, 0.2, *FLAT], 31 * SECOND, RULE).state is State.STEADY


def test_a_step_that_theil_sen_does_not_see_is_found() -> None:
    stepped = [*(value / 4 for value in FLAT[:6]), 0.03, 0.0305]
    found = assess(stepped, 31 * SECOND, RULE)
    assert found.drift is not None
    assert abs(found.drift) < 0.005
    assert (found.state, found.changepoint) == (State.WARMING, 6)


def test_a_step_that_is_certain_but_small_does_no_harm() -> None:
    assert changepoint([0, 0, 0, 0, 0.001, 0.001, 0.001, 0.001], least=0.005) is None
    assert changepoint([0, 0, 0, 0, 0.006, 0.006, 0.006, 0.006], least=0.005) == 4


def test_a_changepoint_by_hand() -> None:
    # Split 3|3 of (0,1,2,10,11,12): means 1 and 11, pooled variance 1, t = 10/sqrt(2/3) = 12.2 with 4 degrees of
    # freedom. Critical: t at 1 − 0.05/6 with 4 degrees of freedom is 3.96; splits 2|4 and 4|2 score less.
    assert changepoint([0, 1, 2, 10, 11, 12], least=1) == 3
    assert changepoint([0, 10, 2, 11, 1, 12], least=1) is None


def test_noise_alone_is_seldom_a_changepoint() -> None:
    rng = np.random.default_rng(3)
    found = sum(changepoint(rng.normal(0, 0.01, 8).tolist(), least=0.0) is not None for _ in range(1000))
    assert found <= 65


def test_the_verifier_replays_the_warm_up() -> None:
    design = make_design(sessions=1, blocks_per_session=4, warmup=RULE)
    records = run_world(World(noise=0.003), design, np.random.default_rng(5))
    (session,) = replay(design, records)
    found = judge(session.warmup, design.warmup)
    assert found.state is State.STEADY
    assert found.blocks == len(session.warmup) >= 8
    assert found.elapsed_ns >= RULE.least_ns
    assert analyse(design, records).unsteady == ()


def test_a_noisy_machine_is_flagged() -> None:
    design = make_design(
        sessions=1, blocks_per_session=4, warmup=WarmupRule(least_ns=SECOND, cap_ns=40 * SECOND, drift_ppm=1)
    )
    records = run_world(World(noise=0.03), design, np.random.default_rng(5))
    assert analyse(design, records).unsteady == (0,)


def test_a_machine_that_never_became_steady_is_not_called_equivalent() -> None:
    restless = WarmupRule(least_ns=SECOND, cap_ns=SECOND, drift_ppm=1)
    design = make_design(sessions=2, blocks_per_session=12, warmup=restless)
    found = analyse(design, run_world(World(overhead=0.0005, noise=0.0001), design, np.random.default_rng(5)))
    assert found.unsteady == (0, 1)
    assert found.claim is not None
    assert found.result is not None
    assert claim(found.result, margin=design.margin).word is Word.EQUIVALENT  # as far as its slices go
    assert found.claim.word is Word.OVERHEAD


def test_a_session_that_left_its_warm_up_early_is_refused() -> None:
    design = make_design(sessions=1, blocks_per_session=4, warmup=RULE)
    records: list[Record] = run_world(World(noise=0.003), design, np.random.default_rng(5))
    last = max(one.block for one in records if isinstance(one, Slice) and one.phase is Phase.WARMUP)
    shorter: list[Record] = []
    for one in records:
        if isinstance(one, SessionEnd):
            shorter.append(replace(one, warmup_blocks=one.warmup_blocks - 1))
        elif (one.phase, one.block) != (Phase.WARMUP, last):
            shorter.append(one)
    with pytest.raises(VerificationError, match="warmed up for"):
        analyse(design, shorter)


def test_a_clock_that_stood_still_starts_the_window_again() -> None:
    design = make_design(sessions=1, blocks_per_session=1, warmup=RULE)
    (session,) = replay(design, run_world(World(noise=0.003), design, np.random.default_rng(5)))
    blocks = list(session.warmup)
    still = replace(blocks[3].slices[0], t1_ns=blocks[3].slices[0].t0_ns)
    blocks[3] = replace(blocks[3], slices=(still, *blocks[3].slices[1:]))
    found = judge(blocks[:8], design.warmup)
    assert found.state is State.WARMING
    assert not math.isfinite(found.drift or math.inf)
