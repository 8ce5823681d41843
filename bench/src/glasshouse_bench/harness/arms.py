"""The two arms: a raw worker, and a whole protected run. Both are ordinary runs of a job that has a schedule.

Laws: an arm that was started is ended by `left` or by `close`, whatever happens between, and leaves no process behind;
nothing is sent to it but the signal that ends any run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from glasshouse.errors import Code, GlasshouseError
from glasshouse.evidence.events import Event
from glasshouse.evidence.receipt import WEIGHTS
from glasshouse.jobs.define.raw_job import Plain, RawProcess
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home, private_folder
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import Interrupts
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.collect import fetch
from glasshouse.jobs.supervise.follow import Seen, Watcher
from glasshouse.jobs.supervise.prepare import prepare
from glasshouse.jobs.supervise.supervision import Ended as RunEnded
from glasshouse.jobs.supervise.supervision import supervise
from glasshouse.providers.place.local import LocalPlace, LocalPlaced
from glasshouse.providers.protocol.order import Order
from glasshouse.task.handle import RECORD
from glasshouse.wire.states import State
from glasshouse_bench.artifact import Arm, Ended
from glasshouse_bench.design import Planted
from glasshouse_bench.harness.machine import clock, descendants, pin, processor_ns, speculation

__all__ = ["Left", "ProtectedArm", "RawArm", "Worker"]

END_S = 180.0  # a run that ends seals its outputs and searches memory; its supervisor gives up after two minutes
PADDING_BYTES = 4096
_RAW_STOP_S = 10.0
_LINE_CHARS, _LAST_LINES = 200, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What an arm left: how it ended, for the note, and its step record.

    Args:
        lifecycle_us, bundle: of a protected run, from its receipt.
        weights: SHA-256 of each output of weights, by name; written nowhere but where the owner chose it.
        reason: why it failed, for people; empty otherwise.
    """

    arm: Arm
    record: bytes | None = None
    lifecycle_us: Mapping[str, int | None] | None = None
    bundle: bytes | None = None
    weights: Mapping[str, bytes] | None = None
    reason: str = ""


class Worker(Protocol):
    """What a session asks of an arm."""

    def start(self) -> None:
        """Launch it; raises `GlasshouseError`."""

    @property
    def alive(self) -> bool: ...

    def pinned(self) -> bool:
        """Return whether its worker trains, on the processors where it is to run; asked again until it does."""

    def spent_ns(self) -> int | None:
        """Processor time of all that is not the worker: agent, watchdog and init. None without any."""

    def stop(self) -> None:
        """Ask it to end, as its owner would."""

    def left(self, ended: Ended) -> Left:
        """Wait for its end, and return what it left.

        Args:
            ended: how it ended, if it did not end by itself.
        """

    def close(self) -> None:
        """End it now if it has not ended, and leave nothing in the clear."""


class RawArm:
    """A raw worker on the job in the clear, in the home of the measurement.

    Args:
        cpus: where its worker may train; empty for anywhere.
        planted: what is added to its steps, to try the harness itself.
    """

    def __init__(self, plain: Plain, *, home: Home, cpus: tuple[int, ...] = (), planted: Planted | None = None) -> None:
        self._plain, self._home, self._cpus = plain, home, cpus
        self._program: tuple[str, ...] = ("-m", "glasshouse.workloads.worker")
        if planted is not None:
            self._program = ("-m", "glasshouse_bench.planted", str(planted.step_ppm), str(planted.bunched_ns))
        self._process: RawProcess | None = None
        self._trains = False
        self._log_path = home.path / f"raw-{secrets.token_hex(8)}.log"
        self._log: BinaryIO | None = None
        self._arm = Arm()

    def start(self) -> None:
        # What a job prints can be of its data: it is for its owner alone, wherever the folder lies.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._log = os.fdopen(os.open(self._log_path, flags, 0o600), "wb")
        padding = secrets.randbelow(PADDING_BYTES)
        self._arm = Arm(launched_ns=clock().monotonic_ns, padding_bytes=padding)
        with _padded(padding):
            self._process = RawProcess(self._plain, home=self._home, log=self._log, program=self._program)
        self._arm = replace(self._arm, speculation=speculation(self._process.worker.pid))

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.worker.poll() is None

    def pinned(self) -> bool:
        process = self._process
        if process is not None and not self._trains:
            self._trains = any(message.get("type") == "running" for message in process.news())
            if self._trains and self._cpus:
                pin(process.worker.pid, self._cpus)
        return self._trains

    def spent_ns(self) -> int | None:
        return None

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.worker.terminate()

    def left(self, ended: Ended) -> Left:
        process = self._process
        if process is None:
            return Left(arm=replace(self._arm, ended=ended))
        try:
            process.worker.wait(END_S)
        except subprocess.TimeoutExpired:
            process.close()
            ended = Ended.KILLED
        found = process.ended(stopped=False)
        folder = found.folder
        record = _content(folder / RECORD)
        digests = {str(one["name"]): bytes.fromhex(one["sha256"]) for one in found.outputs if one["class"] == WEIGHTS}
        code = None if found.code is None else Code(found.code)
        return Left(
            arm=replace(self._arm, ended=_ended(ended, code), code=code, exit=process.worker.poll()),
            record=record,
            weights=digests,
            reason="" if code is None else self._said(),
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.worker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.worker.wait(_RAW_STOP_S)
            self._process.close()
            shutil.rmtree(self._home.raw / self._process.run_id, ignore_errors=True)
        if self._log is not None:
            self._log.close()

    def _said(self) -> str:
        """Return what the worker printed last, for its owner."""
        with contextlib.suppress(OSError):
            lines = [line.strip()[:_LINE_CHARS] for line in self._log_path.read_text(errors="replace").splitlines()]
            return " | ".join([line for line in lines if line][-_LAST_LINES:])
        return ""


class ProtectedArm:
    """A protected run on this machine: agent, watchdog, sandboxed worker, and the broker that all sessions share.

    Args:
        package: the sealed job, with its schedule; this arm removes it.
        home: of the measurement; holds the owner's public part and the package's key.
        broker: started by the first run; the caller that made it closes it.
        cpus: where its worker may train; empty for anywhere.
    """

    def __init__(
        self, package: Path, *, home: Home, identity: Identity, broker: Embedded, cpus: tuple[int, ...] = ()
    ) -> None:
        self._package, self._home, self._identity, self._broker = package, home, identity, broker
        self._cpus = cpus
        self._interrupts = Interrupts()
        self._folder: RunFolder | None = None
        self._thread: threading.Thread | None = None
        self._ended: RunEnded | None = None
        self._error: BaseException | None = None
        self._arm = Arm()
        self._agent: int | None = None
        self._watcher = _State()
        self._trains = False

    def start(self) -> None:
        folder = self._folder = RunFolder.create(self._home)
        prepared = prepare(self._package, home=self._home, identity=self._identity, folder=folder, broker=self._broker)
        self._arm = Arm(
            launched_ns=clock().monotonic_ns, deployment=prepared.record.deployment, run=prepared.record.run_id
        )
        self._thread = threading.Thread(target=self._supervise, args=(prepared.launch,), daemon=True)
        self._thread.start()

    def _supervise(self, launch: bytes) -> None:
        assert self._folder is not None  # noqa: S101 - `start` comes first
        telling = _Telling(self._placed)
        try:
            self._ended = supervise(
                self._folder,
                launch,
                home=self._home,
                place=lambda _name: telling,
                broker=self._broker,
                watcher=self._watcher,
                interrupts=self._interrupts,
            )
        except BaseException as error:
            self._error = error

    def _placed(self, pid: int) -> None:
        self._agent = pid
        self._arm = replace(self._arm, speculation=speculation(pid))

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def pinned(self) -> bool:
        if self._agent is not None and not self._trains and self._watcher.state is State.RUNNING:
            self._trains = True
            for pid in filter(_is_worker, descendants(self._agent)) if self._cpus else ():
                pin(pid, self._cpus)
        return self._trains

    def spent_ns(self) -> int | None:
        if self._agent is None:
            return None
        beside = [self._agent, *(pid for pid in descendants(self._agent) if not _is_worker(pid))]
        times = [processor_ns(pid) for pid in beside]
        return None if None in times else sum(one for one in times if one is not None)

    def stop(self) -> None:
        self._interrupts()

    def left(self, ended: Ended) -> Left:
        if self._thread is not None:
            self._thread.join(END_S)
        found = self._ended
        if found is None:
            lost = self._error.code if isinstance(self._error, GlasshouseError) else Code.WORKER_FAILED
            arm = replace(self._arm, ended=_ended(ended, lost), code=lost)
            return Left(arm=arm, reason=str(self._error or "it did not end in time"))
        conclusion = found.conclusion
        code = conclusion.code
        arm = replace(self._arm, ended=_ended(ended, code), code=code, exit=found.record.exit_code)
        receipt = conclusion.receipt
        if receipt is None:
            return Left(arm=arm, reason=conclusion.problem or "")
        out = private_folder(self._home.path / f"opened-{secrets.token_hex(8)}")
        try:
            opened = fetch(found.folder, receipt, sealing=self._identity.sealing, out=out, force=True)
            record = _content(out / RECORD)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        kinds = {output.sequence: output.of for output in receipt.outputs}
        return Left(
            arm=arm,
            record=record,
            lifecycle_us=receipt.lifecycle_us,
            bundle=found.folder.receipt.read_bytes(),
            weights={one.name: one.sha256 for one in opened if kinds.get(one.sequence) == WEIGHTS},
            reason=conclusion.problem or "",
        )

    def close(self) -> None:
        if self.alive:
            self._interrupts()
            assert self._thread is not None  # noqa: S101 - it is alive
            self._thread.join(END_S)
            if self._thread.is_alive() and self._agent is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._agent, signal.SIGKILL)
                self._thread.join(END_S)
        self._package.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder.path, ignore_errors=True)


class _Telling(LocalPlace):
    """Passes on the process of the runtime that is started there."""

    def __init__(self, started: Callable[[int], None]) -> None:
        self._started = started

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> LocalPlaced:
        return _Told(folder, self._started)


class _Told(LocalPlaced):
    def __init__(self, folder: Path, started: Callable[[int], None]) -> None:
        super().__init__(folder)
        self._started = started

    def start(self, order: Order, launch: bytes, *, check: Callable[[], None] = lambda: None) -> int:
        pid = super().start(order, launch)
        self._started(pid)
        return pid


class _State(Watcher):
    """Keeps the run's state: the measurement has a view of its own."""

    state: State | None = None

    def event(self, event: Event, seen: Seen) -> None:
        self.state = seen.state


@contextlib.contextmanager
def _padded(size: int) -> Iterator[None]:
    """Let what is started meanwhile have so much more in its environment."""
    os.environ["GLASSHOUSE_PADDING"] = "x" * size
    try:
        yield
    finally:
        del os.environ["GLASSHOUSE_PADDING"]


def _is_worker(pid: int) -> bool:
    """Return whether a process is the worker that trains, or one of its own."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        # Empty when it has exited and was not waited for: all that it trained would count as the agent's.
        return not words or b"--workload" in words
    return True  # gone meanwhile: nothing can be added up any more


def _ended(ended: Ended, code: Code | None) -> Ended:
    if ended is not Ended.COMPLETED:
        return ended
    return Ended.COMPLETED if code is None else Ended.FAILED


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
