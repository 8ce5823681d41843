"""Means and the intervals around them: Student's t, trimmed means, the smallest effect that could be seen.

Every function takes plain numbers; degrees of freedom need not be whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from glasshouse.wire.canonical import Json

__all__ = [
    "TRIM",
    "Interval",
    "Mean",
    "decimal",
    "detectable",
    "mean_of",
    "t_quantile",
    "t_tail",
    "trimmed_mean",
    "trimmed_mean_of",
]

TRIM = 0.1
POWER = 0.8
SIGNIFICANCE = 0.05


@dataclass(frozen=True, slots=True)
class Interval:
    """From `low` to `high`."""

    _: KW_ONLY
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> dict[str, Json]:
        return {"high": decimal(self.high), "low": decimal(self.low)}


@dataclass(frozen=True, slots=True)
class Mean:
    """An estimate with its standard error, and the degrees of freedom of that."""

    _: KW_ONLY
    value: float
    standard_error: float
    df: float

    def interval(self, level: float) -> Interval:
        """Return the two-sided Student interval, value ± t(1 − (1 − level)/2, df)·SE (Student 1908)."""
        reach = t_quantile(1 - (1 - level) / 2, self.df) * self.standard_error
        return Interval(low=self.value - reach, high=self.value + reach)


def decimal(value: float) -> str:
    """Return a finite number with twelve significant digits, as spec/overhead-artifact.md section 1 writes it."""
    if not math.isfinite(value):
        raise ValueError(f"{value} has no decimal form")
    return f"{value + 0.0:.11e}"


def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t distribution."""
    return float(special.stdtrit(df, probability))


def t_tail(value: float, df: float) -> float:
    """Return the probability that Student's t is above `value`."""
    return float(special.stdtr(df, -value))


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of two or more values, s/√n, and n − 1 degrees of freedom.

    Raises:
        ValueError: fewer than two values, which have no spread.
    """
    number = len(values)
    if number < 2:
        raise ValueError(f"{number} values have no interval")
    middle = math.fsum(values) / number
    variance = math.fsum((value - middle) ** 2 for value in values) / (number - 1)
    return Mean(value=middle, standard_error=math.sqrt(variance / number), df=number - 1)


def trimmed_mean(values: Sequence[float], *, trim: float = TRIM) -> float:
    """Return the mean without the g = ⌊trim·n⌋ smallest and the g largest values (Tukey & McLaughlin 1963).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("the mean of nothing")
    cut = _cut(len(values), trim)
    kept = sorted(values)[cut : len(values) - cut]
    return math.fsum(kept) / len(kept)


def trimmed_mean_of(values: Sequence[float], *, trim: float = TRIM) -> Mean:
    """Return the trimmed mean of two or more values with its Winsorised standard error.

    SE = s_w / ((1 − 2g/n)·√n), where s_w is the standard deviation after each trimmed value is replaced by the
    nearest one that was kept, with n − 2g − 1 degrees of freedom (Tukey & McLaughlin 1963, Sankhyā A 25:331; Wilcox,
    Introduction to Robust Estimation). Without anything to trim this is `mean_of`.

    Raises:
        ValueError: fewer than two values.
    """
    number = len(values)
    if number < 2:
        raise ValueError(f"{number} values have no interval")
    cut = _cut(number, trim)
    ordered = sorted(values)
    low, high = ordered[cut], ordered[number - cut - 1]
    spread = mean_of([min(max(value, low), high) for value in ordered])
    return Mean(
        value=trimmed_mean(values, trim=trim),
        standard_error=spread.standard_error / (1 - 2 * cut / number),
        df=number - 2 * cut - 1,
    )


def detectable(mean: Mean) -> float:
    """Return the true effect that such a run would have told from 0 with 80 % power, two-sided at 5 %.

    λ·SE, where λ solves P(|T| > t(0.975, df)) = 0.8 for T noncentral t with df degrees of freedom and noncentrality λ
    (Johnson, Kotz & Balakrishnan, Continuous Univariate Distributions 2, chapter 31). For many degrees of freedom
    λ = 1.960 + 0.842 = 2.802.
    """
    return _noncentrality(mean.df) * mean.standard_error


@lru_cache(maxsize=1024)
def _noncentrality(df: float) -> float:
    critical = t_quantile(1 - SIGNIFICANCE / 2, df)
    # T = (Z + λ)/S with df·S² chi-squared: the power is the mean over S of Φ(λ − c·S) + Φ(−λ − c·S). In x = ln S the
    # density is proportional to exp(df·(x − e^(2x)/2)); outside these ends it is below e^(−45) of its peak, and the
    # trapezoidal rule is exact to rounding for a smooth integrand that vanishes at both. scipy's own noncentral t is
    # not used because it gives NaN where df is small and λ large.
    reach = math.sqrt(45 / df)
    x = np.linspace(-(45 / df + 0.5 + reach), reach, 4001)
    weight = np.exp(df * (x - np.exp(2 * x) / 2 + 0.5))
    weight /= weight.sum()
    cut = critical * np.exp(x)

    def shortfall(effect: float) -> float:
        return float(weight @ (special.ndtr(effect - cut) + special.ndtr(-effect - cut))) - POWER

    return float(optimize.brentq(shortfall, 0.0, 2 * critical + 3, xtol=1e-12))


def _cut(number: int, trim: float) -> int:
    # 0.1·n in binary may fall a hair below a whole number.
    return math.floor(trim * number + 1e-9)
