"""The one word that may be claimed, the test behind it, and what a job of some length takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from glasshouse_bench.estimate import Estimate, Interval, estimate, t_tail

__all__ = ["Claim", "JobCost", "Word", "claim", "job_costs"]

_TOST_LEVEL = 0.90
JOBS_S = (900, 3600, 86400)


class Word(StrEnum):
    """The whole of what is claimed; a speed-up is not among the possible answers."""

    EQUIVALENT = "equivalent"
    OVERHEAD = "overhead"
    INCONCLUSIVE = "inconclusive"
    BIAS_SUSPECTED = "bias_suspected"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A word and the equivalence test behind it.

    Args:
        tost_p: the larger p-value of the two one-sided tests; None without an interval.
    """

    word: Word
    tost_p: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCost:
    """What protection adds to a job whose raw length is `seconds`.

    Args:
        protected_s: F + (1 + δ)·D.
        relative: δ + F/D.
        interval: the ends of those of δ and of F, added; None without both.
    """

    seconds: int
    protected_s: float
    relative: float
    interval: Interval | None


def claim(found: Estimate, *, margin: float, null: bool = False) -> Claim:
    """Return the word for an estimate, the first that fits of spec/measurement.md, section 5.

    Args:
        margin: greater than 0.
        null: whether both arms were raw, so that an effect of either sign is a bias.
    """
    if not 0 < margin < 1:
        raise ValueError(f"a margin of {margin}")
    measured, inner = found.measured(), found.interval(_TOST_LEVEL)
    if measured is None or inner is None:
        return Claim(word=Word.INCONCLUSIVE, tost_p=None)
    if measured.high < 0 or (null and measured.low > 0):
        word = Word.BIAS_SUSPECTED
    elif -margin < inner.low and inner.high < margin and found.steady:
        word = Word.EQUIVALENT
    elif measured.low > 0:
        word = Word.OVERHEAD
    else:
        word = Word.INCONCLUSIVE
    return Claim(word=word, tost_p=_tost(found, margin))


def job_costs(found: Estimate, lifecycle_s: Sequence[float]) -> list[JobCost]:
    """Return T_protected(D) = F + (1 + δ)·D for 15 minutes, an hour and a day.

    Args:
        lifecycle_s: F of each session, in seconds; with two or more there is an interval.
    """
    steady, fixed = found.interval(), estimate(lifecycle_s)
    spread = fixed.measured()
    costs = []
    for seconds in JOBS_S:
        relative = math.expm1(found.log_ratio) + fixed.log_ratio / seconds
        ends = None
        if steady is not None and spread is not None:
            slope = steady.slowdown
            ends = Interval(slope.low + spread.low / seconds, slope.high + spread.high / seconds)
        costs.append(JobCost(seconds=seconds, protected_s=seconds * (1 + relative), relative=relative, interval=ends))
    return costs


def _tost(found: Estimate, margin: float) -> float:
    """Return the larger p of the two one-sided tests (Schuirmann 1987), from the bounds that the interval has."""
    low, high = found.bounds
    distances = (margin - high - found.shift, margin + low)
    error, df = found.standard_error, found.sessions - 1
    if not error:
        return float(min(distances) <= 0)
    return max(t_tail(distance / error, df) for distance in distances)
