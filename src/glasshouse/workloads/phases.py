"""Times the phases of the steps of one slice (`Task.stamps`), by the clock or, on a GPU, by its events.

The phases of a slice add up to it: what nobody marked is `residual`. The method is that of Lee et al.,
arXiv:2501.11771, section 3.
"""

from __future__ import annotations

import time
from typing import Any

from glasshouse.errors import Code, UsageError
from glasshouse.wire.pacing import PHASES

__all__ = ["Phases", "Probe"]

_REST = "residual"
_KNOWN = frozenset(PHASES)
_EVENTS_A_STEP = 8
_MOST_EVENTS = 1 << 16


class Phases:
    """Adds up how long each phase lasts, between `begin` and `end`.

    Args:
        cuda: `torch.cuda` where the work is done on a GPU: the marks are then events in its stream, made before
            the slice and read after it, for a mark must not wait for the device. None: the clock.
        steps: of the slice, when known.
    """

    def __init__(self, cuda: Any = None, *, steps: int | None = None) -> None:
        self._cuda = cuda
        # What a mark costs is in the step that it times, so it only notes when: the adding up comes after the slice.
        self._marks: list[str] = []
        self._times_ns: list[int] = []
        self._events: list[Any] = []
        if cuda is not None:
            count = min(_MOST_EVENTS, _EVENTS_A_STEP * ((steps or 0) + 2))
            self._events = [self._event() for _ in range(count)]

    def mark(self, phase: str) -> None:
        """End the phase that is under way and begin another.

        Raises:
            UsageError: `usage`: there is no such phase.
        """
        if phase not in _KNOWN:
            raise UsageError(Code.USAGE, f"there is no phase {phase[:40]!r}", hint="one of " + ", ".join(PHASES))
        if self._cuda is None:
            self._times_ns.append(time.perf_counter_ns())
            self._marks.append(phase)
        else:
            self._record(phase)

    def begin(self) -> None:
        """Forget what was marked in the guard: the slice begins."""
        self._marks.clear()
        self._times_ns.clear()
        self.mark(_REST)

    def end(self) -> None:
        """The slice is over; called before the device is waited for."""
        self.mark(_REST)

    def spent_ns(self) -> dict[str, int]:
        """Return the time of every phase that was marked, and of what was not; on a GPU, after waiting for it."""
        spent_ns = {_REST: 0}
        for index, phase in enumerate(self._marks[:-1]):
            spent_ns[phase] = spent_ns.get(phase, 0) + self._between_ns(index)
        return {phase: spent_ns[phase] for phase in PHASES if phase in spent_ns}

    def _between_ns(self, index: int) -> int:
        """Return the time from one mark to the next."""
        if self._cuda is None:
            return self._times_ns[index + 1] - self._times_ns[index]
        between_ms = float(self._events[index].elapsed_time(self._events[index + 1]))
        return round(between_ms * 1e6)

    def _record(self, phase: str) -> None:
        if len(self._marks) == len(self._events):
            self._events.append(self._event())
        self._events[len(self._marks)].record()
        self._marks.append(phase)

    def _event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()  # what the first use of an event costs is paid now
        return event


class Probe:
    """Finds out who waits for whom, in steps that nobody records: each begins with a GPU that has nothing left to do.

    What passes from the end of the host's part of such a step to the end of the GPU's is time in which the host would
    have to wait. A host that is the slower one has almost none: the GPU ends with it. A wait within the step, such as
    reading a loss, counts as the host's own time.

    Args:
        cuda: `torch.cuda`.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._free_ns: int | None = None
        self._waited_ns = self._steps_ns = 0

    def boundary(self) -> None:
        """A step has been told to the GPU; wait until it is done."""
        told_ns = time.perf_counter_ns()
        self._cuda.synchronize()
        done_ns = time.perf_counter_ns()
        if self._free_ns is not None:
            self._waited_ns += done_ns - told_ns
            self._steps_ns += done_ns - self._free_ns
        self._free_ns = done_ns

    def wait_ppm(self) -> int | None:
        """Return the share of the waiting in all steps so far, in millionths; None before the first."""
        return min(1_000_000, self._waited_ns * 1_000_000 // self._steps_ns) if self._steps_ns else None
