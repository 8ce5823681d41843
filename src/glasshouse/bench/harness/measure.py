"""The story of a measurement: calibrate, plan, run every part's sessions in turn, and sign what follows from them.

Laws: every design is in its file before the first slice of any part; sessions of the parts take turns, so that an
interrupted measurement has some of each; whatever ends it, what is complete is analysed and kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from glasshouse.bench.harness import machine
from glasshouse.bench.harness.engine import Engine, Pieces, Watch
from glasshouse.bench.harness.phases import PhaseRun, PhaseWish, expected_s, measure_phases
from glasshouse.bench.harness.phases_alone import checkpoints_of
from glasshouse.bench.harness.plan import CALIBRATION_S, FASTEST, Calibration, Plan, Wish, calibrate, plan
from glasshouse.bench.harness.sequential import Legs
from glasshouse.bench.harness.stage import Stage
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.harness.store import Store
from glasshouse.bench.overhead.artifact import PHASE_SLICES
from glasshouse.bench.overhead.design import Design, Mode
from glasshouse.bench.overhead.facts import Facts
from glasshouse.bench.overhead.slices import SessionEnd
from glasshouse.bench.overhead.statement import write_statement
from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.files import is_there, private_folder, write_private
from glasshouse.wire.canonical import Json

if TYPE_CHECKING:
    from glasshouse.bench.harness.subject import Subject
    from glasshouse.bench.overhead.artifact import Measurement
    from glasshouse.jobs.identity import Identity

__all__ = ["Measured", "Viewer", "measure"]


class Viewer(Watch, Protocol):
    """Whoever shows the whole of it."""

    def calibrating(self) -> None:
        """A raw arm is being timed."""

    def planned(self, found: Calibration, chosen: Plan) -> None:
        """The designs are in their files."""

    def phases(self, what: str) -> None:
        """Something of the measurement of phases begins."""

    def closing(self) -> None:
        """The numbers are being made."""


class Runs(Protocol):
    """What runs the sessions of one part."""

    def session(self, number: int) -> SessionEnd: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement that has ended.

    Args:
        folder: where its files lie.
        measurement: its numbers.
        report: the report, if it could be made.
        ended: why it ended before its plan, or None.
        took_s: all of it.
        phases: what was found of the phases, if they were to be measured and could be.
        phases_problem: why they could not, for people; empty otherwise.
    """

    _: KW_ONLY
    folder: Path
    measurement: Measurement
    report: Path | None
    ended: Code | None
    took_s: float
    phases: PhaseRun | None = None
    phases_problem: str = ""


def measure(
    wish: Wish,
    make: Callable[[Path], Subject],
    *,
    folder: Path,
    identity: Identity,
    viewer: Viewer,
    stop: Stop,
    planted_ppm: int = 0,
    phases: PhaseWish | None = None,
    write_report: Callable[[Measurement, Path], Path] | None = None,
) -> Measured:
    """Measure what protection costs.

    Args:
        wish: what was asked for.
        make: makes the job; is given a folder for its data.
        folder: gets the files; must not hold a measurement.
        identity: the owner; signs the statement.
        viewer: told of everything.
        stop: ends it early.
        planted_ppm: an overhead to plant in every step of the protected arm, in millionths of the raw step.
        phases: measures the phases of a step as well, after all sessions; a trouble there takes nothing from them.
        write_report: makes the report.

    Raises:
        UsageError: a job that cannot be measured, too short a time, a folder that is taken, a full disk.
        RunError: the job itself does not run.
    """
    began = time.monotonic()
    _check_free(folder)
    # Before anything is started: a time in which no job has room needs no calibration to be refused.
    plan(wish, FASTEST, spent_s=CALIBRATION_S)
    gpu = machine.Gpu.first()
    with Stage(make, identity=identity, stop=stop) as stage:
        viewer.calibrating()
        arm = stage.raw()
        try:
            found = calibrate(arm)
        finally:
            arm.close()
        reserved_s = 0.0 if phases is None else expected_s(phases, start_s=found.start_s, step_s=found.step_ns / 1e9)
        chosen = plan(wish, found, spent_s=time.monotonic() - began + reserved_s)
        stores = {mode: Store(private_folder(folder) / mode.value, design) for mode, design in chosen.designs.items()}
        viewer.planned(found, chosen)
        runs: dict[Mode, Runs] = {}
        for mode, design in chosen.designs.items():
            pieces = Pieces(
                design=design,
                store=stores[mode],
                arms=stage.arms(mode),
                look=partial(machine.look, gpu),
                watch=viewer,
                stop=stop,
                guard_steps=chosen.guard_steps,
                burn_ns=0 if mode is Mode.NULL else round(found.step_ns * planted_ppm / 1_000_000),
                patience_s=_patience_s(design, found),
            )
            runs[mode] = (Legs if mode is Mode.SEQUENTIAL else Engine)(pieces)
        try:
            ended = _take_turns(chosen.designs, runs, stop)
        finally:
            for store in stores.values():
                store.close()
        told = _Told()
        if phases is not None and ended is None:
            told = _phases(phases, stage, folder, gpu, viewer, stop)
        workload = stage.subject.to_json()
    viewer.closing()
    facts = Facts(
        workload=workload | {"facts": _facts(workload, found)},
        system=machine.describe(gpu),
        created_us=time.time_ns() // 1000,
        planted_ppm=planted_ppm,
    )
    # Whoever checks the statement needs to know whose it is.
    write_private(folder / "owner.pub", identity.public.encode())
    measurement = write_statement(folder, facts, owner=identity.signing)
    report = None if write_report is None else write_report(measurement, folder)
    return Measured(
        folder=folder,
        measurement=measurement,
        report=report,
        ended=ended or told.ended,
        took_s=time.monotonic() - began,
        phases=told.run,
        phases_problem=told.problem,
    )


@dataclass(frozen=True, slots=True)
class _Told:
    """What came of measuring the phases."""

    run: PhaseRun | None = None
    ended: Code | None = None
    problem: str = ""


def _phases(wish: PhaseWish, stage: Stage, folder: Path, gpu: machine.Gpu | None, viewer: Viewer, stop: Stop) -> _Told:
    """Measure the phases; a trouble is told and takes nothing from what was measured before."""
    wish = replace(wish, checkpoint_every=checkpoints_of(stage.subject))
    arms, path = stage.arms(Mode.INTERLEAVED), folder / PHASE_SLICES
    try:
        run = measure_phases(wish, arms, path=path, gpu=gpu, stop=stop, watch=viewer.phases)
    except GlasshouseError as error:
        return _Told(problem=error.message)
    return _Told(run=run, ended=Code.INTERRUPTED if run is None else run.ended)


def _take_turns(designs: Mapping[Mode, Design], runs: Mapping[Mode, Runs], stop: Stop) -> Code | None:
    """Run all sessions, those of the parts mixed evenly; return why it ended early, or None."""
    turns = sorted(
        ((number + 0.5) / design.sessions, place, mode, number)
        for place, (mode, design) in enumerate(designs.items())
        for number in range(design.sessions)
    )
    for _, _, mode, number in turns:
        if stop.asked:
            return Code.INTERRUPTED
        end = runs[mode].session(number)
        if end.code in (Code.INTERRUPTED, Code.DISK_FULL):
            return end.code
    return None


def _patience_s(design: Design, found: Calibration) -> float:
    """Return after what time a slice has failed: machines stall, and one that is a hundred times slower is broken."""
    steps = (design.slice_steps or 0) + max(design.guard_steps, 3)
    expected_s = steps * found.step_ns / 1e9 + ((design.leg_ns or 0) + design.guard_ns) / 1e9
    return 300.0 + (4.0 if design.mode is Mode.SEQUENTIAL else 100.0) * expected_s


def _facts(workload: Mapping[str, Json], found: Calibration) -> dict[str, Json]:
    known = workload["facts"]
    assert isinstance(known, dict)  # noqa: S101 - `Subject.to_json` made it
    return {**known, "calibrated_step_us": round(found.step_ns / 1000)}


def _check_free(folder: Path) -> None:
    taken = [
        name for name in ("statement.json", PHASE_SLICES, *(mode.value for mode in Mode)) if is_there(folder / name)
    ]
    if taken:
        raise UsageError(
            Code.USAGE, f"{folder} holds a measurement already ({taken[0]})", hint="name another folder with -o"
        )
