"""A whole measurement with arms that live in this process: its phases come last and take nothing from the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.bench.harness import measure as measure_module
from glasshouse.bench.harness.measure import Measured, measure
from glasshouse.bench.harness.phases import PhaseWish
from glasshouse.bench.harness.plan import Wish
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.harness.subject import Subject, builtin
from glasshouse.bench.overhead.artifact import Measurement
from glasshouse.bench.overhead.design import Arm, Mode
from glasshouse.bench.overhead.verify import verify_measurement
from glasshouse.cli.bench_overhead_view import Silent
from glasshouse.errors import Code, RunError
from glasshouse.jobs.identity import Identity
from glasshouse.wire import pacing
from glasshouse.wire.pacing import Go
from simulators.paced_arms import FakeArm, PacedWorld

SEED = bytes(range(32))
OWNER = Identity.generate()


class StampedArm(FakeArm):
    """An arm whose whole step is its forward pass."""

    def slice(self, order: Go, timeout_s: float) -> pacing.Slice:
        report = super().slice(order, timeout_s)
        return replace(report, phases={"forward": report.t1_ns - report.t0_ns} if order.stamps else None)


class Stage:
    """Where fake arms are made."""

    def __init__(self, make: Callable[[Path], Subject], *, world: PacedWorld, folder: Path) -> None:
        self.subject, self.world = make(folder), world

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def raw(self) -> FakeArm:
        return StampedArm(self.world, Arm.RAW)

    def arms(self, _mode: Mode) -> Callable[[Arm], FakeArm]:
        return lambda arm: StampedArm(self.world, arm)


Run = Callable[..., Measured]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what measures one null session of two blocks, and the phases of two blocks."""

    def measured(world: PacedWorld, *, stop: Stop | None = None) -> Measured:
        (tmp_path / "data").mkdir()

        def stage(make: Callable[[Path], Subject], **_words: Any) -> Stage:
            return Stage(make, world=world, folder=tmp_path / "data")

        monkeypatch.setattr(measure_module, "Stage", stage)
        with Stop() as never:
            return measure(
                Wish(mode="null", seed=SEED, sessions=1, blocks=2, warmup_s=0.1),
                lambda folder: builtin("mlp", folder, device="cpu"),
                folder=tmp_path / "out",
                identity=OWNER,
                viewer=Silent(),
                stop=stop or never,
                phases=PhaseWish(seed=SEED, blocks=2, warmup_s=0),
            )

    return measured


def test_the_statement_covers_the_phases_too(run: Run, tmp_path: Path) -> None:
    found = run(PacedWorld())
    assert (found.ended, found.phases_problem) == (None, "")
    assert found.phases is not None
    assert found.measurement.phases == found.phases.phases
    assert Measurement.load(tmp_path / "out").phases == found.phases.phases
    assert found.measurement.part(Mode.NULL) is not None
    verdict = verify_measurement(tmp_path / "out", owner=OWNER.public.signing)
    assert "phases" in str(verdict.links)


def test_an_arm_that_fails_while_its_phases_are_measured_takes_nothing_from_the_rest(run: Run, tmp_path: Path) -> None:
    world = PacedWorld()

    def misfortune(_arm: Arm, _number: int, report: pacing.Slice) -> pacing.Slice:
        if world.orders[-1][1].stamps:
            raise RunError(Code.WORKER_KILLED, "the arm was killed")
        return report

    world.misfortune = misfortune
    found = run(world)
    assert (found.ended, found.phases) == (None, None)
    assert found.phases_problem == "the arm was killed"
    assert found.measurement.phases is None
    assert not (tmp_path / "out" / "phases.jsonl").exists()
    part = found.measurement.part(Mode.NULL)
    assert part is not None
    assert part.analysis.attempts.included == 2


def test_one_that_is_interrupted_there_keeps_its_sessions(run: Run) -> None:
    world = PacedWorld()
    with Stop() as stop:

        def misfortune(_arm: Arm, _number: int, report: pacing.Slice) -> pacing.Slice:
            if world.orders[-1][1].stamps:
                stop.ask()
            return report

        world.misfortune = misfortune
        found = run(world, stop=stop)
    assert (found.ended, found.phases) == (Code.INTERRUPTED, None)
    part = found.measurement.part(Mode.NULL)
    assert part is not None
    assert part.analysis.attempts.included == 2
