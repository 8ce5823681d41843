"""Paces a job that is being measured: it runs in slices between two orders, and stands still in between (ADR 0009).

A step is one call of `Task.progress`, and its boundary is the beginning of that call: the device is waited for, t1
is read, and the worker parks, all before the call does its own work. So the reporting of the call at which a
slice begins is in that slice, and that of the call at which it ends is in the guard of the next: every slice
holds the work of as many calls as it has steps, in either arm alike. A call with the count 0 marks the
beginning and is no step.

Laws: between an order and its report nothing is read from or written to whoever gives the orders; time in which
the job is parked does not count for the task's once-a-second reports; what comes instead of an order ends the job.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from glasshouse.task.handle import Task
from glasshouse.wire.pacing import End, Go, Order, Parked, Report, Slice
from glasshouse.workloads.phases import Phases, Probe

__all__ = ["Pacer", "Port"]


class Port(Protocol):
    """How a pacer talks to whoever gives it orders."""

    def tell(self, report: Report) -> None: ...

    def order(self) -> Order | None:
        """Wait for an order; None when there will be no more, and the job is to stop."""


class Pacer:
    """Stands at every step boundary of one task (`Task.pace_by`).

    Args:
        task: whose clock stands still while the job is parked.
        port: where orders come from.
        stop: ends the job as its owner would; may raise into the caller.
        stopping: whether the job is being stopped.
        hooks_ns: how long this thread has waited for channel and inputs so far.
    """

    def __init__(
        self,
        task: Task,
        port: Port,
        *,
        stop: Callable[[], None],
        stopping: Callable[[], bool],
        hooks_ns: Callable[[], int],
    ) -> None:
        self._task, self._port, self._stop, self._stopping, self._hooks_ns = task, port, stop, stopping, hooks_ns
        self._thread = 0  # the one that parked first; what others report is no boundary
        self._over = False
        self._done = 0
        self._look_at = 0  # nothing happens before so many steps are done
        self._order: Order | None = None
        self._begun: _Begun | None = None
        self._stood_at = 0
        self._resumed_ns = 0
        self._phases: Phases | None = None
        self._probe: Probe | None = None
        self._burn_ns = 0

    def __call__(self, done: int, loss: Any) -> None:
        """Take a step boundary; the first one, and the end of every slice, return when the job may go on."""
        if self._over:
            return
        if self._thread != threading.get_ident():
            if not self._thread:
                self._thread = threading.get_ident()
                self._done = 1 if done else 0
                self._park(Parked(done=self._done), since_ns=time.perf_counter_ns())
            return
        if not done:
            return
        if self._burn_ns:
            _burn(self._burn_ns)
        self._done += 1
        if self._done >= self._look_at:
            self._look(loss)

    def _look(self, loss: Any) -> None:
        if self._stopping():
            self._over = True
        elif isinstance(self._order, End):
            self._end()
        elif isinstance(self._order, Go):
            if self._begun is None:
                self._maybe_begin(self._order)
            else:
                self._maybe_close(self._order, self._begun, loss)

    def _maybe_begin(self, go: Go) -> None:
        """Begin the slice, unless the guard lasts on."""
        if self._probe is not None:
            self._probe.boundary()
        if self._done < go.until or time.perf_counter_ns() - self._resumed_ns < go.guard_ns:
            return
        wait_for_device()
        if self._phases is not None:
            self._phases.begin()
        self._begun = _Begun(self._done, self._hooks_ns())
        self._look_at = self._done + (go.steps or 1)

    def _maybe_close(self, go: Go, begun: _Begun, loss: Any) -> None:
        """End the slice if it is over: report it and park."""
        if go.least_ns is not None and time.perf_counter_ns() - begun.t0_ns < go.least_ns:
            return
        if self._phases is not None:
            self._phases.end()
        wait_for_device()
        t1_ns, boot_ns, cpu_ns = time.perf_counter_ns(), _boot_ns(), time.process_time_ns()
        hooks_ns = self._hooks_ns() - begun.hooks_ns
        self._task.stamps.on = False
        report = Slice(
            done_before=begun.done,
            done_after=self._done,
            t0_ns=begun.t0_ns - go.origin_ns,
            t1_ns=t1_ns - go.origin_ns,
            guard_steps=begun.done - self._stood_at,
            guard_ns=begun.t0_ns - self._resumed_ns,
            skew_ns=(boot_ns - begun.boot_ns) - (t1_ns - begun.t0_ns),
            hooks_ns=hooks_ns,
            loss_finite=loss is None or math.isfinite(float(loss)),
            steps=self._done - begun.done,
            cpu_ns=cpu_ns - begun.cpu_ns,
            device_bytes=_device_bytes(),
            wait_ppm=None if self._probe is None else self._probe.wait_ppm(),
            phases=None if self._phases is None else self._phases.spent_ns(),
        )
        self._park(report, since_ns=t1_ns)

    def _park(self, report: Report, *, since_ns: int) -> None:
        """Report, wait for an order, and take it up; the task's clock stands still since `since_ns`."""
        self._begun, self._stood_at = None, self._done
        try:
            self._port.tell(report)
            self._order = self._port.order()
        except (ConnectionError, EOFError):
            self._order = None
        if isinstance(self._order, Go):
            self._burn_ns = self._order.burn_ns
            self._time_phases(self._order)
        self._resumed_ns = time.perf_counter_ns()
        self._task.stood_still((self._resumed_ns - since_ns) / 1e9)
        if isinstance(self._order, Go):
            self._look_at = self._order.until if self._probe is None else 0
            self._maybe_begin(self._order)
        elif isinstance(self._order, End) and self._done < self._order.until:
            self._look_at, self._burn_ns = self._order.until, 0
        else:
            self._end()

    def _time_phases(self, go: Go) -> None:
        cuda = _cuda()
        self._phases = Phases(cuda, steps=go.steps) if go.stamps else None
        self._probe = Probe(cuda) if go.stamps and cuda is not None else None
        self._task.stamps.mark = self._phases.mark if self._phases is not None else None
        self._task.stamps.on = self._phases is not None

    def _end(self) -> None:
        self._over = True
        if not self._stopping():
            self._stop()


class _Begun:
    """Where a slice began."""

    def __init__(self, done: int, hooks_ns: int) -> None:
        self.done, self.hooks_ns = done, hooks_ns
        self.cpu_ns, self.t0_ns, self.boot_ns = time.process_time_ns(), time.perf_counter_ns(), _boot_ns()


def wait_for_device() -> None:
    """Return when the GPU, if this process uses one, has done all that it was told."""
    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()


def _cuda() -> Any:
    """Return `torch.cuda` if this job has loaded it and uses it, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _device_bytes() -> int | None:
    cuda = _cuda()
    return None if cuda is None else int(cuda.max_memory_allocated())


def _boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _burn(nanoseconds: int) -> None:
    until_ns = time.perf_counter_ns() + nanoseconds
    while time.perf_counter_ns() < until_ns:
        pass
