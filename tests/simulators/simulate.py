"""A machine whose true overhead is known: slices with noise, drift, steps, interference and process-pair effects.

Everything is additive on the natural logarithm of the time per step. The world has its own clock: a slice's
position in time follows from the guards and slices before it, so that what happens to the machine does not
know the schedule.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from glasshouse.bench.overhead.blocks import Session
from glasshouse.bench.overhead.design import Arm, Design, Mode, Phase, WarmupRule
from glasshouse.bench.overhead.slices import Outcome, Record, SessionEnd, Slice
from glasshouse.bench.overhead.warmup import State, assess

__all__ = [
    "NO_WARMUP",
    "World",
    "contrast_sets",
    "legs",
    "make_design",
    "naive_interval",
    "run_legs",
    "run_session",
    "run_world",
    "swap_session",
]

NO_WARMUP = WarmupRule(least_ns=0, cap_ns=0)


@dataclass(frozen=True, slots=True)
class World:
    """What is true of the machine.

    Args:
        overhead: the planted log ratio protected/raw.
        noise: sd of a slice, on the log scale.
        drift: total linear change over a session (or over a pair of legs).
        steps: how many sudden changes happen in a session, at times and of signs drawn at random.
        step_size: how large each is.
        wave: amplitude of a periodic interference.
        period: its period, in slices.
        pair_sd: sd of a process pair's own effect on the log ratio.
        launch: the protected arm is slower by this where it was launched first, and faster where second.
        spikes: the part of slices that take `spike` longer.
        spike: how much longer, on the log scale.
    """

    _: KW_ONLY
    overhead: float = 0.0
    noise: float = 0.01
    drift: float = 0.0
    steps: int = 0
    step_size: float = 0.0
    wave: float = 0.0
    period: float = 7.3
    pair_sd: float = 0.0
    launch: float = 0.0
    spikes: float = 0.0
    spike: float = 0.3

    def background(self, rng: np.random.Generator, number: int) -> np.ndarray[Any, Any]:
        """Return the log time of `number` successive slices of a raw process."""
        at = np.arange(number)
        found = rng.normal(0.0, self.noise, number) + self.drift * at / max(number - 1, 1)
        for _ in range(self.steps):
            found += self.step_size * rng.choice([-1, 1]) * (at >= rng.integers(1, max(number, 2)))
        if self.wave:
            found += self.wave * np.sin(2 * math.pi * (at / self.period + rng.random()))
        if self.spikes:
            found += self.spike * (rng.random(number) < self.spikes)
        return found


def make_design(number: int = 0, **changes: Any) -> Design:
    """Return a design whose seed follows from a number."""
    values: dict[str, Any] = {
        "mode": Mode.INTERLEAVED,
        "seed": hashlib.sha256(b"design %d" % number).digest(),
        "sessions": 12,
        "blocks_per_session": 20,
        "slice_steps": 100,
    }
    return Design(**(values | changes))


def contrast_sets(world: World, design: Design, rng: np.random.Generator) -> list[list[float]]:
    """Return the block contrasts of each session, without the records between: for thousands of runs."""
    found = []
    for session, ways in enumerate(design.schedule()):
        signs = np.array([[0.5 if arm == "P" else -0.5 for arm in way] for way in ways])
        logs = world.background(rng, signs.size).reshape(signs.shape)
        found.append(((signs * logs).sum(axis=1) + _effect(world, design, session, rng)).tolist())
    return found


def run_world(world: World, design: Design, rng: np.random.Generator, **changes: Any) -> list[Record]:
    """Return all records of a run, as a machine without a GPU would leave them."""
    records: list[Record] = []
    for session in range(design.sessions):
        records += run_session(world, design, session, rng, **changes)
    return records


def run_session(
    world: World, design: Design, session: int, rng: np.random.Generator, *, step_ns: float = 7e6, **changes: Any
) -> list[Record]:
    """Return one session's records: the warm-up for as long as its rule asks, then the measured blocks."""
    effect = _effect(world, design, session, rng)
    clock = _Clock(design=design, step_ns=step_ns, changes=changes)
    records: list[Record] = []
    warmups = 0
    levels: list[float] = []
    state = State.WARMING
    while state is State.WARMING:
        logs = rng.normal(0.0, world.noise, design.slices_per_block)
        block = clock.block(Phase.WARMUP, session, warmups, logs, effect)
        records += block
        warmups += 1
        levels.append(sum(math.log(one.duration_ns / one.steps) for one in block) / len(block))
        state = assess(levels, block[-1].t1_ns - records[0].t0_ns, design.warmup).state  # type: ignore[union-attr]
    number = design.blocks_per_session
    logs = world.background(rng, number * design.slices_per_block).reshape(number, -1)
    for index in range(number):
        records += clock.block(Phase.MEASURED, session, index, logs[index], effect)
    end = SessionEnd(
        session=session,
        launched_first=design.launched_first(session),
        warmup_blocks=warmups,
        blocks_started=number,
        outcome=Outcome.COMPLETE,
    )
    return [*records, end]


def run_legs(world: World, design: Design, session: int, rng: np.random.Generator) -> list[Record]:
    """Return the records of one sequential session: a warm-up and a measured leg for either arm."""
    effect = _effect(world, design, session, rng)
    clock = _Clock(design=design, step_ns=7e6, changes={})
    logs = world.background(rng, 2)
    records: list[Record] = []
    for position, arm in enumerate(map(Arm, design.sequence(Phase.MEASURED, session, 0))):
        log = float(logs[position]) + (effect if arm is Arm.PROTECTED else 0.0)
        for phase in (Phase.WARMUP, Phase.MEASURED):
            records.append(clock.slice(phase, session, 0, position, arm, log))
    end = SessionEnd(
        session=session,
        launched_first=design.launched_first(session),
        warmup_blocks=1,
        blocks_started=1,
        outcome=Outcome.COMPLETE,
    )
    return [*records, end]


@dataclass(slots=True)
class _Clock:
    """Turns log times into records of one session."""

    design: Design
    step_ns: float
    changes: dict[str, Any]
    now_ns: int = 0
    done: dict[Arm, int] = field(default_factory=lambda: dict.fromkeys(Arm, 0))

    def block(self, phase: Phase, session: int, index: int, logs: Sequence[float], effect: float) -> list[Slice]:
        found = []
        for position, arm in enumerate(map(Arm, self.design.sequence(phase, session, index))):
            slower = effect if arm is Arm.PROTECTED else 0.0
            found.append(self.slice(phase, session, index, position, arm, float(logs[position]) + slower))
        return found

    def slice(self, phase: Phase, session: int, index: int, position: int, arm: Arm, log: float) -> Slice:
        step_ns = self.step_ns * math.exp(log)
        steps = self.design.slice_steps or math.ceil((self.design.leg_ns or 0) / step_ns)
        start = self.now_ns + self.design.guard_ns + 1000
        before = self.done[arm] + self.design.guard_steps
        values: dict[str, Any] = {
            "session": session,
            "block": index,
            "position": position,
            "arm": arm,
            "phase": phase,
            "steps": steps,
            "guard_steps": self.design.guard_steps,
            "guard_ns": self.design.guard_ns,
            "t0_ns": start,
            "t1_ns": start + math.ceil(steps * step_ns),
            "done_before": before,
            "done_after": before + steps,
            "first_batch": before if self.design.slice_steps else 0,
            "loss_finite": True,
            "clock_skew_ns": 0,
            "parked_cpu_ns": 0,
            "steal_ppm": 0,
        }
        self.done[arm] = before + steps
        self.now_ns = values["t1_ns"]
        return Slice(**(values | self.changes))


def _effect(world: World, design: Design, session: int, rng: np.random.Generator) -> float:
    sign = 1 if design.launched_first(session) is Arm.PROTECTED else -1
    return world.overhead + sign * world.launch + float(rng.normal(0.0, world.pair_sd))


def legs(world: World, rng: np.random.Generator, *, slices: int, first: Arm) -> tuple[np.ndarray[Any, Any], ...]:
    """Return the log times of the raw and of the protected leg of one sequential pair, in slices."""
    found = world.background(rng, 2 * slices)
    early, late = found[:slices], found[slices:]
    raw, protected = (early, late) if first is Arm.RAW else (late, early)
    return raw, protected + world.overhead + float(rng.normal(0.0, world.pair_sd))


def naive_interval(raw: np.ndarray[Any, Any], protected: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the 95 % interval that one would be tempted to give a sequential pair: its slices as if independent."""
    error = math.sqrt(raw.var(ddof=1) / len(raw) + protected.var(ddof=1) / len(protected))
    middle = float(protected.mean() - raw.mean())
    return middle - 1.96 * error, middle + 1.96 * error


def swap_session(session: Session) -> Session:
    """Return a replayed session with the arms named the other way round."""
    letters = str.maketrans("RP", "PR")

    def swapped(block: Any) -> Any:
        return replace(
            block,
            sequence=block.sequence.translate(letters),
            slices=tuple(replace(one, arm=one.arm.other) for one in block.slices),
        )

    return replace(
        session,
        launched_first=session.launched_first.other,
        warmup=tuple(map(swapped, session.warmup)),
        blocks=tuple(map(swapped, session.blocks)),
    )
