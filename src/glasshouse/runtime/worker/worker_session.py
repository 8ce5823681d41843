"""One worker from its first frame to its last: which message may come when, and what becomes of it.

Laws: a message out of its order ends the run; an end that was not announced is distinguished as well as the
machine allows (out of memory, killed, failed); plaintext goes from the link straight into the sealer.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

from glasshouse.errors import Code, RunError
from glasshouse.evidence.events import PROGRESS_US
from glasshouse.evidence.receipt import Work
from glasshouse.package.outputs import SealedOutput
from glasshouse.runtime.confine.memory_limits import oom_kills
from glasshouse.runtime.keys.sealing import Outputs
from glasshouse.runtime.lines.part_messages import PartBegins, PartEnds, PartsThere
from glasshouse.runtime.loop import Loop, Timer
from glasshouse.runtime.worker import worker_messages as messages
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.runtime.worker.worker_messages import WorkerLink
from glasshouse.wire.canonical import Json

if TYPE_CHECKING:
    from glasshouse.runtime.lines.part_intake import PartIntake  # few runs have a line

# Rounded up: a timer that is early by a microsecond would have to wait for another.
PROGRESS_INTERVAL_S = 1.001


class Stage(IntEnum):
    """How far a worker is."""

    STARTED = 0
    CONFIRMED = 1
    READY = 2
    IMPORTED = 3
    OPENED = 4
    RUNNING = 5
    FINISHED = 6


class ProgressReports:
    """What of a worker's progress goes into the log (spec/evidence.md section 2.3).

    The log lies on the host's disk, so progress is a way out of the sandbox: one report a second at most, whatever else
    happens; the clock is the agent's; the count grows; unit and total are those that were given first.
    """

    def __init__(self) -> None:
        self._last: messages.Progress | None = None
        self._waiting: messages.Progress | None = None

    def offer(self, progress: messages.Progress) -> bool:
        """Keep a report for the next time that one may leave, if its count has grown; return whether it was kept."""
        last = self._last
        if last is not None and (progress.done <= last.done or progress.unit != last.unit):
            return False
        self._waiting = progress
        return True

    def take(self, now_us: int) -> messages.Progress | None:
        """Return the report that leaves `now_us` after work began, if there is one and the last was a second before."""
        waiting, last = self._waiting, self._last
        if waiting is None or (last is not None and now_us < last.elapsed_us + PROGRESS_US):
            return None
        total = waiting.total if last is None or last.total is None else last.total
        self._last, self._waiting = replace(waiting, total=total, elapsed_us=now_us), None
        return self._last

    def bounded(self, work: Work, now_us: int) -> Work:
        """Return the work as the receipt may state it: in its reports' unit and not less, nor longer than the run."""
        elapsed_us = min(work.elapsed_us, now_us)
        if self._last is None:
            return replace(work, elapsed_us=elapsed_us)
        unit, done = self._last.unit, self._last.done
        return replace(work, unit=unit, done=max(done, work.done) if work.unit == unit else done, elapsed_us=elapsed_us)


class WorkerSession:
    """The agent's side of the conversation.

    Args:
        on_stage: called as the worker is `OPENED` and then `RUNNING`, before anything that it sent after that.
        on_progress: called with progress, at most once a second (`ProgressReports`).
        on_output: called with each sealed output.
        sealing: entered while an output is sealed, to time it.
    """

    def __init__(
        self,
        worker: Worker,
        loop: Loop,
        *,
        on_stage: Callable[[Stage], None],
        on_progress: Callable[[messages.Progress], None],
        on_output: Callable[[messages.OutputBegins, SealedOutput], None],
        sealing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.worker, self.stage = worker, Stage.STARTED
        self.outputs: Outputs | None = None  # takes its outputs; set before the grant
        self.parts: PartIntake | None = None  # takes the parts of its checkpoints, of a leg of a line
        self.imports_us: int | None = None  # its own measure of importing its frameworks, once imported
        self.finished: messages.Finished | None = None  # its last message
        self._loop, self._sealing = loop, sealing
        self._on_stage, self._on_progress, self._on_output = on_stage, on_progress, on_output
        self._reports = ProgressReports()
        self._running_since_s = 0.0
        self._progress_timer: Timer | None = None
        self._oom_kills = oom_kills()
        self._gone = False
        self._header: messages.OutputBegins | None = None
        self._link = WorkerLink(worker.link, loop, on_message=self._message, on_data=self._data, on_closed=self._closed)

    def reach(self, stage: Stage, *, within_s: float) -> None:
        """Wait until the worker is as far as `stage`; raises `RunError`: it failed, is gone, or takes too long."""
        if not self._loop.run_until(lambda: self.stage >= stage, within_s=within_s):
            raise RunError(Code.WORKER_FAILED, f"the worker was not {stage.name.lower()} within {within_s:g} s")

    def give(
        self,
        grant: int,
        grant_bytes: int,
        package: int,
        outputs: Outputs,
        *,
        parts: PartIntake | None = None,
        resumed: int | None = None,
        machines: tuple[int, int, int] | None = None,
    ) -> None:
        """Hand it the keys of its inputs and the package, by their descriptors; raises `RunError`.

        Args:
            resumed: of the file with the chunks of the checkpoint that it goes on from.
            machines: of a job on several: which this is, how many there are, and the descriptor of the relay.
        """
        self.outputs, self.parts = outputs, parts
        message: dict[str, Json] = {"type": "grant", "bytes": grant_bytes}
        descriptors = [grant, package]
        if machines is not None:
            message |= {"machine": machines[0], "machines": machines[1]}
            descriptors.append(machines[2])
        if resumed is not None:
            message["resume"] = True
            descriptors.append(resumed)
        self._link.send(message, descriptors)

    def tell(self, message: dict[str, Json]) -> None:
        """Send it a message; one that is gone is fine."""
        with suppress(RunError):
            self._link.send(message)

    def wait_for_end(self, *, within_s: float) -> None:
        """Wait until a finished worker has exited; one that lingers is killed by `end`."""
        self._loop.run_until(lambda: self._gone, within_s=within_s)

    def end(self) -> None:
        """Kill and reap it, wipe the link and drop what never became an output. May be called twice."""
        if self.worker.pidfd >= 0:
            self._loop.unwatch(self.worker.pidfd)
        try:
            self.worker.end()
        finally:
            self._link.close()
            if self._progress_timer is not None:
                self._progress_timer.cancel()
            if self.outputs is not None:
                self.outputs.discard()
            if self.parts is not None:
                self.parts.discard()

    def _message(self, message: messages.Message) -> None:
        match message:
            case messages.Sandbox() if self.stage is Stage.STARTED:
                self.worker.confirm(message.report)
                self._loop.watch(self.worker.pidfd, self._ended)
                self.stage = Stage.CONFIRMED
            case messages.Failed():
                # A rank that the kernel ended for want of memory is seen by the worker only to be gone.
                short = message.code is Code.RANK_LOST and oom_kills() > self._oom_kills
                code = Code.OUT_OF_MEMORY if short else message.code
                raise RunError(code, "the worker gave up; why is in the sealed log")
            case messages.Ready() if self.stage is Stage.CONFIRMED:
                self.stage = Stage.READY
            case messages.Imported() if self.stage is Stage.READY:
                self.imports_us = message.us
                self.stage = Stage.IMPORTED
            case messages.Opened() if self.stage is Stage.IMPORTED and self.outputs is not None:
                self._reached(Stage.OPENED)
            case messages.Running() if self.stage is Stage.OPENED:
                self._reached(Stage.RUNNING)
            case _:
                self._work(message)

    def _reached(self, stage: Stage) -> None:
        self.stage = stage
        self._running_since_s = self._loop.now_s()
        self._on_stage(stage)

    def _work(self, message: messages.Message) -> None:
        if self.stage is not Stage.RUNNING or self.outputs is None:
            raise _out_of_order()
        match message:
            case messages.Progress():
                if self._reports.offer(message) and self._progress_timer is None:
                    self._report_progress()
            case messages.OutputBegins() if not self._part_comes:
                with self._sealing():
                    self.outputs.begin(name=message.name, kind=message.kind, size=message.size)
                self._header = message
            case messages.OutputEnds() if self._header is not None:
                with self._sealing():
                    sealed = self.outputs.end(message.sha256)
                self._on_output(self._header, sealed)
            case PartBegins() if self.parts is not None and not self.outputs.in_progress:
                self.parts.begin(message)
            case PartEnds() if self.parts is not None:
                self.tell(self.parts.end(message))
            case PartsThere() if self.parts is not None:
                self.parts.there(message)
            case messages.Finished() if not self.outputs.in_progress and not self._part_comes:
                self._report_progress()
                if self._progress_timer is not None:
                    self._progress_timer.cancel()
                self.finished = replace(message, work=self._reports.bounded(message.work, self._work_us()))
                self.stage = Stage.FINISHED
            case _:
                raise _out_of_order()

    def _data(self, plaintext: memoryview) -> None:
        if self.outputs is None:
            raise _out_of_order()
        if self.parts is not None and self._part_comes:
            self.parts.data(plaintext)
            return
        with self._sealing():
            self.outputs.data(plaintext)

    @property
    def _part_comes(self) -> bool:
        return self.parts is not None and self.parts.in_progress

    def _progress_due(self) -> None:
        self._progress_timer = None
        self._report_progress()

    def _report_progress(self) -> None:
        """Record what was reported, if its time has come; what comes sooner waits, and at the end is left out."""
        progress = self._reports.take(self._work_us())
        if progress is not None:
            self._on_progress(progress)
            if self._progress_timer is not None:
                self._progress_timer.cancel()
            self._progress_timer = self._loop.after(PROGRESS_INTERVAL_S, self._progress_due)

    def _work_us(self) -> int:
        """Return for how long the workload has run, by this process's clock."""
        return int((self._loop.now_s() - self._running_since_s) * 1e6)

    def _closed(self) -> None:
        # The process may live a moment longer; its exit code is the better evidence.
        if self.worker.pidfd < 0:
            raise RunError(Code.WORKER_FAILED, "the worker ended before it began")

    def _ended(self) -> None:
        """Take what its process had still sent before it ended, then judge."""
        self._loop.unwatch(self.worker.pidfd)
        self._gone = True
        self._link.drain()
        code = self.worker.poll()
        if self.stage is not Stage.FINISHED or code != 0:
            raise self._explain(code)

    def _explain(self, code: int | None) -> RunError:
        if code is None:
            # Ended, yet not ours to reap: its tracer holds on to what is left.
            return RunError(Code.WORKER_KILLED, "the worker was ended while it was traced")
        if code >= 0:
            return RunError(Code.WORKER_FAILED, f"the worker ended without a message (exit code {code})")
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return RunError(Code.OUT_OF_MEMORY, "the machine ran out of memory and ended the worker")
        if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
            return RunError(Code.WORKER_KILLED, "the worker was killed from outside")
        return RunError(Code.WORKER_FAILED, f"the worker crashed (signal {-code})")


def _out_of_order() -> RunError:
    return RunError(Code.WORKER_FAILED, "the worker sent a message out of its turn")
