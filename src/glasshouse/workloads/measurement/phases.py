"""Where the time of a step goes: the phases of some steps of a measured job (spec/measurement.md, section 3).

Law: the loop of a job that is not profiled is the same, and starts no profiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from glasshouse.wire.canonical import Json
from glasshouse.workloads.measurement.wait_times import WaitTimes

PHASES = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "hooks")
_HOOKS = "hooks"
# What PyTorch names by itself.
_NAMED = {"enumerate(DataLoader)#": "data", "Optimizer.step#": "optimizer"}
# The first steps under a profiler fill its buffers and take several times as long.
_COLD = 3
_MARK = "glasshouse: first step"
_UNNAMED: AbstractContextManager[None] = nullcontext()


def ranges(profile: int | None) -> Callable[[str], AbstractContextManager[object]]:
    """Return what names a part of a step, for the loop of a job with the parameter `profile`."""
    return _range if profile else lambda _name: _UNNAMED


@contextmanager
def _range(name: str) -> Iterator[None]:
    import torch.profiler

    with torch.profiler.record_function(name):
        yield
        wait_for_device()  # or the phase would end when its work is queued


def wait_for_device() -> None:
    """Return when the GPU, if this process uses one, has done its work."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.synchronize()


class Profiler:
    """Profiles some steps of one worker, after its warm-up, in the thread that trains; waits are a phase too."""

    def __init__(self, steps: int, *, after: int, waits: WaitTimes) -> None:
        self._steps, self._first, self._waits = steps, after + _COLD, waits
        self._calls = 0
        self._profile: Any = None
        self._whole = False

    def boundary(self, take: Callable[[], bool]) -> bool:
        """Take a step boundary by `take`, and return whether to go on."""
        step, self._calls = self._calls, self._calls + 1
        # Both before the boundary is taken: they belong to the step before, which is not profiled.
        if step == self._first - _COLD:
            self._start()
        if step == self._first and self._profile is not None:
            with sys.modules["torch"].profiler.record_function(_MARK):
                pass
        going_on = take()
        if step == self._first + self._steps:
            self._rest()
        return going_on

    def line(self) -> dict[str, Json] | None:
        """Return the line of the record; None where the job ended before all steps were profiled."""
        if self._profile is not None:
            self._profile.stop()
        if not self._whole:
            return None
        found = dict.fromkeys(PHASES, 0)
        for name, took_ns in _outermost(self._profile):
            found[name] += took_ns
        phases: list[Json] = [{"name": name, "ns": found[name]} for name in PHASES if found[name]]
        return {"first": self._first, "kind": "phases", "phases": phases, "steps": self._steps}

    def _start(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return  # a script without PyTorch has no phases
        import torch.profiler as profiler

        self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CPU])
        self._profile.start()
        self._waits.shown = lambda: profiler.record_function(_HOOKS)

    def _rest(self) -> None:
        """Profile nothing more; to end the profiler takes long, and would run beside the other arm's steps."""
        self._whole = True
        if self._profile is not None:
            self._waits.shown = None
            self._profile.toggle_collection_dynamic(False, self._profile.activities)


def _outermost(profile: Any) -> Iterator[tuple[str, int]]:
    """Yield phases and their nanoseconds; what lies in another phase (the hooks in a loader of data) is that one's."""
    if profile is None:
        return
    # What `profile.events()` reads too, which makes an object of each operation: a hundred times as long.
    events = sorted(profile.profiler.kineto_results.events(), key=lambda one: one.start_ns())
    mark = next((one for one in events if one.name() == _MARK), None)
    if mark is None:
        return
    until_ns = mark.end_ns()
    for one in events:
        called = one.name()
        name = next((phase for named, phase in _NAMED.items() if called.startswith(named)), called)
        in_thread = one.start_thread_id() == mark.start_thread_id()
        if name in PHASES and in_thread and one.start_ns() >= until_ns:
            until_ns = one.end_ns()
            yield name, one.duration_ns()
