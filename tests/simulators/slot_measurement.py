"""Whole measurements by slots, as folders, of workers that train by a clock that a test moves."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse.evidence.receipt import Receipt
from glasshouse_bench.artifact import Arm, Attempt, Ended, Lifecycle, Part, Sample, Spent
from glasshouse_bench.beside import Calibration, Parity, Phase, Phases
from glasshouse_bench.design import Design, Kind, Mode
from glasshouse_bench.statement import write_statement
from simulators.sealed_design import design, note
from simulators.slot_clock import MS, SlotClock, train
from simulators.world import START_US, World

__all__ = ["CREATED_US", "OWNER", "PHASES", "SessionRun", "attempt_session", "measured", "step_record"]

CREATED_US = START_US + 60_000_000
LIFECYCLE = {"attest": 300_000, "harden": 200_000, "open": 100_000, "release": 50_000, "seal_outputs": 80_000}
LIFECYCLE |= {"zeroize": 20_000}
# Ten steps of each arm, of 10 ms.
PHASES = Phases(
    steps=10,
    raw_ns=100_000_000,
    protected_ns=102_000_000,
    raw_losses=("0.5",) * 10,
    protected_losses=("0.5",) * 10,
    phases=(
        Phase(name="forward", raw_ns=38_000_000, protected_ns=38_500_000),
        Phase(name="backward", raw_ns=51_000_000, protected_ns=51_700_000),
        Phase(name="optimizer", raw_ns=9_000_000, protected_ns=9_100_000),
        Phase(name="hooks", raw_ns=0, protected_ns=90_000),
    ),
    deployment="phases-1",
)


@dataclass
class SessionRun(World):
    """The run of one session: its own ids and keys, by the owner of all."""

    session: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.owner = World().owner
        self.manifest = replace(self.manifest, owner_signing=self.owner.public)

    def id(self, label: str) -> str:
        own = label in ("run", "token", "deployment")
        return super().id(f"{self.session} {label}" if own else label)


OWNER = World().owner


def step_record(sealed: Design, session: int, arm: str, rng: np.random.Generator, *, ratio: float = 1.0) -> bytes:
    """Return the record of one worker with steps of 10 ms, `ratio` times as long, give or take 2 %."""
    begin_ns = (1 + session) * 10**10
    end_ns = begin_ns + 2_500 * MS + sealed.length_ns

    def steps() -> Iterator[int]:
        while True:
            # No function of a mathematical library: its last digits are not everywhere the same.
            yield int(rng.integers(9_800_000, 10_200_000) * ratio)

    plan = sealed.plan(session, arm, end_ns=end_ns)
    return train(plan, SlotClock(begin_ns), steps(), loss=lambda step: round(1 / (1 + step), 4)).record()


def measured(
    folder: Path,
    *,
    modes: Collection[Mode] = (Mode.INTERLEAVED, Mode.NULL),
    ratio: float = 1.02,
    null: float = 1.0,
    died: Collection[int] = (),
    attempts: int | None = None,
    receipts: bool = False,
    parity: bool = False,
    calibration: Calibration | None = None,
    signed: bool = True,
    **changed: Any,
) -> Path:
    """Measure, keep and sign; every session is complete but those that `died`."""
    rng = np.random.default_rng(1)
    if calibration is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "calibration.json").write_bytes(calibration.encode())
        changed["calibration_sha256"] = calibration.sha256
    for mode in modes:
        sealed = design(mode, **{"seed": bytes([list(Mode).index(mode)]) * 32, **changed})
        if receipts:
            sealed = replace(sealed, workload=replace(sealed.workload, kind=Kind.LORA))
        part = Part.begin(folder, sealed)
        for session in range(sealed.sessions if attempts is None else attempts):
            attempt_session(
                part, session, rng, null if mode is Mode.NULL else ratio, died=session in died, receipts=receipts
            )
    if parity:
        both = bytes(32)
        told = Parity(steps=100, raw=both, protected=both, deployment="parity-1")
        (folder / "parity.json").write_bytes(told.encode())
    if signed:
        write_statement(folder, owner=OWNER, created_us=CREATED_US)
    return folder


def attempt_session(
    part: Part,
    session: int,
    rng: np.random.Generator,
    ratio: float = 1.0,
    *,
    died: bool = False,
    receipts: bool = False,
) -> None:
    """Attempt one session and keep what it left."""
    sealed, protected = part.design, part.design.mode is not Mode.NULL
    began = replace(note(0).began, monotonic_ns=(1 + session) * 10**10)
    told = note(session, began=began)
    part.attempt(told)
    records = [step_record(sealed, session, arm, rng, ratio=one) for arm, one in (("R", 1.0), ("P", ratio))]
    run = SessionRun(session=f"{sealed.mode.value} {session}")
    names = {"deployment": run.id("deployment"), "run": run.id("run")} if protected else {}
    arm = {"ended": Ended.COMPLETED, "exit": 0, "launched_ns": began.monotonic_ns, "padding_bytes": 17 + session}
    told = Attempt(
        session=session,
        began=began,
        raw=Arm(**arm),
        protected=Arm(**{**arm, **names, "ended": Ended.FAILED if died else Ended.COMPLETED}),
        lifecycle=Lifecycle(**LIFECYCLE, start=250_000 + 1000 * session) if protected else None,
        background=Spent(spent_ns=1_500_000, over_ns=10**9) if protected else None,
        samples=tuple(Sample(at_ns=at * 10**9, steal_ppm=100, throttled=0) for at in (1, 2, 3, 4)),
    )
    bundle = None
    if receipts and protected and not died:
        bundle = run.run(change=lambda receipt: _receipt(receipt, len(records[1]))).data
    part.keep(told, raw=records[0], protected=None if died else records[1], receipt=bundle)


def _receipt(receipt: Receipt, record_bytes: int) -> Receipt:
    weights, record = receipt.outputs
    return replace(
        receipt,
        lifecycle_us={**LIFECYCLE, "total": 900_000},
        outputs=(weights, replace(record, plain_bytes=record_bytes)),
    )
