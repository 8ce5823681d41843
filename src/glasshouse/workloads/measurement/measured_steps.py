"""A worker whose steps are measured: each waits for its slot, and their record is an output (spec/measurement.md).

Law: nothing outside this process decides when a step may begin, or sees that one did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from glasshouse.task.handle import Task
from glasshouse.wire.canonical import Json
from glasshouse.workloads.measurement.phases import Profiler, wait_for_device
from glasshouse.workloads.measurement.slots import Pacer, Plan
from glasshouse.workloads.measurement.wait_times import WaitTimes


class MeasuredSteps:
    """Takes the step boundaries of one task (`Task.measure_by`) in the thread that reports first.

    Args:
        slots: the schedule from the job's parameters.
        end: ends the job as its owner would; called once, where the schedule is over. May raise into the caller.
        profile: how many steps after the warm-up are profiled; None for none.

    Raises:
        UsageError: `usage`, for a schedule outside its limits.
    """

    def __init__(
        self,
        slots: Mapping[str, Json],
        task: Task,
        *,
        end: Callable[[], None],
        waits: WaitTimes,
        profile: int | None = None,
    ) -> None:
        plan = Plan.from_json(dict(slots))
        self._pacer = Pacer(plan, synchronise=wait_for_device, hooks_ns=lambda: waits.ns)
        self._profiler = None if profile is None else Profiler(profile, after=plan.warmup_steps, waits=waits)
        self._task, self._end = task, end
        self._thread: int | None = None
        self._done: int | None = None

    def boundary(self, done: int, loss: Any) -> None:
        """Take a call of `Task.progress`; returns when the next step may begin, or the job is to end."""
        thread = threading.get_ident()
        # The count of the end is reported once more by a loop that is over, and what other threads report is no step.
        if self._task.over or (self._thread or thread) != thread or done == self._done:
            return
        self._thread, self._done = thread, done
        take = partial(self._pacer.boundary, loss)
        if not (take() if self._profiler is None else self._profiler.boundary(take)):
            self._task.over = True
            self._end()

    def record(self) -> bytes:
        """Return the whole record; the steps end here, if they have not."""
        self._pacer.stop()
        phases = None if self._profiler is None else self._profiler.line()
        return self._pacer.record(tokens_per_step=self._task.tokens_per_step, phases=phases)
