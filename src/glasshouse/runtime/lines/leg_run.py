"""A leg of a line at work: gets the checkpoint that it goes on from, and has its own kept and counted."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

from glasshouse.custodian.exchange import Opened
from glasshouse.errors import Code, PeerError, PlatformError, RunError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.receipt import LastCheckpoint
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.runtime_side import CLOCK_LEEWAY_S
from glasshouse.package.manifest import Manifest
from glasshouse.package.streams import write_all
from glasshouse.runtime.confine import memory_limits, read_only_package
from glasshouse.runtime.gate.attest import now_us
from glasshouse.runtime.gate.broker_client import BrokerClient
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.lines.checkpoint_keeper import CheckpointKeeper
from glasshouse.runtime.lines.checkpoint_reader import CheckpointReader
from glasshouse.runtime.lines.leg_terms import LegTerms, group_of
from glasshouse.runtime.lines.part_intake import PartIntake
from glasshouse.runtime.loop import Loop
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.lines.checkpoint import CheckpointHeader
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import Ticket

# At the end of the work the machine waits no longer than this for a gate that is silent.
LAST_PATIENCE_S = 60.0
_RESTORED_BYTES_S = 16 << 20


class LegRun:
    """One machine's part in a leg.

    Args:
        line: the EAR's.
        environment_sha256: what this machine measured.
        lease_s: after so long without progress a checkpoint is given up.
        record, notice: write an event of the run's log.
        tell: sends the worker a message.

    Raises:
        VerificationError: `delegation-invalid`: the owner's delegation names no store.
        RunError: `disk-full`.
    """

    def __init__(
        self,
        loop: Loop,
        gate: BrokerClient,
        out: OutDir,
        launch: LaunchFile,
        manifest: Manifest,
        line: LineStart,
        *,
        evidence_key: SigningKey,
        environment_sha256: bytes,
        lease_s: float,
        record: Callable[[EventType, dict[str, str | int | None]], None],
        notice: Callable[[str], None],
        tell: Callable[[dict[str, Json]], None],
    ) -> None:
        delegation = Delegation.from_envelope(launch.delegation, manifest.owner_signing)
        leeway_us = CLOCK_LEEWAY_S * 1_000_000
        delegation.check(Use.STORE, broker_public=launch.broker_public, at_us=now_us(), leeway_us=leeway_us)
        self._loop, self._gate, self._out, self._launch, self._manifest = loop, gate, out, launch, manifest
        self._line, self._key, self._environment_sha256 = line, evidence_key, environment_sha256
        self._store_public, self._lease_s = delegation.store_public or b"", lease_s
        self._record, self._notice, self._tell = record, notice, tell
        self._group = group_of(launch.claims().group)
        self._header: CheckpointHeader | None = None
        self._fronts: list[bytes] = []
        self._resumed_bytes = 0
        self._intake: PartIntake | None = None
        self._keeper: CheckpointKeeper | None = None
        self.resumed: int | None = None  # descriptor of the chunks of the checkpoint that it goes on from
        self.last: LastCheckpoint | None = None  # that was counted for it
        out.checkpoints()
        self._reader = CheckpointReader(loop, gate, line, run_id=launch.run_id, key=evidence_key)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is coming from the worker, or on its way to the gate."""
        coming = self._intake is not None and self._intake.under_way
        return coming or (self._keeper is not None and not self._keeper.idle)

    @property
    def restoring_s(self) -> float:
        """How long a worker may take to lay out what the leg goes on from."""
        return self._resumed_bytes / _RESTORED_BYTES_S

    def restored(self) -> None:
        """Give back the memory of what the worker has laid out; may be called twice."""
        if self.resumed is not None:
            os.close(self.resumed)
            self.resumed = None

    def hand_over(self, memory: BinaryIO) -> None:
        """Write what the custodian needs of the checkpoint that this leg goes on from, if there is one.

        Raises as `CheckpointReader` does.
        """
        if not self._line.seq:
            return
        self._header = header = self._reader.header()
        ranks = range(self._group.first_rank, self._group.first_rank + self._group.ranks)
        if len(header.parts) < ranks.stop:
            raise PeerError(Code.RESUME_WORLD, "the checkpoint is of fewer ranks than this leg has")
        self._fronts = [self._reader.front(rank, header.parts[rank]) for rank in ranks]
        write_all(memory, memoryview(b"".join(self._fronts) + header.encode()))
        memory.seek(0)  # the custodian reads from where this is
        if header.environment_sha256 != self._environment_sha256:
            self._notice("environment-changed")

    def fetch(self) -> None:
        """Fetch the parts of this machine's ranks, if there are any, into memory that the worker can change nothing by.

        Raises:
            RunError: `out-of-memory`.
            PlatformError: `platform-unsupported`: there is no memory to be sealed.
            Exception: as `CheckpointReader` raises.
        """
        if self._header is None:
            return
        parts = [
            (rank, self._header.parts[rank], front) for rank, front in enumerate(self._fronts, self._group.first_rank)
        ]
        self._resumed_bytes = sum(row.bytes for _, row, _ in parts)
        # The other half may be the worker's: it lays them out in a workspace in memory.
        if self._resumed_bytes > memory_limits.available_bytes() // 2:
            raise RunError(Code.OUT_OF_MEMORY, "the checkpoint and its files do not fit into this machine's memory")
        try:
            with os.fdopen(read_only_package.unsealed("checkpoint"), "wb", buffering=0) as memory:
                for rank, row, front in parts:
                    self._reader.copy_chunks(rank, row, front, memory)
                self.resumed = read_only_package.seal(REAL, memory.fileno())
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise RunError(Code.OUT_OF_MEMORY, "the checkpoint does not fit into this machine's memory") from None
            raise PlatformError(Code.PLATFORM, "this machine gives no memory that can be sealed") from None
        # Of a file on a disk a process could set the times or attributes, whatever it may open: a way out.
        if read_only_package.kind(REAL, self.resumed) != read_only_package.MEMORY:
            raise PlatformError(Code.PLATFORM, "a checkpoint cannot be handed to the worker without a way out")

    def begin(self, opened: Opened) -> PartIntake:
        """Return what takes the worker's parts from now on; `opened` is of a job with checkpoints."""
        if opened.checkpoints is None or opened.resume_public is None:
            raise PeerError(Code.RELEASE_INVALID, "the broker's release is a leg, of a job without checkpoints")
        terms = LegTerms(
            start=self._line,
            deployment=self._launch.claims().deployment,
            environment_sha256=self._environment_sha256,
            group=self._group,
            limits=opened.checkpoints,
            manifest_sha256=self._manifest.sha256,
            recipients=(*self._manifest.recipients, opened.resume_public),
            run_id=self._launch.run_id,
            evidence_key=self._key,
            broker_public=self._launch.broker_public,
            store_public=self._store_public,
        )
        self._keeper = keeper = CheckpointKeeper(
            self._loop,
            self._gate,
            terms,
            settled=self._settled,
            trouble=lambda code: self._notice(code.value),
            patience_s=self._lease_s,
        )
        self._intake = PartIntake(
            terms,
            self._out,
            self._loop.now_s,
            sealed=keeper.part,
            there=keeper.there,
            full=partial(keeper.give_up, Code.DISK_FULL),
        )
        return self._intake

    def permit(self) -> None:
        """Permit the first checkpoint."""
        if self._intake is not None:
            self._tell(self._intake.permit())

    def hurry(self) -> None:
        """Let a last checkpoint begin at once: the job is to stop."""
        message = None if self._intake is None else self._intake.hurry()
        if message is not None:
            self._tell(message)

    def finish(self) -> None:
        """Wait for the checkpoint that is on its way, once the worker has finished."""
        if self._keeper is not None:
            if not self._keeper.idle:
                self._notice("checkpoint-awaited")
            self._keeper.finish(LAST_PATIENCE_S)

    def close(self) -> None:
        """Stop sending, and leave no file of a checkpoint; may be called twice."""
        if self._keeper is not None:
            self._keeper.close()
        if self._intake is not None:
            self._intake.discard()
        self.restored()
        self._out.no_checkpoints()

    def _settled(self, counted: tuple[Ticket, CheckpointHeader] | None, refused: Code | None) -> None:
        if self._intake is None:
            return
        if counted is not None:
            ticket, header = counted
            self._intake.counted(ticket.seq, ticket.digest)
            self.last = LastCheckpoint(digest=ticket.digest, seq=ticket.seq, step=ticket.step)
            body: dict[str, str | int | None] = {"digest": ticket.digest.hex(), "seq": ticket.seq, "step": ticket.step}
            self._record(EventType.CHECKPOINT, body | {"bytes": sum(part.bytes for part in header.parts)})
        if refused is not None:
            self._notice("checkpoint-given-up")
        self._tell(self._intake.permit(refused))
