"""A worker whose steps are measured (spec/measurement.md): each waits for its slot, and their record is an output.

Beside the steps, by direct accounting: how long it waits in its channel and its inputs, which is what protection
costs it, and the phases of some steps. Laws: nothing outside this process decides when a step may begin, or sees that
one did; the loop of a job that is not profiled is the same, and starts no profiler.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from glasshouse.task.channel import Channel, Message
from glasshouse.task.handle import Task
from glasshouse.task.inputs import Buffer, Inputs
from glasshouse.wire.canonical import Json
from glasshouse.workloads.measurement.slots import Pacer, Plan

if TYPE_CHECKING:
    from glasshouse.package.streams import SealedAsset

PHASES = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "hooks")
_HOOKS = "hooks"
# What PyTorch names by itself.
_NAMED = {"enumerate(DataLoader)#": "data", "Optimizer.step#": "optimizer"}
# The first steps under a profiler fill its buffers and take several times as long.
_COLD = 3
_MARK = "glasshouse: first step"
_UNNAMED: AbstractContextManager[None] = nullcontext()


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


class WaitTimes:
    """How long one thread, the one that trains, has waited in its channel and its inputs."""

    def __init__(self) -> None:
        self.ns = 0
        # Makes what a profiler sees of each wait.
        self.shown: Callable[[], AbstractContextManager[object]] | None = None
        self._thread = threading.get_ident()
        self._wait: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == self._thread:
            self.ns -= time.perf_counter_ns()
            if self.shown is not None:
                self._wait = self.shown()
                self._wait.__enter__()

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self.ns += time.perf_counter_ns()
            if self._wait is not None:
                self._wait.__exit__(None, None, None)
                self._wait = None


class TimedChannel(Channel):
    """A channel whose sending and delivering is timed."""

    def __init__(self, channel: Channel, waits: WaitTimes) -> None:
        self._channel, self._waits = channel, waits

    @property
    def stopping(self) -> bool:  # type: ignore[override]  # is the other's
        """Whether the owner ended the job."""
        return self._channel.stopping

    def send(self, message: Message) -> None:
        with self._waits:
            self._channel.send(message)

    def output(self, header: Message, source: BinaryIO) -> str:
        with self._waits:
            return self._channel.output(header, source)


class TimedInputs(Inputs):
    """Inputs whose reading, and so decrypting, is timed."""

    def __init__(self, inputs: Inputs, waits: WaitTimes) -> None:
        self._inputs, self._waits = inputs, waits

    @property
    def sizes(self) -> Mapping[str, int]:  # type: ignore[override]  # is the other's
        return self._inputs.sizes

    def open(self, name: str) -> BinaryIO:
        with self._waits:
            return cast(BinaryIO, io.BufferedReader(_TimedStream(self._inputs.open(name), self._waits), 1 << 16))

    def read_into(self, name: str, destination: Buffer, offset: int) -> int:
        with self._waits:
            return self._inputs.read_into(name, destination, offset)

    def sealed(self, name: str) -> SealedAsset | None:
        return self._inputs.sealed(name)


class _TimedStream(io.RawIOBase):
    """A stream that is read under `WaitTimes`; lines and small reads are cut out of larger ones above it."""

    def __init__(self, stream: BinaryIO, waits: WaitTimes) -> None:
        super().__init__()
        self._stream, self._waits = stream, waits
        self.seek, self.tell = stream.seek, stream.tell  # type: ignore[method-assign]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, destination: Buffer) -> int:  # type: ignore[override]
        with self._waits:
            return int(self._stream.readinto(destination))  # type: ignore[attr-defined]

    def close(self) -> None:
        self._stream.close()
        super().close()


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
