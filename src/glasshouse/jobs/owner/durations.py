"""Lengths of time, `90s`, `10m`, `2h`, `7d`, and moments, as text."""

from __future__ import annotations

import re
import time
from typing import Any

from glasshouse.workloads.job_keys import Kind, whole

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_FORM = r"([1-9][0-9]{0,6})([smhd])"


def parse_s(text: str) -> int | None:
    """Return whole seconds, or None for what is not a length of time."""
    found = re.fullmatch(_FORM, text)
    return int(found[1]) * _UNITS[found[2]] if found else None


def format_text(seconds: int) -> str:
    """Return whole seconds in the form that `parse_s` takes, in the largest unit that is exact."""
    unit = next(unit for unit in ("d", "h", "m", "s") if seconds % _UNITS[unit] == 0)
    return f"{seconds // _UNITS[unit]}{unit}"


def format_s(seconds: float) -> str:
    """Return a length of time for people: `0.42 s`, `12.3 s`, `4 min 05 s`, `2 h 07 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def utc(time_us: int) -> str:
    """Return a moment, in microseconds since the epoch, for people anywhere: `2026-11-22 14:30:05 UTC`."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_us // 1_000_000))
    except (OverflowError, ValueError, OSError):
        return f"{time_us} µs after 1970"


def duration(limit_s: int) -> Kind:
    """A length of time, as `90s`, `10m`, `2h` or `7d`: at most `limit_s` seconds."""

    def read(value: Any, _path: str) -> int:
        seconds = parse_s(value) if isinstance(value, str) else None
        if seconds is None or seconds > limit_s:
            raise ValueError
        return seconds

    allowed = f"a time: text such as '90s', '10m', '2h' or '7d', at most {limit_s // 3600}h"
    return Kind(allowed, {"type": "string", "pattern": whole(_FORM)}, read, format_text)
