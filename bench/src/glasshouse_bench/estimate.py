"""One number from many sessions: the mean of their log ratios with Student's t (spec/measurement.md, section 5).

The session is the unit, because a pair of processes has an effect of its own (Mytkowicz et al., ASPLOS 2009; Kalibera &
Jones, ISMM 2013). Within it the ratio of sums is taken: a trimmed mean deletes real, bunched cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

__all__ = ["Estimate", "Interval", "estimate", "t_quantile", "t_tail", "welch"]

LEVEL = 0.95
POWER = 0.8
STEADY_P = 0.01


@dataclass(frozen=True, slots=True)
class Interval:
    """Two ends, such as those of a log ratio."""

    low: float
    high: float

    @property
    def slowdown(self) -> Interval:
        """Of T_protected/T_raw − 1, where the ends are log ratios."""
        return Interval(math.expm1(self.low), math.expm1(self.high))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The mean of session contrasts, each an estimate of ln(T_protected/T_raw).

    Args:
        log_ratio: the mean.
        standard_error: of the mean, widened; None for a single session, which has no interval.
        sessions: how many there are, K; the degrees of freedom are K − 1.
        background: what the agent's and the watchdog's processor time adds to a protected step, as a part of it.
        contention: what steps that ran beside the other arm may have added to the mean at most; below 0, taken from it.
        steady_p: of first against last third (Welch); None for fewer than six sessions.
    """

    log_ratio: float
    standard_error: float | None
    sessions: int
    background: float
    contention: float
    steady_p: float | None

    @property
    def steady(self) -> bool:
        """Whether the first and the last third agree; never for too few sessions to look."""
        return self.steady_p is not None and self.steady_p >= STEADY_P

    @property
    def shift(self) -> float:
        """What the background adds to the upper end: both arms pay for it, so that no contrast shows it."""
        return math.log1p(self.background)

    def measured(self, level: float = LEVEL) -> Interval | None:
        """Return the two-sided interval (Student 1908), as far down or up as contention may have moved the mean."""
        if self.standard_error is None:
            return None
        reach = t_quantile((1 + level) / 2, self.sessions - 1) * self.standard_error
        low, high = self.bounds
        return Interval(low - reach, high + reach)

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest mean that contention leaves possible."""
        return self.log_ratio - max(self.contention, 0.0), self.log_ratio - min(self.contention, 0.0)

    def interval(self, level: float = LEVEL) -> Interval | None:
        """Return the interval that is published: its upper end holds the background."""
        found = self.measured(level)
        return None if found is None else Interval(found.low, found.high + self.shift)

    @property
    def minimum_detectable(self) -> float | None:
        """The log ratio that this many sessions of this spread tell from 0 with 80 % power."""
        return None if self.standard_error is None else _noncentrality(self.sessions - 1) * self.standard_error


def estimate(
    contrasts: Sequence[float] | NDArray[np.float64],
    *,
    background: float = 0.0,
    widening: float = 1.0,
    contention: Sequence[float] | NDArray[np.float64] = (),
) -> Estimate:
    """Return the estimate from the contrasts of the complete sessions, in order.

    Args:
        contrasts: ln(Σt_P/n_P) − ln(Σt_R/n_R) of each.
        background: processor seconds of agent and watchdog for each second in protected slots, ≥ 0.
        widening: factor on the standard error, fixed in the design, ≥ 1.
        contention: of each session, in order (`Blocks.contention`); empty where none can be.

    Raises:
        ValueError: no session, a value that is no number, or one outside its limits.
    """
    values = np.asarray(contrasts, dtype=float)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError("an estimate needs one finite contrast or more")
    if not (0 <= background < math.inf and 1 <= widening < math.inf):
        raise ValueError(f"background {background} or widening {widening} outside its limits")
    if len(contention) not in (0, len(values)) or not np.isfinite(list(contention)).all():
        raise ValueError("contention of other sessions, or no number")
    number = len(values)
    error = None if number < 2 else widening * math.sqrt(float(np.var(values, ddof=1)) / number)
    third = number // 3
    steady_p = None if third < 2 else welch(values[:third], values[number - third :])
    return Estimate(
        log_ratio=math.fsum(values) / number,
        standard_error=error,
        sessions=number,
        background=background,
        contention=math.fsum(contention) / number,
        steady_p=steady_p,
    )


def welch(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the two-sided p-value for equal means of two samples (Welch 1947).

    Raises:
        ValueError: a sample of fewer than two values.
    """
    if min(len(one), len(other)) < 2:
        raise ValueError("Welch's test needs two values of each")
    parts = [float(np.var(sample, ddof=1)) / len(sample) for sample in (one, other)]
    distance = abs(float(np.mean(one)) - float(np.mean(other)))
    if sum(parts) == 0:
        return 1.0 if distance == 0 else 0.0
    df = sum(parts) ** 2 / sum(part**2 / (len(sample) - 1) for part, sample in zip(parts, (one, other), strict=True))
    return 2 * t_tail(distance / math.sqrt(sum(parts)), df)


def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t distribution."""
    return float(special.stdtrit(df, probability))


def t_tail(value: float, df: float) -> float:
    """Return the probability that Student's t is above `value`."""
    return float(special.stdtr(df, -value))


@lru_cache(maxsize=256)
def _noncentrality(df: int) -> float:
    """Return λ with P(|T| > t(0.975, df)) = 0.8 for T noncentral t (Johnson, Kotz & Balakrishnan, chapter 31)."""
    critical = t_quantile((1 + LEVEL) / 2, df)
    # The power is the mean over S of Φ(λ − c·S) + Φ(−λ − c·S), with df·S² chi-squared. In x = ln S the density is as
    # exp(df·(x − e^(2x)/2)), which vanishes at both ends, so that the trapezoidal rule is exact to rounding. scipy's
    # noncentral t gives NaN where df is small and λ large.
    reach = math.sqrt(45 / df)
    x = np.linspace(-(45 / df + 0.5 + reach), reach, 4001)
    weight = np.exp(df * (x - np.exp(2 * x) / 2 + 0.5))
    weight /= weight.sum()
    scale = critical * np.exp(x)

    def shortfall(effect: float) -> float:
        return float(weight @ (special.ndtr(effect - scale) + special.ndtr(-effect - scale))) - POWER

    return float(optimize.brentq(shortfall, 0.0, 2 * critical + 3, xtol=1e-12))
