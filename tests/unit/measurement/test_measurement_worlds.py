"""The estimate on trial: on machines whose truth is known, the interval holds it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from glasshouse.workloads.measurement.slots import Plan
from glasshouse_bench.coverage import BAR, coverage, main
from glasshouse_bench.records import parse
from glasshouse_bench.worlds import SLOT_NS, STEPS, UNCOUNTED, WORLDS, simulate
from simulators.slot_clock import SlotClock, train


@pytest.mark.parametrize("name", WORLDS)
def test_a_simulated_session_is_what_the_real_pacer_records_of_such_steps(name: str) -> None:
    found = simulate(WORLDS[name], sessions=3, length_s=3, rng=np.random.default_rng(5))
    for session, seed in enumerate(found.seeds):
        for arm, steps in zip("RP", found.steps(session), strict=True):
            assert len(steps.slot) > 50
            plan = Plan(
                seed=seed,
                arm=arm,
                slot_ns=SLOT_NS,
                steps=STEPS,
                uncounted=UNCOUNTED,
                warmup_steps=0,
                end_ns=len(found.protected) * SLOT_NS,
            )
            recorded = parse(train(plan, SlotClock(), [int(one) for one in steps.end - steps.begin]).record()).steps
            for member in ("slot", "index", "begin", "end"):
                np.testing.assert_array_equal(getattr(recorded, member), getattr(steps, member), member)


@pytest.mark.parametrize("name", WORLDS)
def test_the_interval_holds_the_truth(name: str) -> None:
    """A hundred measurements a world; thousands are kept as data (benchmarks/results)."""
    found = coverage(WORLDS[name], runs=100, sessions=20, length_s=4, seed=11)
    # Of 100 intervals that each hold with 93 %, fewer than 85 do so once in four hundred times.
    assert found["covered"] >= 0.85
    unexplained = abs(found["mean"] - found["truth"]) - max(found["contention"], 0)
    assert unexplained < 4 * found["mean_standard_error"]


def test_a_trimmed_mean_of_block_contrasts_loses_bunched_cost() -> None:
    found = coverage(WORLDS["bunched cost"], runs=40, sessions=20, length_s=4, seed=11)
    assert found["truth"] == pytest.approx(1.98, abs=0.01)
    assert found["mean"] == pytest.approx(1.98, abs=0.1)
    assert found["trimmed_mean"] < 0.7
    assert found["trimmed_covered"] == 0


def test_the_allowance_is_what_overruns_beside_the_other_arm_add_on_shared_cores() -> None:
    shared, alone = (
        coverage(WORLDS[name], runs=40, sessions=20, length_s=4, seed=11)
        for name in ("bunched cost, shared cores", "bunched cost")
    )
    raised = shared["mean"] - alone["mean"]
    assert raised > 0.05
    assert shared["contention"] == pytest.approx(raised, rel=0.25)


def test_the_script_keeps_what_it_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "coverage.json"
    status = main(["--runs", "3", "--world", "quiet", "--out", str(kept)])
    found = json.loads(kept.read_text())
    assert f"held {found['worlds']['quiet']['covered']:.1%}" in capsys.readouterr().out
    assert status == int(found["worlds"]["quiet"]["covered"] < BAR)
    assert found["runs"] == 3
