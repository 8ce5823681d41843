"""Numbers as a reader meets them: one way to write a percentage, an interval, a time.

The minus is a minus sign and the unit does not break from its number. Tables write three decimals of a percent; a
sentence writes as many as its interval supports (`digits_for`).
"""

from __future__ import annotations

import math

from glasshouse.bench.overhead.interval import Interval

__all__ = ["between", "count", "digits_for", "duration", "p_value", "percent", "seconds", "step_time"]

TABLE_DIGITS = 3
NB = "\u00a0"


def percent(value: float, digits: int = TABLE_DIGITS, *, sign: bool = True) -> str:
    """Return a fraction as a percentage, `+0.083 %`."""
    found = f"{100 * value:+.{digits}f}" if sign else f"{100 * value:.{digits}f}"
    if not float(found):
        found = found.lstrip("+-")
    return found.replace("-", "\u2212") + f"{NB}%"


def between(interval: Interval | None, digits: int = TABLE_DIGITS) -> str:
    """Return an interval of fractions, `−0.051 % to +0.214 %`."""
    if interval is None:
        return "no interval"
    return f"{percent(interval.low, digits)} to {percent(interval.high, digits)}"


def digits_for(interval: Interval | None, *limits: float) -> int:
    """Return how many decimals of a percent a sentence needs.

    Two; more for a width of less than 0.1 %, and where an end would look like one of `limits` and is not.
    """
    if interval is None:
        return 2
    width = 100 * interval.width
    least = 2 if width <= 0 else min(max(math.ceil(-math.log10(width)) + 1, 2), 4)
    for digits in range(least, 5):
        shown = {round(100 * end, digits) for end in (interval.low, interval.high)}
        if not shown & {round(100 * limit, digits) for limit in limits}:
            return digits
    return least


def p_value(value: float) -> str:
    """Return `p = 0.042`, or `p < 0.001`."""
    return f"p{NB}={NB}{value:.3f}" if value >= 0.001 else f"p{NB}<{NB}0.001"


def count(number: int, name: str, plural: str = "") -> str:
    """Return `1 session`, `12 sessions`."""
    return f"{number:,}{NB}{name if number == 1 else plural or name + 's'}"


def seconds(value: float) -> str:
    """Return a time of at most minutes with three significant digits, `12.4 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size or unit == "µs":
            number = value / size
            digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
            return f"{number:,.{digits}f}".replace("-", "\u2212") + f"{NB}{unit}"
    raise AssertionError("unreachable")


def step_time(value_ns: float) -> str:
    return seconds(value_ns / 1e9)


def duration(value_s: float) -> str:
    """Return a length of time in the largest unit that fits, `24 h`, `1 h 5 min`."""
    whole = round(value_s)
    if whole < 60:
        return f"{whole}{NB}s" if value_s >= 10 else seconds(value_s)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest if not hours else 0, "s")]
    return " ".join(f"{number}{NB}{unit}" for number, unit in parts if number)
