"""How long each step of a run took, in microseconds by a clock that cannot be set.

`total` is everything from the start of the process to the end of zeroization but the time in which the
workload itself ran: what protection costs, whatever the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from glasshouse.evidence.receipt import LIFECYCLE

__all__ = ["Lifecycle", "process_start_us"]


def process_start_us() -> int:
    """Return when this process was started, in microseconds of CLOCK_BOOTTIME; to a hundredth of a second."""
    descriptor = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)
    return int(fields[19]) * 1_000_000 // os.sysconf("SC_CLK_TCK")


class Lifecycle:
    """Adds up the time of each step.

    Args:
        start_us: when the run began, by CLOCK_BOOTTIME.
    """

    def __init__(self, start_us: int) -> None:
        self._start_us = start_us
        self._took: dict[str, int] = {}
        self._work_us = 0

    @staticmethod
    def now_us() -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000

    def since_start(self, step: str) -> None:
        """Record that `step` lasted from the start of the process until now."""
        self._took[step] = self.now_us() - self._start_us

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of the block to a step."""
        begun = self.now_us()
        self._took.setdefault(name, 0)
        try:
            yield
        finally:
            self._took[name] += self.now_us() - begun

    def worked(self, elapsed_us: int) -> None:
        """Record for how long the workload itself ran."""
        self._work_us = elapsed_us

    def to_json(self) -> dict[str, int | None]:
        """Return every step of a receipt; None for those that were not reached."""
        total = self.now_us() - self._start_us - self._work_us + self._took.get("seal_outputs", 0)
        return {**{name: self._took.get(name) for name in LIFECYCLE}, "total": max(0, total)}
