"""What one run has brought into being so far; `finish` ends whatever is there, wherever the story broke off."""

from __future__ import annotations

from dataclasses import dataclass, field

from glasshouse.attestation.claims import Gpu
from glasshouse.attestation.hardening import HardeningReport
from glasshouse.attestation.measured import Measured
from glasshouse.errors import Code, ExitCode, GlasshouseError, PlatformError, RefusedError, RunError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.log import EventLog
from glasshouse.evidence.results import WEIGHTS, Output
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.runtime_side import CheckedRelease
from glasshouse.handshake.tokens import TokenClaims
from glasshouse.package.outputs import SealedOutput
from glasshouse.runtime.agent_options import Options
from glasshouse.runtime.gate.gate_client import Gate
from glasshouse.runtime.gate.head_keeper import HeadKeeper
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.keys.sealed_log import SealedLog
from glasshouse.runtime.keys.shared_files import Before
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.run.start_processes import Beginning
from glasshouse.runtime.run.step_times import Lifecycle
from glasshouse.runtime.worker.worker_messages import OutputBegins, Progress
from glasshouse.runtime.worker.worker_session import Stage, WorkerSession
from glasshouse.wire.signing import SigningKey
from glasshouse.wire.states import Outcome, State

__all__ = ["STOP_GRACE_S", "Ending", "Identity", "Run"]

STOP_GRACE_S = 5.0

_EXIT = {
    Outcome.COMPLETED: ExitCode.DONE,
    Outcome.REFUSED: ExitCode.REFUSED,
    Outcome.FAILED: ExitCode.RUN_FAILED,
    Outcome.INTERRUPTED: ExitCode.INTERRUPTED,
    Outcome.RESIDUE: ExitCode.RESIDUE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a run ends.

    Attributes:
        outcome: as the receipt will say.
        code: why, if it did not complete.
        began: whether there was a launch to speak of; without one there is no receipt either.
        hint: what a person could do, in fixed words.
    """

    outcome: Outcome
    code: Code | None = None
    began: bool = True
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Ending:
        """Judge an error; only its code goes on, for its text may quote what it must not."""
        if not isinstance(error, GlasshouseError):
            return cls(outcome=Outcome.FAILED, code=Code.INTERNAL)
        if isinstance(error, RefusedError):
            # Here and below the hint is certain to be made of our own words: the names of checks and of namespaces.
            hint = error.hint if error.code is Code.HARDENING_MISSING else ""
            return cls(outcome=Outcome.REFUSED, code=error.code, hint=hint)
        if isinstance(error, PlatformError):
            return cls(outcome=Outcome.FAILED, code=error.code, hint=error.hint)
        if isinstance(error, RunError) and error.code is Code.INTERRUPTED:
            return cls(outcome=Outcome.INTERRUPTED, code=error.code)
        return cls(outcome=Outcome.FAILED, code=error.code)

    @property
    def exit_code(self) -> ExitCode:
        return _EXIT[self.outcome] if self.began else ExitCode.USAGE


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who this run is: from the launch file, and its own key."""

    launch: LaunchFile
    token: TokenClaims
    evidence_key: SigningKey
    log: EventLog


@dataclass(kw_only=True, slots=True)
class Run:
    """Everything that exists; each field is set when it comes into being."""

    options: Options
    loop: Loop
    out: OutDir
    lifecycle: Lifecycle
    started_us: int
    begun: Beginning
    shared_before: Before = field(default_factory=dict)
    session: WorkerSession | None = None
    sealed_log: SealedLog | None = None
    identity: Identity | None = None
    gate: Gate | None = None
    keeper: HeadKeeper | None = None
    report: HardeningReport | None = None
    measurement: Measured | None = None
    environment_sha256: bytes | None = None
    gpus: tuple[Gpu, ...] = ()
    evidence: bytes | None = None
    release: CheckedRelease | None = None
    outputs: list[Output] = field(default_factory=list)
    segments: int = 0
    stopping: RunError | None = None
    ending: Ending | None = None

    def go(self, state: State) -> None:
        """Record a transition and tell the broker."""
        if self.identity is not None:
            self.identity.log.transition(state)
        if self.keeper is not None:
            self.keeper.publish()

    def stop(self, why: RunError, *, grace_s: float) -> None:
        """End the run because of `why`: a worker that is at work is asked, and given some time.

        Raises:
            RunError: `why`, at once when there is nothing to wait for, and otherwise from the loop later.
        """
        if self.ending is not None:
            return
        if self.stopping is not None or self.session is None or self.session.stage is not Stage.RUNNING:
            raise why
        self.stopping = why
        self.session.stop()
        self.loop.after(grace_s, self._no_longer)

    def _no_longer(self) -> None:
        if self.ending is None and self.stopping is not None:
            raise self.stopping

    def record(self, kind: EventType, body: dict[str, str | int | None]) -> None:
        """Record an event, once there is a log."""
        if self.identity is not None:
            self.identity.log.append(kind, body)

    def notice(self, code: Code) -> None:
        """Record something that the owner should know of and that does not end the run; once it has, nothing."""
        if self.identity is not None and self.identity.log.state is not State.ZEROIZED:
            self.record(EventType.NOTICE, {"code": code.value, "value": None})

    def line(self, line: bytes) -> None:
        """Write a line of the log; while the run ends, a full disk must not stop the ending."""
        try:
            self.out.event(line)
        except RunError:
            if self.ending is None:
                raise

    def countersigned(self, head: bytes) -> None:
        """Keep a countersigned head beside the log, as `line` keeps events."""
        try:
            self.out.head(head)
        except RunError:
            if self.ending is None:
                raise

    def progress(self, progress: Progress) -> None:
        """Record progress."""
        self.record(
            EventType.PROGRESS,
            {
                "done": progress.done,
                "elapsed_us": progress.elapsed_us,
                "loss": progress.loss,
                "total": progress.total,
                "unit": progress.unit,
            },
        )

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
        self.record(
            EventType.OUTPUT,
            {
                "bytes": found.plain_bytes,
                "class": found.of,
                "kind": found.kind,
                "sealed_bytes": found.sealed_bytes,
                "sealed_sha256": found.sealed_sha256.hex(),
                "sequence": found.sequence,
            },
        )
        self.outputs.append(found)

    def segment(self, sealed: SealedOutput) -> None:
        """Record a sealed segment of the worker's log."""
        self.record(
            EventType.SEGMENT,
            {
                "sealed_bytes": sealed.sealed_bytes,
                "sealed_sha256": sealed.sealed_sha256.hex(),
                "sequence": sealed.sequence,
            },
        )
        self.segments += 1
