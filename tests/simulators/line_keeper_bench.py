"""One machine of a leg without its processes: what takes its worker's parts, what sends them, and a store and gate."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, GlasshouseError, PeerError, RefusedError
from glasshouse.package.limits import CheckpointLimits
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.lines.checkpoint_keeper import CheckpointKeeper
from glasshouse.runtime.lines.leg_terms import LegTerms, group_of
from glasshouse.runtime.lines.part_intake import PartIntake
from glasshouse.runtime.lines.part_messages import OtherPart, PartBegins, PartEnds, PartsThere
from glasshouse.runtime.loop import Loop
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import RecipientKey, SigningKey, key_id, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.checkpoint import CheckpointHeader
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import (
    COUNT_PATH,
    HEADER_PATH,
    MAX_SIGNED_HEADER_BYTES,
    PART_PATH,
    CheckpointMessage,
    PartClaim,
    PartPiece,
    Stored,
    Ticket,
)

DEPLOYMENT, MANIFEST, LINE = "5d" * 16, bytes([7]) * 32, bytes(range(32))
Fault = Callable[[str, bytes], bytes | GlasshouseError]


class StoreAndGate:
    """Keeps and counts as spec/checkpoints.md says, in memory; `faults` answer instead, in turn, while there are any.

    A fault is called with a request's path and the honest answer.
    """

    def __init__(self) -> None:
        self.store, self.broker = SigningKey.generate(), SigningKey.generate()
        self.parts: dict[int, bytes] = {}
        self._digests: dict[int, bytes] = {}
        self._attempts: dict[int, int] = {}
        self.tickets: list[Ticket] = []
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.faults: list[Fault] = []
        self.loop: Loop | None = None
        self.machines: dict[str, bytes] = {}  # evidence keys, by run

    def begin(self, path: str, body: bytes, done: Callable[[Any], None], **_: Any) -> Any:
        assert self.loop is not None
        self.asked.append(path)
        self.bodies.append(body)
        try:
            answer: bytes | GlasshouseError = self._answer(path, body)
        except RefusedError as refusal:
            answer = refusal
        if self.faults:
            answer = self.faults.pop(0)(path, answer if isinstance(answer, bytes) else b"")
        call = _KeeperCall(answer)
        self.loop.after(0, lambda: call.abandoned or done(call))
        return call

    def _answer(self, path: str, body: bytes) -> bytes:
        if path == PART_PATH:
            piece = PartPiece.parse(body)
            run_id = PartClaim.parse(piece.claim.payload).run_id
            claim = PartClaim.from_envelope(piece.claim, self.machines[run_id])
            if claim.seq <= (self.tickets[-1].seq if self.tickets else 0):
                raise RefusedError(Code.CHECKPOINT_STALE, "stale")
            if self._digests.get(claim.rank) != claim.sha256:  # begun with another: it is begun again
                self.parts.pop(claim.rank, None)
                assert claim.attempt > self._attempts.get(claim.rank, 0)
            self._digests[claim.rank], self._attempts[claim.rank] = claim.sha256, claim.attempt
            have = self.parts.get(claim.rank, b"")
            if piece.start == len(have):
                have = self.parts[claim.rank] = have + piece.data
            whole = len(have) == claim.bytes
            if whole and sha256(have) != claim.sha256:
                del self.parts[claim.rank]
                raise RefusedError(Code.UPLOAD_DAMAGED, "damaged")
            return encode({"bytes": len(have), "whole": whole})
        envelope = Envelope.parse(body, max_bytes=MAX_SIGNED_HEADER_BYTES)
        leader = next(iter(self.machines.values()))
        if path == HEADER_PATH:
            header = CheckpointHeader.parse(
                envelope.verify("application/vnd.glasshouse.checkpoint-header+json", leader)
            )
            found = [self.parts.get(rank, b"") for rank in range(header.world_size)]
            if [(len(part), sha256(part)) for part in found] != [(row.bytes, row.sha256) for row in header.parts]:
                raise RefusedError(Code.CHECKPOINT_INCOMPLETE, "incomplete")
            stored = Stored(
                deployment=header.deployment, digest=header.digest, leg=header.leg, line=header.line, seq=header.seq
            )
            return stored.sign(self.store).encode()
        assert path == COUNT_PATH
        message = CheckpointMessage.from_envelope(envelope, leader)
        Stored.from_envelope(message.stored, self.store.public)
        if not self.tickets or self.tickets[-1].digest != message.digest:
            head = self.tickets[-1] if self.tickets else None
            if (message.previous, message.seq) != (head and head.digest, head.seq + 1 if head else 1):
                raise RefusedError(Code.CHECKPOINT_STALE, "stale")
            same = ("deployment", "digest", "leg", "line", "previous", "run_id", "seq", "step")
            self.tickets.append(
                Ticket(
                    counted_us=len(self.tickets),
                    holder=key_id(leader),
                    manifest_sha256=MANIFEST,
                    **{name: getattr(message, name) for name in same},
                )
            )
            self.parts = {}
        return self.tickets[-1].sign(self.broker).encode()


class _KeeperCall:
    def __init__(self, answer: bytes | GlasshouseError) -> None:
        self._answer = answer
        self.abandoned = False

    def body(self) -> bytes:
        if isinstance(self._answer, GlasshouseError):
            raise self._answer
        return self._answer

    def abandon(self) -> None:
        self.abandoned = True


def away(_path: str, _answer: bytes) -> GlasshouseError:
    """Be a gate whose answer does not come."""
    return PeerError(Code.BROKER_UNREACHABLE, "away")


class LegBench:
    """One machine: `send` plays its worker, `told` is what it would be sent."""

    def __init__(
        self,
        folder: Path,
        gate: StoreAndGate | None = None,
        *,
        group: Group | None = None,
        patience_s: float = 60.0,
        limits: CheckpointLimits | None = None,
    ) -> None:
        self.loop, self.gate = Loop(), gate or StoreAndGate()
        self.gate.loop = self.loop
        self.out = OutDir(str(folder))
        self.out.checkpoints()
        self.folder = folder / "checkpoints"
        self.clock_s = 1000.0
        self.owner, self.resume = RecipientKey.generate(), RecipientKey.generate()
        key, run_id = SigningKey.generate(), secrets.token_hex(16)
        self.gate.machines[run_id] = key.public
        self.terms = LegTerms(
            start=LineStart(id=LINE, leg=1, seq=0),
            deployment=DEPLOYMENT,
            environment_sha256=bytes(32),
            group=group_of(group),
            limits=limits or CheckpointLimits(every_s=60, most=5, bytes=1 << 20),
            manifest_sha256=MANIFEST,
            recipients=(self.owner.public, self.resume.public),
            run_id=run_id,
            evidence_key=key,
            broker_public=self.gate.broker.public,
            store_public=self.gate.store.public,
        )
        self.told: list[dict[str, Any]] = []
        self.settled: list[tuple[Ticket | None, Code | None]] = []
        self.troubles: list[Code] = []
        self.keeper = CheckpointKeeper(
            self.loop,
            self.gate,  # type: ignore[arg-type]
            self.terms,
            settled=self._settled,
            trouble=self.troubles.append,
            patience_s=patience_s,
        )
        self.intake = PartIntake(
            self.terms,
            self.out,
            lambda: self.clock_s,
            sealed=self.keeper.part,
            there=self.keeper.there,
            full=lambda: self.keeper.give_up(Code.DISK_FULL),
        )
        self.told.append(self.intake.permit())

    def _settled(self, counted: tuple[Ticket, CheckpointHeader] | None, refused: Code | None) -> None:
        self.settled.append((counted and counted[0], refused))
        if counted:
            self.intake.counted(counted[0].seq, counted[0].digest)
        self.told.append(self.intake.permit(refused))

    def part(self, plain: bytes, *, rank: int = 0, step: int = 10, **changes: Any) -> dict[str, Any]:
        """Send one part under the last permission; return what the agent answers."""
        permitted = self.told[-1]
        previous = None if permitted["previous"] is None else bytes.fromhex(permitted["previous"])
        begins = {"previous": previous, "rank": rank, "seq": permitted["seq"], "step": step}
        self.intake.begin(PartBegins(**{**begins, **changes}))
        for at in range(0, len(plain), 3000):
            self.intake.data(memoryview(bytearray(plain[at : at + 3000])))
        return self.intake.end(PartEnds(size=len(plain)))

    def there(self, *, step: int = 10, others: tuple[OtherPart, ...] = (), seq: int | None = None) -> None:
        """Send that all parts are there."""
        self.intake.there(PartsThere(others=others, seq=seq or self.told[-1]["seq"], step=step))

    def checkpoint(self, plain: bytes = bytes(8192), *, step: int = 10) -> None:
        """Send a whole checkpoint of one rank, as soon as it may come."""
        self.clock_s += self.told[-1]["wait_us"] / 1e6
        self.part(plain, step=step)
        self.there(step=step)

    def settle(self, count: int = 1, *, within_s: float = 20.0) -> None:
        """Wait until so many checkpoints were counted or given up."""
        assert self.loop.run_until(lambda: len(self.settled) >= count, within_s=within_s), (
            self.troubles,
            self.gate.asked,
        )
