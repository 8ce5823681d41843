"""One leg after the other: what the published rows did, and how much of it is order.

d_RP is ln(T_p/T_r) of a pair in which the raw leg ran first, d_PR of one in which the protected leg did. With an
order effect π (the second leg is slower by π), d_RP = L + π and d_PR = L − π, hence L = (d_RP + d_PR)/2 and
π = (d_RP − d_PR)/2: the two-period crossover without carry-over (Hills & Armitage 1979, Br. J. Clin. Pharmacol. 8:7).
One such unit has no interval, however long its legs were; the spread within a leg says nothing about the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from glasshouse.bench.overhead.blocks import Session
from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.estimate import block_contrast
from glasshouse.bench.overhead.interval import Interval, Mean, decimal, mean_of
from glasshouse.wire.canonical import Json

__all__ = ["SINGLE", "Pair", "SequentialResult", "sequential", "sequential_pairs"]

SINGLE = "n=1, no interval"
ONE_ORDER = "one order only: the order effect is in it"


@dataclass(frozen=True, slots=True)
class Pair:
    """One pair of legs: which ran first, and ln(T_p/T_r)."""

    _: KW_ONLY
    first: Arm
    log_ratio: float


@dataclass(frozen=True, slots=True)
class SequentialResult:
    """The log ratio from sequential pairs.

    Args:
        log_ratio: the mean of the units' L; a unit is one pair of either order.
        order_effect: the mean of the units' π; None where only one order ran.
        mean, order_mean: with standard errors, from two units on.
        units: how many.
        unpaired: pairs left over, which had no partner of the other order.
        pairs: all of them, in order.
        label: what a reader has to know with the number, or empty.
    """

    _: KW_ONLY
    log_ratio: float
    order_effect: float | None
    mean: Mean | None
    order_mean: Mean | None
    units: int
    unpaired: int
    pairs: tuple[Pair, ...]
    label: str

    def interval(self, level: float = 0.95) -> Interval | None:
        return None if self.mean is None else self.mean.interval(level)

    def to_json(self) -> dict[str, Json]:
        found = self.interval()
        order = None if self.order_mean is None else self.order_mean.interval(0.95)
        return {
            "interval_95": None if found is None else found.to_json(),
            "label": self.label,
            "log_ratio": decimal(self.log_ratio),
            "order_effect": None if self.order_effect is None else decimal(self.order_effect),
            "order_effect_95": None if order is None else order.to_json(),
            "pairs": [{"first": pair.first.value, "log_ratio": decimal(pair.log_ratio)} for pair in self.pairs],
            "slowdown": decimal(math.expm1(self.log_ratio)),
            "throughput_loss": decimal(-math.expm1(-self.log_ratio)),
            "units": self.units,
            "unpaired": self.unpaired,
        }


def sequential_pairs(sessions: Sequence[Session]) -> list[Pair]:
    """Return the pairs of legs that count, in order."""
    return [
        Pair(first=session.launched_first, log_ratio=block_contrast(block.sequence, block.step_times_ns))
        for session in sessions
        for block in session.included
    ]


def sequential(pairs: Sequence[Pair]) -> SequentialResult:
    """Return the estimate from pairs; the k-th raw-first pair is matched with the k-th protected-first one.

    Raises:
        ValueError: no pair.
    """
    if not pairs:
        raise ValueError("no pair of legs to estimate from")
    raw_first = [pair.log_ratio for pair in pairs if pair.first is Arm.RAW]
    protected_first = [pair.log_ratio for pair in pairs if pair.first is Arm.PROTECTED]
    both = min(len(raw_first), len(protected_first))
    matched = list(zip(raw_first[:both], protected_first[:both], strict=True))
    values = [(rp + pr) / 2 for rp, pr in matched] or raw_first or protected_first
    orders = [(rp - pr) / 2 for rp, pr in matched]
    labels = [SINGLE] if len(values) == 1 else []
    return SequentialResult(
        log_ratio=math.fsum(values) / len(values),
        order_effect=math.fsum(orders) / both if both else None,
        mean=mean_of(values) if len(values) > 1 else None,
        order_mean=mean_of(orders) if both > 1 else None,
        units=len(values),
        unpaired=len(pairs) - 2 * both if both else 0,
        pairs=tuple(pairs),
        label="; ".join(labels if both else [*labels, ONE_ORDER]),
    )
