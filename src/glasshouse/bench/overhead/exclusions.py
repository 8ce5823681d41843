"""Which blocks do not count: rules that were fixed before the run, that never look at the arm or at the result.

Laws: the verdict on a block is a function of the design and of its own slices (and where the slice before it
ended); naming the arms the other way round changes no verdict; a block counts whole or not at all; a rule
whose cause could not be looked at is listed as unobserved, never as passed. No rule reads how long a slice
took compared with others: a slow slice is data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise

from glasshouse.bench.overhead.design import Arm, Design, Mode
from glasshouse.bench.overhead.slices import Slice, Throttle

__all__ = ["CLOCK_RELATIVE", "CLOCK_SLACK_NS", "STEAL_LIMIT_PPM", "Rule", "broken_rules", "unobserved"]

STEAL_LIMIT_PPM = 50_000
# Two clocks may be read this far apart, and one may be slewed by NTP (at most 500 ppm, RFC 5905).
CLOCK_SLACK_NS = 1_000_000
CLOCK_RELATIVE = 1_000


class Rule(StrEnum):
    """Why a block does not count, in the order in which the reasons are named."""

    CLOCK = "clock-anomaly"
    NONFINITE = "nonfinite-loss"
    WORK = "work-mismatch"
    ECC = "ecc-error"
    THERMAL = "thermal-throttle"
    POWER = "power-brake"
    FOREIGN = "foreign-gpu-process"
    STEAL = "steal"


def broken_rules(design: Design, slices: Sequence[Slice], *, previous_ns: int = 0) -> tuple[Rule, ...]:
    """Return the rules that exclude a complete block, in the order of `Rule`; none when it counts.

    Args:
        design: what was planned.
        slices: the block's slices in their order.
        previous_ns: t1 of the slice before this block in the same session.
    """
    found = {rule for rule, broken in _EACH.items() if any(broken(one) for one in slices)}
    if _clock(slices, previous_ns):
        found.add(Rule.CLOCK)
    if _work(design, slices):
        found.add(Rule.WORK)
    return tuple(rule for rule in Rule if rule in found)


def unobserved(slices: Sequence[Slice]) -> tuple[Rule, ...]:
    """Return the rules whose cause was not looked at in at least one of the slices."""
    blind = {
        Rule.ECC: any(one.ecc_errors is None for one in slices),
        Rule.THERMAL: any(one.throttle is None for one in slices),
        Rule.POWER: any(one.throttle is None for one in slices),
        Rule.FOREIGN: any(one.foreign_processes is None for one in slices),
        Rule.STEAL: any(one.steal_ppm is None for one in slices),
    }
    return tuple(rule for rule in Rule if blind.get(rule, False))


_EACH: dict[Rule, Callable[[Slice], bool]] = {
    Rule.NONFINITE: lambda one: not one.loss_finite,
    Rule.ECC: lambda one: bool(one.ecc_errors),
    Rule.THERMAL: lambda one: Throttle.THERMAL in (one.throttle or ()),
    Rule.POWER: lambda one: Throttle.POWER_BRAKE in (one.throttle or ()),
    Rule.FOREIGN: lambda one: bool(one.foreign_processes),
    Rule.STEAL: lambda one: (one.steal_ppm or 0) > STEAL_LIMIT_PPM,
}


def _clock(slices: Sequence[Slice], previous_ns: int) -> bool:
    """Return whether time stood still, ran backwards, or ran differently on another clock (a paused laptop)."""
    for one in slices:
        if one.duration_ns <= 0 or abs(one.clock_skew_ns) > CLOCK_SLACK_NS + one.duration_ns // CLOCK_RELATIVE:
            return True
    ends = [previous_ns, *(one.t1_ns for one in slices)]
    return any(one.t0_ns < end for one, end in zip(slices, ends, strict=False))


def _work(design: Design, slices: Sequence[Slice]) -> bool:
    """Return whether a slice did other work than was planned, or the arms did not do the same."""
    for one in slices:
        if one.done_after - one.done_before != one.steps:
            return True
        if design.slice_steps is not None and one.steps != design.slice_steps:
            return True
    raw = [one for one in slices if one.arm is Arm.RAW]
    protected = [one for one in slices if one.arm is Arm.PROTECTED]
    return any(_differ(design, mine, theirs) for mine, theirs in zip(raw, protected, strict=True)) or (
        design.mode is not Mode.SEQUENTIAL and (_gap(raw) or _gap(protected))
    )


def _differ(design: Design, mine: Slice, theirs: Slice) -> bool:
    """Compare the k-th slice of one arm with the k-th of the other."""
    if mine.first_batch != theirs.first_batch:
        return True
    if design.slice_steps is None or mine.done_after != theirs.done_after:
        # After another number of steps another state is right; digests are comparable only at the same count.
        return False
    return mine.state_sha256 != theirs.state_sha256


def _gap(slices: Sequence[Slice]) -> bool:
    """Return whether a worker's count ran backwards, or lacks the guard steps that were reported."""
    return any(after.done_before - before.done_after != after.guard_steps for before, after in pairwise(slices))
