"""Measurements of every kind, as values, without a folder or a receipt: what a report has to be able to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from glasshouse.bench.overhead.artifact import ArmWork, Measurement, Part, SessionNote
from glasshouse.bench.overhead.design import Arm, Design, Mode, Phase
from glasshouse.bench.overhead.phases import analyse_phases
from glasshouse.bench.overhead.slices import Outcome, Record, SessionEnd, Slice, Throttle
from glasshouse.errors import Code
from simulators.measurement import FACTS, phase_slices
from simulators.simulate import NO_WARMUP, World, make_design, run_legs, run_world

__all__ = ["KINDS", "design", "measured", "measurement", "part"]

_LIFECYCLE_US = {
    "attest": 142_000,
    "harden": 81_000,
    "open": 260_000,
    "release": 37_000,
    "seal_outputs": 55_000,
    "total": 9_000_000,
    "zeroize": 91_000,
}
_BROKEN_OFF = 2  # the session that fails, where one does
_WHOLE = 5  # its blocks before that


def design(mode: Mode = Mode.INTERLEAVED, *, number: int = 1, sessions: int = 1, blocks: int = 20) -> Design:
    """Return a design that is quick to simulate."""
    if mode is Mode.SEQUENTIAL:
        return make_design(
            number, mode=mode, sessions=sessions, blocks_per_session=1, guard_steps=0, guard_ns=0, warmup=NO_WARMUP
        )
    return make_design(number, mode=mode, sessions=sessions, blocks_per_session=blocks)


def part(
    world: World,
    of: Design,
    *,
    change: Callable[[list[Record]], list[Record]] = lambda records: records,
    hooks: float | None = 2e-4,
    same: bool = True,
) -> Part:
    """Return a part of a machine with a known truth.

    Args:
        world: the machine.
        of: what is measured.
        change: what befalls the records.
        hooks: the share of protected slices that is spent in hooks; None where nobody looked.
        same: whether both arms train the same weights.
    """
    rng = np.random.default_rng(of.seed[0])
    if of.mode is Mode.SEQUENTIAL:
        records = [record for session in range(of.sessions) for record in run_legs(world, of, session, rng)]
    else:
        records = run_world(world, of, rng)
    if of.mode is Mode.INTERLEAVED and hooks is not None:
        records = [_hooked(record, hooks) for record in records]
    records = change(records)
    ends = [record for record in records if isinstance(record, SessionEnd)]
    return Part.of(of, tuple(records), tuple(_note(of, end, rng, same) for end in ends))


def measurement(
    *parts: Part, phases: bool = False, planted_ppm: int = 0, assurance: str | None = "software", **workload: Any
) -> Measurement:
    return Measurement(
        workload={**FACTS.workload, **workload},
        system=FACTS.system,
        assurance=assurance,
        created_us=FACTS.created_us,
        planted_ppm=planted_ppm,
        parts=parts,
        phases=analyse_phases(phase_slices()) if phases else None,
    )


def measured(kind: str) -> Measurement:
    """Return a measurement of one of `KINDS`."""
    return KINDS[kind]()


def _equivalent() -> Measurement:
    machine = World(overhead=0.0006, noise=0.008, pair_sd=0.0005, drift=0.01)
    return measurement(
        part(machine, design(sessions=12)),
        part(World(noise=0.008), design(Mode.NULL, number=2, sessions=4)),
        part(World(noise=0.03), design(Mode.SEQUENTIAL, number=3, sessions=4)),
        phases=True,
    )


def _failed() -> Measurement:
    machine = World(overhead=0.008, noise=0.01, pair_sd=0.002)
    return measurement(part(machine, design(number=10, sessions=5), change=_with_failures))


def _two(first: World, second: World, **changes: Any) -> Measurement:
    return measurement(
        part(first, design(number=8, blocks=40), **changes), part(second, design(Mode.NULL, number=9, blocks=40))
    )


KINDS: dict[str, Callable[[], Measurement]] = {
    "equivalent": _equivalent,
    "overhead": lambda: measurement(
        part(World(overhead=0.02, noise=0.01), design(number=5, sessions=3)), kind="mlp", name="small net"
    ),
    "quick": lambda: measurement(part(World(overhead=0.003, noise=0.04, spikes=0.03), design(number=7, blocks=40))),
    "bias": lambda: _two(World(overhead=-0.012, noise=0.01), World(overhead=0.01, noise=0.01), same=False),
    "failed": _failed,
    "sequential": lambda: measurement(part(World(noise=0.03), design(Mode.SEQUENTIAL, number=3, sessions=2))),
    "null": lambda: measurement(part(World(noise=0.01), design(Mode.NULL, number=11, sessions=3)), assurance=None),
    "planted": lambda: measurement(
        part(World(overhead=0.005, noise=0.006), design(number=12, blocks=60)), planted_ppm=5000
    ),
    "phases only": lambda: measurement(phases=True, assurance=None),
    "nothing counts": lambda: measurement(part(World(), design(number=13, blocks=5), change=_all_stolen)),
    "one block": lambda: measurement(part(World(), design(number=14, blocks=1))),
}


def _hooked(record: Record, share: float) -> Record:
    if isinstance(record, Slice) and record.arm is Arm.PROTECTED:
        return replace(record, hooks_ns=int(record.duration_ns * share))
    return record


def _with_failures(records: list[Record]) -> list[Record]:
    """Break rules in some blocks, and let one session fail in its sixth block."""
    found: list[Record] = []
    for record in records:
        if isinstance(record, SessionEnd) and record.session == _BROKEN_OFF:
            record = replace(record, blocks_started=_WHOLE + 1, outcome=Outcome.FAILED, code=Code.WORKER_FAILED)
        if isinstance(record, Slice) and record.phase is Phase.MEASURED:
            if record.session == _BROKEN_OFF and (record.block, record.position) > (_WHOLE, 1):
                continue
            if record.block == 3 and record.position == 1:
                record = replace(record, steal_ppm=90_000)
            if (record.session, record.block, record.position) == (0, 7, 2):
                record = replace(record, throttle=(Throttle.THERMAL,))
        found.append(record)
    return found


def _all_stolen(records: list[Record]) -> list[Record]:
    return [replace(record, steal_ppm=90_000) if isinstance(record, Slice) else record for record in records]


def _note(of: Design, end: SessionEnd, rng: np.random.Generator, same: bool) -> SessionNote:
    if end.outcome is not Outcome.COMPLETE:
        return SessionNote(
            session=end.session, raw=None, protected=None, lifecycle_us=None, imports_us=None, bundle_sha256=None
        )
    weights = bytes([end.session]) * 32
    null = of.mode is Mode.NULL
    lifecycle = {step: int(us * (1 + 0.05 * rng.random())) for step, us in _LIFECYCLE_US.items()}

    def arm(digest: bytes, start_ns: int) -> ArmWork:
        return ArmWork(done=1000, start_ns=start_ns, outputs=(("output", "weights", digest),))

    return SessionNote(
        session=end.session,
        raw=arm(weights, 2_100_000_000),
        protected=arm(weights if same else bytes(32)[:-1] + b"x", 3_100_000_000),
        lifecycle_us=None if null else lifecycle,
        imports_us=None if null else 1_450_000,
        bundle_sha256=None if null else b"b" * 32,
    )
