"""A measurement of phases by itself: both arms, their slices and, where it is kept, a signed statement and report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from glasshouse.bench.harness import machine
from glasshouse.bench.harness.phases import PhaseRun, PhaseWish, measure_phases
from glasshouse.bench.harness.stage import Stage
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.overhead.artifact import PHASE_SLICES
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.facts import Facts
from glasshouse.bench.overhead.statement import write_statement
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.files import is_there, private_folder, write_private

if TYPE_CHECKING:
    from glasshouse.bench.harness.subject import Subject
    from glasshouse.bench.overhead.artifact import Measurement
    from glasshouse.jobs.identity import Identity

__all__ = ["PhasesAlone", "checkpoints_of", "phases_alone"]


@dataclass(frozen=True, slots=True)
class PhasesAlone:
    """What came of it.

    Args:
        run: what was found; None when it was stopped before the first whole block.
        facts: the workload and the machine.
        measurement: as it was signed; None where nothing is kept.
        report: where it lies.
        took_s: all of it.
    """

    _: KW_ONLY
    run: PhaseRun | None
    facts: Facts
    measurement: Measurement | None
    report: Path | None
    took_s: float


def phases_alone(
    wish: PhaseWish,
    make: Callable[[Path], Subject],
    *,
    folder: Path | None,
    identity: Identity,
    stop: Stop,
    watch: Callable[[str], None],
    write_report: Callable[[Measurement, Path], Path],
) -> PhasesAlone:
    """Measure the phases of a job's steps, raw against protected.

    Args:
        wish: what was asked for; how often the job makes checkpoints is the job's to say.
        make: makes the job; is given a folder for its data.
        folder: gets the files, and must not hold a measurement; None to keep nothing.
        identity: the owner; signs the statement.
        stop: ends it early.
        watch: told what is going on.
        write_report: makes the report.

    Raises:
        GlasshouseError: as `measure_phases`; `usage` for a folder that is taken.
    """
    began = time.monotonic()
    for name in ("statement.json", PHASE_SLICES, *(mode.value for mode in Mode)):
        if folder is not None and is_there(folder / name):
            raise UsageError(
                Code.USAGE, f"{folder} holds a measurement already ({name})", hint="name another folder with -o"
            )
    gpu = machine.Gpu.first()
    with tempfile.TemporaryDirectory(prefix="glasshouse-phases-") as scratch:
        place = Path(scratch) if folder is None else private_folder(folder)
        with Stage(make, identity=identity, stop=stop) as stage:
            job = stage.subject.job
            run = measure_phases(
                replace(wish, checkpoint_every=checkpoints_of(stage.subject)),
                stage.arms(Mode.INTERLEAVED),
                path=place / PHASE_SLICES,
                gpu=gpu,
                stop=stop,
                watch=watch,
            )
            watch(f"computing the numbers of {job.name}")
            facts = Facts(
                workload=stage.subject.to_json(),
                system=machine.describe(gpu),
                created_us=time.time_ns() // 1000,
                planted_ppm=0,
            )
        measurement = report = None
        if folder is not None and run is not None:
            # Whoever checks the statement needs to know whose it is.
            write_private(folder / "owner.pub", identity.public.encode())
            measurement = write_statement(folder, facts, owner=identity.signing)
            report = write_report(measurement, folder)
    return PhasesAlone(run=run, facts=facts, measurement=measurement, report=report, took_s=time.monotonic() - began)


def checkpoints_of(subject: Subject) -> int:
    """Return the number of steps between two checkpoints of a job, 0 for one that makes none."""
    every = subject.job.params.get("checkpoint_every", 0)
    return every if subject.job.workload == "lora" and isinstance(every, int) else 0
