"""From how fast a job is and how much time there is to the designs of a measurement.

Laws: a plan that leaves no room for one block is refused before anything is measured; more time goes to more
sessions before it goes to longer ones, because a process pair has an effect of its own that no number of its
blocks averages out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from glasshouse.bench.harness.arms import Runner
from glasshouse.bench.harness.pace import ArmLostError
from glasshouse.bench.overhead.design import (
    LEAST_GUARD_NS,
    LEAST_GUARD_STEPS,
    MARGIN_QUICK_PPM,
    SLICES_PER_BLOCK,
    STANDARD_SESSIONS,
    Design,
    LaunchOrder,
    Mode,
    WarmupRule,
    default_margin_ppm,
)
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.durations import format_s
from glasshouse.wire.pacing import Go

__all__ = ["CALIBRATION_S", "FASTEST", "SLICE_CAP_S", "Calibration", "Plan", "Wish", "calibrate", "plan"]

SLICE_S, SLICE_CAP_S = 0.75, 2.0
_SETTLE_S, _LOOK_S, _LOOKS = 1.0, 0.5, 5
# In a short measurement more sessions are worth more than longer slices; 0.5 s is the least.
_SHORT_SLICE_S, _SHORT_TIME_S = 0.55, 1200
# And in a very short one the warm-up is judged over fewer blocks.
_BRIEF_WINDOW_BLOCKS, _BRIEF_TIME_S = 5, 300
_GUARD_S = 0.35
# What a session takes beside its blocks, beyond the start of its workers: gate, sealing, search of memory.
_LIFECYCLE_S, _END_S = 4.0, 1.5
# The warm-up ends when it is steady, which on a busy machine is later than at the earliest.
_WARMUP_FACTOR = 1.25
_WRAP_UP_S = 15.0
_FEWEST_BLOCKS, _MANY_BLOCKS = 6, 40
_FEW_SESSIONS, _FEW_BLOCKS = 3, 3
_DEFAULT_BLOCKS = 20
_CAP_NS, _CAP_FACTOR = 300_000_000_000, 10
_LEG_WARMUP_S = 5.0
# The warm-up, and as many steps again until both legs can begin at the same batch.
_LEG_WARMUPS = 2.0
_LEAST_LEG_S, _LONG_LEG_S = 5.0, 30.0
_DEFAULT_LEG_S = 60.0
# Shares of the time.
_SHARES: Mapping[str, Mapping[Mode, float]] = {
    "interleaved": {Mode.INTERLEAVED: 2 / 3, Mode.NULL: 1 / 3},
    "null": {Mode.NULL: 1.0},
    "sequential": {Mode.SEQUENTIAL: 1.0},
    "all": {Mode.INTERLEAVED: 0.45, Mode.NULL: 0.25, Mode.SEQUENTIAL: 0.3},
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """How fast a raw arm is, alone.

    Args:
        start_s: from its launch to its first step.
        step_ns: median time of a step.
    """

    _: KW_ONLY
    start_s: float
    step_ns: float


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for.

    Args:
        mode: `interleaved` (with its null), `null`, `sequential` or `all`.
        seed: 32 bytes.
        time_s: how long the whole may take; None where `sessions` says how much is measured.
        sessions: process pairs; None where the time says it.
        blocks: measured blocks in a session; None for as many as fit, or 20.
        warmup_s: the least warm-up.
        order: which process starts first.
        margin_ppm: the equivalence margin; None for the default.
        steps: a sequential leg ends after so many; None for a time.
    """

    _: KW_ONLY
    mode: str
    seed: bytes
    time_s: float | None = None
    sessions: int | None = None
    blocks: int | None = None
    warmup_s: float = 30.0
    order: LaunchOrder = LaunchOrder.ALTERNATING
    margin_ppm: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be measured.

    Args:
        designs: one a mode, in the order of their importance.
        guard_steps: what a guard takes at the calibrated speed.
        expected_s: about how long it takes from now.
    """

    _: KW_ONLY
    designs: Mapping[Mode, Design]
    guard_steps: int
    expected_s: float


def calibrate(arm: Runner, *, settle_s: float = _SETTLE_S, look_s: float = _LOOK_S, looks: int = _LOOKS) -> Calibration:
    """Start a raw arm, let it run in, and time its steps; the caller closes it.

    Raises:
        GlasshouseError: the job fails, or ends by itself.
    """
    arm.start()
    times: list[float] = []
    try:
        for seconds in (settle_s, settle_s, *[look_s] * looks):
            least_ns = max(1, round(seconds * 1e9))
            order = Go(origin_ns=0, until=0, steps=None, least_ns=least_ns, guard_ns=0, burn_ns=0, stamps=False)
            report = arm.pace.slice(order, _patience_s(times))
            times.append((report.t1_ns - report.t0_ns) / report.steps)
    except ArmLostError:
        raise arm.why() from None
    return Calibration(start_s=arm.start_ns / 1e9, step_ns=statistics.median(times[2:]))


FASTEST = Calibration(start_s=0.0, step_ns=1e6)
"""A job that starts at once and steps as fast as any: what it has no time for, none has."""
CALIBRATION_S = _SETTLE_S * 2 + _LOOK_S * _LOOKS
"""What calibration takes at least."""


def plan(wish: Wish, found: Calibration, *, spent_s: float = 0.0) -> Plan:
    """Return the designs for a wish.

    Args:
        wish: what was asked for.
        found: how fast the job is.
        spent_s: what of `time_s` has passed.

    Raises:
        UsageError: `usage`: too short a time for one block, or a step too slow for slices.
    """
    modes = _SHARES[wish.mode]
    step_s = found.step_ns / 1e9
    if step_s > SLICE_CAP_S and any(mode is not Mode.SEQUENTIAL for mode in modes):
        raise UsageError(
            Code.USAGE,
            f"a step of this job takes {format_s(step_s)}; slices of at most {SLICE_CAP_S:.0f} s cannot hold one",
            hint="measure it with --mode sequential, or make the step smaller",
        )
    slices = _Slices.of(wish, step_s)
    left_s = None if wish.time_s is None else wish.time_s - spent_s - _WRAP_UP_S
    designs: dict[Mode, Design] = {}
    expected_s = 0.0
    for mode, share in modes.items():
        part_s = None if left_s is None else left_s * share
        if mode is Mode.SEQUENTIAL:
            designs[mode], takes_s = _legs(wish, found, part_s)
        else:
            designs[mode], takes_s = _interleaved(mode, wish, slices, found, part_s)
        expected_s += takes_s
    return Plan(designs=designs, guard_steps=slices.guard_steps, expected_s=expected_s + _WRAP_UP_S)


@dataclass(frozen=True, slots=True)
class _Slices:
    """How long slices and guards are."""

    _: KW_ONLY
    steps: int
    guard_steps: int
    block_s: float
    warmup: WarmupRule

    @classmethod
    def of(cls, wish: Wish, step_s: float) -> _Slices:
        short = wish.time_s is not None and wish.time_s <= _SHORT_TIME_S
        steps = max(1, round((_SHORT_SLICE_S if short else SLICE_S) / step_s))
        guard_steps = max(LEAST_GUARD_STEPS, math.ceil(_GUARD_S / step_s))
        block_s = SLICES_PER_BLOCK * (steps + guard_steps) * step_s
        least_ns = round(wish.warmup_s * 1e9)
        brief = wish.time_s is not None and wish.time_s <= _BRIEF_TIME_S
        window_blocks = _BRIEF_WINDOW_BLOCKS if brief else WarmupRule().window_blocks
        window_ns = round(window_blocks * block_s * 1e9)
        cap_ns = min(_CAP_NS, max(_CAP_FACTOR * least_ns, 2 * window_ns))
        if wish.time_s is not None:
            # A time that was promised is kept, and blocks are worth more than a longer wait for a machine that does not
            # come to rest: it is flagged as soon as the rule has seen what it looks at.
            cap_ns = max(least_ns, window_ns)
        return cls(
            steps=steps,
            guard_steps=guard_steps,
            block_s=block_s,
            warmup=WarmupRule(least_ns=least_ns, cap_ns=max(cap_ns, least_ns), window_blocks=window_blocks),
        )

    @property
    def warmup_s(self) -> float:
        """About how long a warm-up takes."""
        least_s = max(self.warmup.least_ns / 1e9, self.warmup.window_blocks * self.block_s)
        return min(_WARMUP_FACTOR * least_s, self.warmup.cap_ns / 1e9 + self.block_s)


def _interleaved(
    mode: Mode, wish: Wish, slices: _Slices, found: Calibration, part_s: float | None
) -> tuple[Design, float]:
    fixed_s = slices.warmup_s + 2 * found.start_s + _END_S + (_LIFECYCLE_S if mode is Mode.INTERLEAVED else 0.0)
    if part_s is None:
        sessions, blocks = wish.sessions or STANDARD_SESSIONS, wish.blocks or _DEFAULT_BLOCKS
    else:
        sessions, blocks = _divided(part_s, fixed_s, slices.block_s, wish.blocks)
        if blocks < 1:
            needed_s = _needed_s(wish, fixed_s + slices.block_s, part_s)
            raise UsageError(
                Code.USAGE,
                f"too short a time for one block: this job needs at least about {format_s(needed_s)}",
                hint="most of it is the warm-up: --warmup makes it shorter",
            )
    measured_s = sessions * blocks * SLICES_PER_BLOCK * slices.steps * found.step_ns / 1e9
    margin = wish.margin_ppm or default_margin_ppm(sessions=sessions, measured_s=round(measured_s))
    design = Design(
        mode=mode,
        seed=wish.seed,
        sessions=sessions,
        blocks_per_session=blocks,
        slice_steps=slices.steps,
        guard_steps=LEAST_GUARD_STEPS,
        guard_ns=LEAST_GUARD_NS,
        launch_order=wish.order,
        margin_ppm=margin,
        warmup=slices.warmup,
    )
    return design, sessions * (fixed_s + blocks * slices.block_s)


def _divided(part_s: float, fixed_s: float, block_s: float, blocks: int | None) -> tuple[int, int]:
    """Return how many sessions of how many blocks fit."""
    if blocks is not None:
        sessions = int(part_s / (fixed_s + blocks * block_s))
        return (sessions, blocks) if sessions else (1, 0)
    sessions = min(STANDARD_SESSIONS, int(part_s / (fixed_s + _FEWEST_BLOCKS * block_s)))
    # Blocks of one pair say nothing of another: short sessions, if need be, but more than one or two.
    sessions = max(sessions, min(_FEW_SESSIONS, int(part_s / (fixed_s + _FEW_BLOCKS * block_s))))
    # A long measurement has room for both.
    sessions = max(1, sessions, int(part_s / (fixed_s + _MANY_BLOCKS * block_s)))
    return sessions, int((part_s / sessions - fixed_s) / block_s)


def _needed_s(wish: Wish, session_s: float, part_s: float) -> float:
    """Return the time in which one such session has room, from the share that `part_s` is."""
    assert wish.time_s is not None  # noqa: S101 - only a wish with a time has parts
    return wish.time_s - part_s + session_s if len(_SHARES[wish.mode]) == 1 else 3 * session_s + _WRAP_UP_S + 10


def _legs(wish: Wish, found: Calibration, part_s: float | None) -> tuple[Design, float]:
    """Return the sequential design: pairs in both orders, and four of them where there is the time."""
    around_s = 2 * (found.start_s + _END_S) + _LIFECYCLE_S
    warm_s = min(_LEG_WARMUP_S, wish.warmup_s)
    pairs, leg_s = wish.sessions or 2, _DEFAULT_LEG_S
    if wish.steps is not None:
        leg_s = wish.steps * found.step_ns / 1e9
        if part_s is not None:
            pairs = int(part_s / (around_s + 2 * (_LEG_WARMUPS * warm_s + leg_s))) // 2 * 2 or 1
            if part_s < around_s + 2 * (_LEG_WARMUPS * warm_s + leg_s):
                raise UsageError(
                    Code.USAGE, f"too short a time for one pair of legs of {wish.steps} steps, {format_s(leg_s)} each"
                )
    elif part_s is not None:
        for pairs in (4, 2, 1):
            leg_s = (part_s / pairs - around_s) / 2 - _LEG_WARMUPS * warm_s
            if leg_s >= (_LONG_LEG_S if pairs > 2 else _LEAST_LEG_S):
                break
        if leg_s < _LEAST_LEG_S:
            needed_s = around_s + 2 * (_LEG_WARMUPS * warm_s + _LEAST_LEG_S)
            raise UsageError(
                Code.USAGE, f"too short a time for one pair of legs: this part needs at least {format_s(needed_s)}"
            )
    warm_ns = round(warm_s * 1e9)
    design = Design(
        mode=Mode.SEQUENTIAL,
        seed=wish.seed,
        sessions=pairs,
        blocks_per_session=1,
        slice_steps=wish.steps,
        leg_ns=None if wish.steps is not None else round(leg_s * 1e9),
        guard_steps=0,
        guard_ns=0,
        launch_order=wish.order,
        margin_ppm=wish.margin_ppm or MARGIN_QUICK_PPM,
        warmup=WarmupRule(least_ns=warm_ns, cap_ns=max(warm_ns, _CAP_NS)),
    )
    return design, pairs * (around_s + 2 * (_LEG_WARMUPS * warm_s + leg_s))


def _patience_s(times: list[float]) -> float:
    """Return how long to wait for the next look: the first step may compile, the others are known."""
    return 600.0 if not times else 60.0 + 20 * max(times) / 1e9
