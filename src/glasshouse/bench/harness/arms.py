"""The two arms: a raw worker, and a whole protected run; each rests and runs on the word of a pacing channel.

Laws: an arm that was started is ended by `finish` or by `close`, whatever happens between, and leaves no process
behind; it is told nothing but the orders of its channel.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from glasshouse.bench.harness.pace import ArmLostError, Pace
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.processes import children_of
from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.jobs.collect import look_inside
from glasshouse.jobs.embedded import Embedded
from glasshouse.jobs.home import Home
from glasshouse.jobs.identity import Identity
from glasshouse.jobs.raw import Plain, RawProcess
from glasshouse.jobs.run import prepare
from glasshouse.jobs.rundir import RunFolder
from glasshouse.jobs.supervise import Ended, Interrupts, supervise
from glasshouse.providers.local import LocalProvider
from glasshouse.wire.states import Outcome

__all__ = ["Finished", "ProtectedArm", "RawArm", "Runner", "process_cpu_ns"]

# A model of seven thousand million parameters is made, or read, before the first step.
START_S = 900.0
# A protected arm that ends seals its outputs and searches memory; its supervisor gives up after two minutes.
END_S = 180.0
_RAW_STOP_S = 10.0
_POLL_S = 0.02
_LINE_CHARS, _LAST_LINES = 200, 3
_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True)
class Finished:
    """An arm that trained to its end.

    Args:
        done: steps, by its own count.
        start_ns: from its launch to its first park.
        outputs: kind, class and plaintext SHA-256 of each, in order; these digests are written nowhere.
        salts: of each of a protected run's outputs: with them its receipt commits to the digests of weights.
        lifecycle_us, imports_us: of a protected run, from its receipt.
        bundle: its receipt as it lies in the run's folder; None for a raw arm.
    """

    _: KW_ONLY
    done: int
    start_ns: int
    outputs: tuple[tuple[str, str, bytes], ...]
    salts: tuple[bytes, ...] = ()
    lifecycle_us: Mapping[str, int | None] | None = None
    imports_us: int | None = None
    bundle: bytes | None = None


class Runner(Protocol):
    """What the engine asks of an arm."""

    pace: Pace
    start_ns: int  # from its launch to its first park

    def start(self) -> None:
        """Launch it and wait until it rests at its first step; raises `GlasshouseError`."""

    def pids(self) -> tuple[int, ...]:
        """Its processes now; `cpu_ns` speaks of these until it is asked again."""

    def cpu_ns(self) -> int | None:
        """CPU time of all its processes so far; None when one of them cannot be asked."""

    def finish(self, until: int) -> Finished:
        """Let it train until so many steps are done, end and be collected; raises `GlasshouseError`."""

    def why(self) -> GlasshouseError:
        """Say why an arm whose channel closed has ended."""

    def close(self) -> None:
        """End it now if it has not ended, and leave nothing."""


def process_cpu_ns(pid: int) -> int | None:
    """Return a process's CPU time in nanoseconds, all threads together, or None when it is gone.

    The clock of another process is ``(~pid << 3) | CPUCLOCK_SCHED``: clock_getcpuclockid(3), linux/posix-timers.h.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return None


def _sum_ns(pids: tuple[int, ...]) -> int | None:
    if not pids:
        return None
    total = 0
    for pid in pids:
        found = process_cpu_ns(pid)
        if found is None:
            return None
        total += found
    return total


class RawArm:
    """A raw worker.

    Args:
        plain: the job in the clear; its parameters say `paced`.
        home: of the measurement.
        stop: ends every wait.
    """

    def __init__(self, plain: Plain, *, home: Home, stop: Stop) -> None:
        self.pace = Pace(stop)
        self.start_ns = 0
        self._plain, self._home = plain, home
        self._pids: tuple[int, ...] = ()
        self._process: RawProcess | None = None
        self._log_path = home.path / f"raw-{secrets.token_hex(8)}.log"
        self._log: BinaryIO | None = None

    def start(self) -> None:
        self._log = self._log_path.open("wb")
        began = time.perf_counter_ns()
        self._process = RawProcess(self._plain, home=self._home, log=self._log, pace=self.pace.child.fileno())
        self.pace.handed_over()
        _parked(self)
        self.start_ns = time.perf_counter_ns() - began

    def pids(self) -> tuple[int, ...]:
        process = self._running()
        self._pids = (process.pid, *children_of(process.pid))
        return self._pids

    def cpu_ns(self) -> int | None:
        return _sum_ns(self._pids)

    def finish(self, until: int) -> Finished:
        process = self._running()
        _told_to_end(self, until)
        if not process.wait(END_S):
            raise RunError(Code.DURATION_EXCEEDED, f"a raw worker did not end within {END_S:.0f} s")
        ended = process.ended(stopped=False)
        if ended.outcome != "completed" or ended.work is None:
            raise self._failure(ended.code)
        outputs = tuple((str(one["kind"]), str(one["class"]), bytes.fromhex(one["sha256"])) for one in ended.outputs)
        return Finished(done=int(ended.work["done"]), start_ns=self.start_ns, outputs=outputs)

    def why(self) -> GlasshouseError:
        process = self._running()
        if not process.wait(_RAW_STOP_S):
            return RunError(Code.WORKER_FAILED, "a raw worker closed its pacing channel and went on")
        ended = process.ended(stopped=False)
        if ended.outcome == "completed":
            done = "" if ended.work is None else f" after {ended.work['done']} steps"
            return _too_short(done)
        return self._failure(ended.code)

    def close(self) -> None:
        self.pace.close()
        if self._process is not None:
            self._process.wait(_RAW_STOP_S)
            self._process.close()
        if self._log is not None:
            self._log.close()

    def _running(self) -> RawProcess:
        assert self._process is not None  # noqa: S101 - `start` comes first
        return self._process

    def _failure(self, code: str | None) -> RunError:
        said = _last_words(self._log_path)
        found = Code(code) if code is not None else Code.WORKER_FAILED
        return RunError(found, "the raw arm failed" + (f": {said}" if said else f" ({found.value})"))


class ProtectedArm:
    """A protected run on this machine: agent, sentinel, sandboxed worker, and the broker that all sessions share.

    Args:
        package: the sealed job; its parameters say `paced`.
        home: of the measurement; holds the owner's public part and the package's key.
        identity: the owner.
        broker: started by the first run and given back by whoever made it.
        stop: ends every wait.
    """

    def __init__(self, package: Path, *, home: Home, identity: Identity, broker: Embedded, stop: Stop) -> None:
        self.pace = Pace(stop)
        self.start_ns = 0
        self._package, self._home, self._identity, self._broker = package, home, identity, broker
        self._interrupts = Interrupts()
        self._pids: tuple[int, ...] = ()
        self._folder: RunFolder | None = None
        self._thread: threading.Thread | None = None
        self._ended: Ended | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        folder = self._folder = RunFolder.create(self._home)
        prepared = prepare(self._package, home=self._home, identity=self._identity, folder=folder, broker=self._broker)
        began = time.perf_counter_ns()
        self._thread = threading.Thread(target=self._supervise, args=(prepared.launch,), daemon=True)
        self._thread.start()
        while folder.load().agent is None and self._thread.is_alive():
            time.sleep(_POLL_S)  # the agent has its end of the channel from the moment that it has a name
        self.pace.handed_over()
        _parked(self)
        self.start_ns = time.perf_counter_ns() - began

    def _supervise(self, launch: bytes) -> None:
        folder = self._run_folder()
        try:
            self._ended = supervise(
                folder,
                launch,
                home=self._home,
                provider=LocalProvider(),
                broker=self._broker,
                watcher=_Silent(),
                interrupts=self._interrupts,
                pace=self.pace.child.fileno(),
            )
        except BaseException as error:
            self._error = error

    def pids(self) -> tuple[int, ...]:
        agent = self._run_folder().load().agent
        self._pids = () if agent is None else (agent.pid, *children_of(agent.pid))
        return self._pids

    def cpu_ns(self) -> int | None:
        return _sum_ns(self._pids)

    def finish(self, until: int) -> Finished:
        _told_to_end(self, until)
        ended = self._joined(END_S)
        if ended is None:
            raise RunError(Code.DURATION_EXCEEDED, f"the protected run did not end within {END_S:.0f} s")
        receipt = ended.conclusion.receipt
        if receipt is None or receipt.work is None or receipt.outcome is not Outcome.COMPLETED:
            raise self._failure(ended)
        opened = look_inside(ended.folder, receipt, sealing=self._identity.sealing)
        outputs = tuple((out.kind, out.of, one.sha256) for out, one in zip(receipt.outputs, opened, strict=True))
        return Finished(
            done=receipt.work.done,
            start_ns=self.start_ns,
            outputs=outputs,
            salts=tuple(one.salt for one in opened),
            lifecycle_us=receipt.lifecycle_us,
            imports_us=receipt.training_imports_us,
            bundle=ended.folder.receipt.read_bytes(),
        )

    def why(self) -> GlasshouseError:
        ended = self._joined(END_S)
        if ended is None:
            return RunError(Code.WORKER_FAILED, "the protected run closed its pacing channel and went on")
        receipt = ended.conclusion.receipt
        if receipt is not None and receipt.outcome is Outcome.COMPLETED and receipt.work is not None:
            return _too_short(f" after {receipt.work.done} steps")
        return self._failure(ended)

    def close(self) -> None:
        self.pace.close()
        if self._thread is None or not self._thread.is_alive():
            return
        self._interrupts()
        self._thread.join(END_S)
        if self._thread.is_alive():
            agent = self._run_folder().load().agent
            if agent is not None:
                agent.send(signal.SIGKILL)
            self._thread.join(END_S)

    def _run_folder(self) -> RunFolder:
        assert self._folder is not None  # noqa: S101 - `start` comes first
        return self._folder

    def _joined(self, timeout_s: float) -> Ended | None:
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return self._ended

    def _failure(self, ended: Ended) -> RunError:
        code = ended.conclusion.code or Code.WORKER_FAILED
        said = ended.conclusion.problem or f"it ended as {ended.conclusion.outcome.value}"
        return RunError(code, f"the protected arm failed: {said}")


class _Silent:
    """Shows nothing: the measurement has a view of its own."""

    def event(self, *_event: object) -> None:
        pass

    def tick(self, *_seen: object) -> None:
        pass

    def machine(self, *_ended: object, completed: bool) -> None:
        pass

    def stopping(self, times: int) -> None:
        pass


def _parked(arm: Runner) -> None:
    try:
        arm.pace.parked(START_S)
    except ArmLostError:
        raise arm.why() from None


def _told_to_end(arm: Runner, until: int) -> None:
    try:
        arm.pace.end(until)
    except ArmLostError:
        raise arm.why() from None


def _too_short(done: str) -> RunError:
    return RunError(
        Code.WORKER_FAILED,
        f"the job ended by itself{done}, before the measurement did",
        hint="give the job more steps, or the measurement less time",
    )


def _last_words(path: Path) -> str:
    """Return what a raw worker said last, for its owner."""
    with contextlib.suppress(OSError):
        lines = [line.strip()[:_LINE_CHARS] for line in path.read_text(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-_LAST_LINES:])
    return ""
