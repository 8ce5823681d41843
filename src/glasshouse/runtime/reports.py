"""What of a worker's progress goes into the log, which lies on the host's disk: progress is a way out of the sandbox.

Laws (spec/evidence.md section 2.3): one report a second at most, whatever else happens; the clock is the agent's; the
count grows; unit and total are those that were given first; a loss is written in one way only.
"""

from __future__ import annotations

from dataclasses import replace

from glasshouse.evidence.rules import PROGRESS_US
from glasshouse.runtime.worker_messages import Progress, Work

__all__ = ["Reports"]


class Reports:
    """The reports of one run; `now_us` is time since the workload began, by the agent's clock."""

    def __init__(self) -> None:
        self._last: Progress | None = None
        self._waiting: Progress | None = None

    def offer(self, progress: Progress) -> bool:
        """Keep what the worker reports for the next time that one may leave; returns whether it was kept.

        One whose count has not grown, or that counts something else, is left out.
        """
        last = self._last
        if last is not None and (progress.done <= last.done or progress.unit != last.unit):
            return False
        self._waiting = progress
        return True

    def take(self, now_us: int) -> Progress | None:
        """Return the report that leaves now, if there is one and the last one was a second ago."""
        waiting, last = self._waiting, self._last
        if waiting is None or (last is not None and now_us < last.elapsed_us + PROGRESS_US):
            return None
        total = waiting.total if last is None or last.total is None else last.total
        self._last, self._waiting = replace(waiting, total=total, elapsed_us=now_us), None
        return self._last

    def bounded(self, work: Work, now_us: int) -> Work:
        """Return the work as the receipt may say it: in its reports' unit and not less, nor longer than the run."""
        elapsed_us = min(work.elapsed_us, now_us)
        if self._last is None:
            return replace(work, elapsed_us=elapsed_us)
        unit, done = self._last.unit, self._last.done
        return replace(work, unit=unit, done=max(done, work.done) if work.unit == unit else done, elapsed_us=elapsed_us)
