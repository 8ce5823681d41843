"""What one run has brought into being so far, how long each step took, and what of it the log records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from glasshouse.attestation.claims import Gpu, HardeningReport
from glasshouse.attestation.measurements.measured import Measured
from glasshouse.errors import Code, ExitCode, GlasshouseError, InternalError, PlatformError, RefusedError, RunError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.log import EventLog
from glasshouse.evidence.receipt import LIFECYCLE, WEIGHTS, Output
from glasshouse.handshake.launch import LaunchFile, TokenClaims
from glasshouse.handshake.runtime_side import CheckedRelease
from glasshouse.package.outputs import SealedOutput
from glasshouse.runtime.gate.attest import now_us
from glasshouse.runtime.gate.broker_client import BrokerClient, EvidenceRefusedError
from glasshouse.runtime.gate.head_keeper import HeadKeeper
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.keys.sealed_log import SealedLog
from glasshouse.runtime.keys.shared_files import Before
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.roots.collectors import Collecting
from glasshouse.runtime.run.start_processes import AgentOptions, Processes
from glasshouse.runtime.watchdog.session_record import Process
from glasshouse.runtime.worker.worker_messages import OutputBegins
from glasshouse.runtime.worker.worker_session import Stage, WorkerSession
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.states import Outcome, State

if TYPE_CHECKING:
    from glasshouse.runtime.lines.leg_run import LegRun  # few runs have a line

_T = TypeVar("_T")

LEG_GRACE_S = 60.0
"""How long a job with checkpoints that is to stop may take to begin its last one."""
LAST_CHECKPOINT_S = 600.0
"""How long it may take in all."""

_EXIT = {
    Outcome.COMPLETED: ExitCode.DONE,
    Outcome.REFUSED: ExitCode.REFUSED,
    Outcome.FAILED: ExitCode.RUN_FAILED,
    Outcome.INTERRUPTED: ExitCode.INTERRUPTED,
    Outcome.RESIDUE: ExitCode.RESIDUE,
    Outcome.SUPERSEDED: ExitCode.REFUSED,
}


def have(value: _T | None) -> _T:
    """Return what an earlier step of the run has made."""
    if value is None:
        raise InternalError(Code.INTERNAL, "a step of the run before what it needs")
    return value


def process_start_us() -> int:
    """Return when this process was started, in microseconds of CLOCK_BOOTTIME; to a hundredth of a second."""
    # Not by its number: a /proc of another namespace has another process there, or none.
    return Process.parse(REAL.read("/proc/self/stat")).started * 1_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a run ends."""

    outcome: Outcome
    code: Code | None = None  # why, if it did not complete
    hint: str = ""  # what a person could do, in fixed words

    @classmethod
    def of(cls, error: BaseException) -> Ending:
        """Judge an error; only its code goes on, for its text may quote what it must not."""
        if not isinstance(error, GlasshouseError):
            return cls(outcome=Outcome.FAILED, code=Code.INTERNAL)
        if error.code is Code.LINE_SUPERSEDED:
            return cls(outcome=Outcome.SUPERSEDED, code=error.code)
        refused = isinstance(error, RefusedError)
        interrupted = isinstance(error, RunError) and error.code is Code.INTERRUPTED
        # Only these hints are certain to be made of our own words, the names of checks and of namespaces, or of the
        # gate's about this machine.
        ours = isinstance(error, PlatformError | EvidenceRefusedError) or error.code is Code.HARDENING_MISSING
        outcome = Outcome.REFUSED if refused else Outcome.INTERRUPTED if interrupted else Outcome.FAILED
        return cls(outcome=outcome, code=error.code, hint=error.hint if ours else "")

    @property
    def exit_code(self) -> ExitCode:
        """What the agent exits with, where there was a launch."""
        return _EXIT[self.outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Which run this is: the launch file, and the run's own key."""

    launch: LaunchFile
    token: TokenClaims
    evidence_key: SigningKey
    log: EventLog


class StepTimes:
    """How long each step of a run took, which began at `start_us`: in microseconds of CLOCK_BOOTTIME."""

    def __init__(self, start_us: int) -> None:
        self._start_us = start_us
        self._took: dict[str, int] = {}
        self.work_us = 0  # for how long the workload itself ran

    @staticmethod
    def now_us() -> int:
        """Return the time by CLOCK_BOOTTIME."""
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

    def to_json(self) -> dict[str, int | None]:
        """Return every step of a receipt, None where it was not reached.

        `total` is everything but the workload itself: what protection costs, whatever the job.
        """
        total = self.now_us() - self._start_us - self.work_us + self._took.get("seal_outputs", 0)
        return {**{name: self._took.get(name) for name in LIFECYCLE}, "total": max(0, total)}


@dataclass(kw_only=True, slots=True)
class Run:
    """Everything that exists; each field is set when it comes into being."""

    options: AgentOptions
    loop: Loop
    out: OutDir
    times: StepTimes
    started_us: int
    processes: Processes
    shared_before: Before = field(default_factory=dict)
    session: WorkerSession | None = None
    leg: LegRun | None = None  # of a run that is a leg of a line
    sealed_log: SealedLog | None = None
    identity: RunIdentity | None = None
    gate: BrokerClient | None = None
    heads: HeadKeeper | None = None
    report: HardeningReport | None = None
    measurement: Measured | None = None
    environment_sha256: bytes | None = None
    gpus: tuple[Gpu, ...] = ()
    collecting: Collecting | None = None
    evidence: bytes | None = None  # the envelope
    hardware: tuple[bytes, ...] = ()  # the blobs that it names
    release: CheckedRelease | None = None
    outputs: list[Output] = field(default_factory=list)
    segments: int = 0
    stopping: RunError | None = None
    ending: Ending | None = None

    @classmethod
    def begun(cls, options: AgentOptions, loop: Loop, out: OutDir, processes: Processes) -> Run:
        """Return the run of this process, which began when the process did."""
        start_us = process_start_us()
        started_us = now_us() - (StepTimes.now_us() - start_us)
        times = StepTimes(start_us)
        return cls(options=options, loop=loop, out=out, times=times, started_us=started_us, processes=processes)

    def enter(self, state: State) -> None:
        """Record a transition, and publish it to the broker."""
        if self.identity is not None:
            self.identity.log.transition(state)
        if self.heads is not None:
            self.heads.publish()

    def stop(self, why: RunError, *, grace_s: float) -> None:
        """End the run because of `why`: a worker that is at work is asked, and given some time.

        `why` is raised at once when there is nothing to wait for, and otherwise from the loop later.
        """
        if self.ending is not None:
            return
        if self.stopping is not None or self.session is None or self.session.stage is not Stage.RUNNING:
            raise why
        self.stopping = why
        self.session.tell({"type": "stop"})
        if self.leg is not None:
            self.leg.hurry()
        # The owner's policy bounds a run also while a checkpoint is on its way; the owner's order to stop does not.
        may_wait = self.leg is not None and why.code is Code.INTERRUPTED
        until_s = self.loop.now_s() + (LAST_CHECKPOINT_S if may_wait else 0.0)

        def no_longer() -> None:
            if self.ending is not None:
                return
            if self.leg is None or not self.leg.busy or self.loop.now_s() >= until_s:
                raise why
            self.loop.after(grace_s, no_longer)

        self.loop.after(max(grace_s, LEG_GRACE_S) if may_wait else grace_s, no_longer)

    def record(self, kind: EventType, body: dict[str, str | int | None]) -> None:
        """Record an event, once there is a log."""
        if self.identity is not None:
            self.identity.log.append(kind, body)

    def notice(self, code: str) -> None:
        """Record something that does not end the run; nothing once it has ended."""
        if self.identity is not None and self.identity.log.state is not State.ZEROIZED:
            self.record(EventType.NOTICE, {"code": code, "value": None})

    def write(self, write: Callable[[bytes], None], line: bytes) -> None:
        """Write a line of the log, or a countersigned head beside it."""
        try:
            write(line)
        except RunError:
            if self.ending is None:  # a full disk must not stop the ending
                raise

    def output(self, header: OutputBegins, sealed: SealedOutput) -> None:
        """Record an output that left sealed; its name stays within the seal."""
        found = Output(
            kind=header.kind,
            of=header.content,
            sequence=sealed.sequence,
            plain_bytes=sealed.bytes,
            # Two runs of one job make the same files: a digest here would confirm a guess.
            plain_hmac=sealed.plain_hmac if header.content == WEIGHTS else None,
            sealed_bytes=sealed.sealed_bytes,
            sealed_sha256=sealed.sealed_sha256,
        )
        body: dict[str, str | int | None] = {"bytes": found.plain_bytes, "class": found.of, "kind": found.kind}
        self.record(EventType.OUTPUT, body | _sealed(sealed))
        self.outputs.append(found)

    def segment(self, sealed: SealedOutput) -> None:
        """Record a sealed segment of the worker's log."""
        self.record(EventType.SEGMENT, _sealed(sealed))
        self.segments += 1


def _sealed(sealed: SealedOutput) -> dict[str, str | int | None]:
    return {
        "sealed_bytes": sealed.sealed_bytes,
        "sealed_sha256": sealed.sealed_sha256.hex(),
        "sequence": sealed.sequence,
    }
