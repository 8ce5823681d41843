"""Lengths of time and moments as text for people, and the clock of what has a deadline."""

from __future__ import annotations

import time


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


class SystemClock:
    """The machine's clock at the start of this process, and the time since: sleep counts, setting the clock does not.

    A clock that is set meanwhile ends no run early and stretches no cap.
    """

    def now_us(self) -> int:
        """Return microseconds since 1970."""
        return _BEGAN_US + _passed_us()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


def _passed_us() -> int:
    # Linux's counts while the machine sleeps; on macOS the other one does.
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1000


_BEGAN_US = time.time_ns() // 1000 - _passed_us()
