"""What a job of a given length costs, and whether the hooks' own time explains it.

``T_protected(D) = F + (1 + δ)·D``: F is what every run pays, in seconds (`lifecycle`), and δ the steady-state slowdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from glasshouse.bench.overhead.blocks import Block
from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.estimate import Estimate
from glasshouse.bench.overhead.interval import Interval, decimal
from glasshouse.wire.canonical import Json

__all__ = ["DURATIONS_S", "DirectAccounting", "JobCost", "direct_accounting", "job_costs"]

DURATIONS_S = (900, 3_600, 86_400)


@dataclass(frozen=True, slots=True)
class JobCost:
    """The cost of protection for a job that takes `duration_s` without it.

    Args:
        duration_s: D.
        extra_s: F + δ·D.
        relative: δ + F/D.
        interval: for `relative`: [δ_low + F_low/D, δ_high + F_high/D]. Adding the ends of two 95 % intervals covers
            at least 90 % whatever their dependence (Bonferroni), and more than 95 % where they are independent.
    """

    _: KW_ONLY
    duration_s: int
    extra_s: float
    relative: float
    interval: Interval | None

    def to_json(self) -> dict[str, Json]:
        return {
            "duration_s": self.duration_s,
            "extra_s": decimal(self.extra_s),
            "relative": decimal(self.relative),
            "relative_95": None if self.interval is None else self.interval.to_json(),
        }


@dataclass(frozen=True, slots=True)
class DirectAccounting:
    """The time spent inside protection hooks, summed.

    Args:
        hooks_ns: the sum, over the protected slices that count.
        measured_ns: what those slices lasted.
        slowdown: h/(1 − h) for h = hooks/measured: T_p = T_r + hooks gives δ = T_p/T_r − 1.
        disagrees: whether δ's 95 % interval does not hold it; None without an interval.
    """

    _: KW_ONLY
    hooks_ns: int
    measured_ns: int
    slowdown: float
    disagrees: bool | None

    def to_json(self) -> dict[str, Json]:
        return {
            "disagrees": self.disagrees,
            "hooks_ns": str(self.hooks_ns),
            "measured_ns": str(self.measured_ns),
            "slowdown": decimal(self.slowdown),
        }


def job_costs(found: Estimate, *, once_s: float, once_interval: Interval | None = None) -> tuple[JobCost, ...]:
    """Return the cost for jobs of 15 minutes, an hour and a day.

    Args:
        found: δ and its interval.
        once_s: F; below 0 in a noisy measurement whose raw arms started slowly.
        once_interval: the 95 % interval of F; its size is taken as known where None.
    """
    ends = once_interval or Interval(low=once_s, high=once_s)
    steady = found.slowdown_interval()
    return tuple(
        JobCost(
            duration_s=duration_s,
            extra_s=once_s + found.slowdown * duration_s,
            relative=found.slowdown + once_s / duration_s,
            interval=None
            if steady is None
            else Interval(low=steady.low + ends.low / duration_s, high=steady.high + ends.high / duration_s),
        )
        for duration_s in DURATIONS_S
    )


def direct_accounting(blocks: Sequence[Block], found: Estimate) -> DirectAccounting | None:
    """Return the direct accounting over the blocks that count, or None where a protected slice has none."""
    slices = [one for block in blocks if block.included for one in block.slices if one.arm is Arm.PROTECTED]
    hooks = [one.hooks_ns for one in slices if one.hooks_ns is not None]
    measured_ns = sum(one.duration_ns for one in slices)
    if not slices or len(hooks) < len(slices) or sum(hooks) >= measured_ns:
        return None
    share = sum(hooks) / measured_ns
    slowdown = share / (1 - share)
    interval = found.slowdown_interval()
    return DirectAccounting(
        hooks_ns=sum(hooks),
        measured_ns=measured_ns,
        slowdown=slowdown,
        disagrees=None if interval is None else not interval.holds(slowdown),
    )
