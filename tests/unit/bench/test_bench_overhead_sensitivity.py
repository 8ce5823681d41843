"""Other estimators on the same slices agree where they should, and the seed alone decides what they draw."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from glasshouse.bench.overhead.blocks import Block, Session, replay
from glasshouse.bench.overhead.design import LaunchOrder, Phase
from glasshouse.bench.overhead.estimate import block_contrast, contrasts, estimate
from glasshouse.bench.overhead.sensitivity import (
    block_bootstrap,
    launch_effect,
    ordinary_least_squares,
    randomisation_test,
    sensitivity,
    untrimmed,
)
from simulators.simulate import NO_WARMUP, World, make_design, run_world, swap_session

WORLD = World(overhead=0.02, drift=0.05, steps=1, step_size=0.03, noise=0.005)


def _sessions(world: World = WORLD, *, sessions: int = 3, blocks: int = 12, seed: int = 4) -> tuple[Session, ...]:
    design = make_design(sessions=sessions, blocks_per_session=blocks, warmup=NO_WARMUP)
    return replay(design, run_world(world, design, np.random.default_rng(seed)))


def _blocks(sessions: Sequence[Session]) -> list[list[Block]]:
    return [list(session.included) for session in sessions]


def _made(*ways: str, effect: float, position: Sequence[float]) -> list[Block]:
    """Return noiseless blocks with an arm effect and position effects."""
    (session,) = _sessions(sessions=1, blocks=len(ways))
    found = []
    for index, way in enumerate(ways):
        times = [10**9 * math.exp(position[at] + 0.1 * index + effect * (arm == "P")) for at, arm in enumerate(way)]
        slices = tuple(
            replace(one, t0_ns=0, t1_ns=round(time)) for one, time in zip(session.blocks[0].slices, times, strict=True)
        )
        found.append(Block(session=0, index=index, phase=Phase.MEASURED, sequence=way, slices=slices, broken=()))
    return found


def test_least_squares_finds_the_arm_beside_position_and_block() -> None:
    blocks = _made("RPPR", "PRRP", "RRPP", "PPRR", "RRPP", effect=0.02, position=[0, 0.03, -0.01, 0.08])
    for carryover in (False, True):
        found = ordinary_least_squares([blocks], carryover=carryover)
        assert found is not None
        assert found.value == pytest.approx(0.02, abs=1e-7)
        assert found.standard_error == pytest.approx(0, abs=1e-7)
        assert found.df == 4
    # The plain mean of the contrasts carries the position effects of an unbalanced draw.
    plain = np.mean([block_contrast(block.sequence, block.step_times_ns) for block in blocks])
    assert abs(plain - 0.02) > 0.001


def test_least_squares_says_nothing_where_arm_and_position_cannot_be_told_apart() -> None:
    assert ordinary_least_squares([_made("RPPR", "RPPR", "RPPR", effect=0.02, position=[0] * 4)]) is None
    assert ordinary_least_squares([_made("RPPR", effect=0.02, position=[0] * 4)]) is None


def test_two_balanced_sequences_give_least_squares_and_contrasts_the_same_answer() -> None:
    blocks = _made("RPPR", "PRRP", "RPPR", "PRRP", effect=0.01, position=[0, 0.1, 0.2, 0.1])
    found = ordinary_least_squares([blocks])
    assert found is not None
    assert found.value == pytest.approx(
        np.mean([block_contrast(block.sequence, block.step_times_ns) for block in blocks]), abs=1e-9
    )


def test_the_untrimmed_mean_by_hand() -> None:
    assert untrimmed([[1.0, 3.0], [4.0]]) is not None
    found = untrimmed([[1.0, 3.0], [4.0]])
    assert found is not None
    assert (found.value, found.standard_error) == (3.0, 1.0)
    assert untrimmed([[1.0]]) is None


def test_the_bootstrap_depends_on_its_seed_alone() -> None:
    values = [contrasts(session.blocks) for session in _sessions()]
    first = block_bootstrap(values, seed=bytes(32), resamples=199)
    assert first == block_bootstrap(values, seed=bytes(32), resamples=199)
    other = block_bootstrap(values, seed=bytes(31) + b"\1", resamples=199)
    assert first is not None
    assert other is not None
    assert first.interval != other.interval
    assert first.run_lengths == (3, 3, 3)
    assert block_bootstrap([[0.1]], seed=bytes(32)) is None


def test_the_bootstrap_is_about_as_wide_as_the_interval() -> None:
    values = [contrasts(_sessions(sessions=1, blocks=100)[0].blocks)]
    found, wide = block_bootstrap(values, seed=bytes(32)), estimate(values).interval()
    assert found is not None
    assert wide is not None
    assert 0.6 < found.interval.width / wide.width < 1.4
    assert found.interval.holds(estimate(values).log_ratio)


def test_the_randomisation_test_of_two_blocks_by_hand() -> None:
    # RPPR twice, the second and third position slower by 1: contrasts over (RPPR, PRRP, RRPP, PPRR) are (1, −1, 0, 0).
    # Of the 16 pairs, 2 have a mean of size 1, which is what was seen: p is near 1/8.
    blocks = _made("RPPR", "RPPR", effect=0, position=[0, 1, 1, 0])
    found = randomisation_test([blocks], seed=bytes(32))
    assert found.p == pytest.approx(1 / 8, abs=0.02)
    with pytest.raises(ValueError, match="no block"):
        randomisation_test([[]], seed=bytes(32))


def test_a_long_measurement_does_not_take_memory_for_every_schedule_at_once() -> None:
    """Who verifies a stranger's slices pays for them with memory in proportion, and not two thousand times over."""
    blocks = [block for session in _blocks(_sessions(blocks=24)) for block in session] * 30
    tracemalloc.start()
    try:
        randomisation_test([blocks], seed=bytes(32))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_the_randomisation_test_sees_an_overhead_and_not_its_absence() -> None:
    assert randomisation_test(_blocks(_sessions()), seed=bytes(32)).p < 0.005
    runs = [_blocks(_sessions(World(), seed=seed)) for seed in range(20)]
    nothing = [randomisation_test(run, seed=bytes(32), draws=199).p for run in runs]
    assert sum(p <= 0.05 for p in nothing) <= 4
    assert min(nothing) > 0.001


def test_relabelling_the_arms_turns_every_estimator() -> None:
    design = make_design(sessions=3, blocks_per_session=12, warmup=NO_WARMUP)
    sessions = _sessions()
    found = sensitivity(design, sessions)
    turned = sensitivity(design, [swap_session(session) for session in sessions])
    for mine, theirs in (
        (found.untrimmed, turned.untrimmed),
        (found.ols_period, turned.ols_period),
        (found.ols_carryover, turned.ols_carryover),
    ):
        assert mine is not None
        assert theirs is not None
        assert theirs.value == pytest.approx(-mine.value, abs=1e-10)
        assert theirs.standard_error == pytest.approx(mine.standard_error, abs=1e-10)
    assert found.bootstrap is not None
    assert turned.bootstrap is not None
    assert turned.bootstrap.interval.low == pytest.approx(-found.bootstrap.interval.high, abs=1e-10)
    assert turned.randomisation.p == pytest.approx(found.randomisation.p, abs=0.01)


def test_the_launch_order_has_an_effect_of_its_own() -> None:
    sessions = _sessions(World(launch=0.01, noise=0.001), sessions=6)
    found = launch_effect(sessions)
    assert found is not None
    assert found.value == pytest.approx(-0.01, abs=0.001)
    assert launch_effect(sessions[:3]) is None
    design = make_design(sessions=4, blocks_per_session=2, warmup=NO_WARMUP, launch_order=LaunchOrder.RAW_FIRST)
    assert launch_effect(replay(design, run_world(World(), design, np.random.default_rng(0)))) is None
