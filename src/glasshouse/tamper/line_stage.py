"""A leg of a line, played against a live gate and its store: what it seals, sends and has counted."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any, Self

from glasshouse.broker.client.owner_client import Reply
from glasshouse.broker.http_api import LineRequest
from glasshouse.errors import Code, InternalError
from glasshouse.handshake.launch import LaunchFile
from glasshouse.package.checkpoints.part_sealer import PartSealer
from glasshouse.tamper.stage import Actor, Owner, clock_us
from glasshouse.wire import dsse
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.checkpoint import CheckpointHeader, Place, resume_key
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import (
    COUNT_PATH,
    HEADER_PATH,
    HEADER_TYPE,
    MAX_STATEMENT_BYTES,
    PART_PATH,
    READ_PATH,
    CheckpointMessage,
    LegLost,
    PartClaim,
    PartPiece,
    ReadRequest,
    ResumeOrder,
    Ticket,
)

_PLAIN = bytes(4096)  # of the least padded size


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """A checkpoint of one rank, as its machine has it."""

    part: bytes
    header: CheckpointHeader

    def edited(self, **changes: Any) -> Self:
        """Return it with another header."""
        return replace(self, header=replace(self.header, **changes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """A machine that a leg was released to."""

    actor: Actor
    start: LineStart

    @classmethod
    def begin(cls, owner: Owner, request: LineRequest | None = None, *, launch: LaunchFile | None = None) -> Leg:
        """Have a leg released: the first of a new line by default; raises `InternalError` where it is refused."""
        actor, reply = attest(owner, launch or owner.launch(line=request or LineRequest()))
        line = actor.launch.claims().line
        if reply.status != 200 or line is None:
            raise InternalError(Code.INTERNAL, "the gate did not release a leg that it had to release")
        return cls(actor=actor, start=line)

    def seal(self, *, step: int, seq: int | None = None, previous: bytes | None = None) -> Sealed:
        """Seal a checkpoint: by default the next after the one that this leg began from."""
        owner, start = self.actor.owner, self.start
        place = Place(
            deployment=owner.deployment,
            environment_sha256=bytes(32),
            leg=start.leg,
            line=start.id,
            machines=1,
            manifest_sha256=owner.manifest.sha256,
            ranks=1,
            seq=seq or start.next_seq,
            step=step,
            previous=previous or start.checkpoint,
        )
        resume = resume_key(owner.package_key, deployment=owner.deployment, line=start.id).public
        out = io.BytesIO()
        sealer = PartSealer(out, place=place, rank=0, recipients=(*owner.manifest.recipients, resume))
        sealer.update(_PLAIN)
        row = sealer.finish().row
        header = CheckpointHeader(**place.shared(), environment_sha256=place.environment_sha256, parts=(row,))
        return Sealed(part=out.getvalue(), header=header)

    def put(self, sealed: Sealed, *, line: bytes | None = None, data: bytes | None = None, rank: int = 0) -> Reply:
        """Send the part; of `data`, a changed one."""
        claim = PartClaim(
            attempt=1,
            bytes=len(sealed.part),
            leg=sealed.header.leg,
            line=line or sealed.header.line,
            rank=rank,
            run_id=self.actor.launch.run_id,
            seq=sealed.header.seq,
            sha256=sha256(sealed.part),
        ).sign(self.actor.evidence)
        piece = PartPiece(claim=claim, data=sealed.part if data is None else data, start=0)
        return self.actor.post(PART_PATH, piece.encode())

    def put_header(self, sealed: Sealed) -> Reply:
        """Send the header."""
        signed = dsse.sign(HEADER_TYPE, sealed.header.encode(), [self.actor.evidence])
        return self.actor.post(HEADER_PATH, signed.encode())

    def store(self, sealed: Sealed) -> Envelope:
        """Have it stored whole; return the store's statement."""
        self.put(sealed).content()
        return Envelope.parse(self.put_header(sealed).content(), max_bytes=MAX_STATEMENT_BYTES)

    def count(self, sealed: Sealed, stored: Envelope, *, key: SigningKey | None = None) -> Reply:
        """Ask the gate to count it; under `key`, another's than this machine's evidence key."""
        header = sealed.header
        message = CheckpointMessage(
            deployment=header.deployment,
            digest=header.digest,
            leg=header.leg,
            line=header.line,
            previous=header.previous,
            run_id=self.actor.launch.run_id,
            seq=header.seq,
            step=header.step,
            stored=stored,
        )
        return self.actor.post(COUNT_PATH, message.sign(key or self.actor.evidence).encode())

    def save(self, *, step: int, after: Ticket | None = None) -> Ticket:
        """Have a checkpoint stored and counted."""
        more = {} if after is None else {"seq": after.seq + 1, "previous": after.digest}
        sealed = self.seal(step=step, **more)  # type: ignore[arg-type]  # an int and bytes
        reply = self.count(sealed, self.store(sealed))
        return Ticket.parse_signed(reply.content(), self.actor.launch.broker_public)

    def read(self, *, rank: int = 0) -> Reply:
        """Ask the store for what this leg began from."""
        request = ReadRequest(line=self.start.id, rank=rank, run_id=self.actor.launch.run_id, start=0)
        return self.actor.post(READ_PATH, request.sign(self.actor.evidence).encode())

    def lose(self) -> None:
        """Let the owner say that this machine does not exist any more."""
        owner = self.actor.owner
        lost = LegLost(deployment=owner.deployment, leg=self.start.leg, line=self.start.id, serial_us=clock_us())
        owner.client().leg_lost(self.start.id, lost.sign(owner.signing))

    def next(self, ticket: Ticket | None, **changes: Any) -> LineRequest:
        """Return the request for the leg after this one, with the owner's order, from what was counted last."""
        owner = self.actor.owner
        order = ResumeOrder(
            deployment=owner.deployment,
            digest=ticket.digest if ticket else None,
            leg=self.start.leg + 1,
            line=self.start.id,
            seq=ticket.seq if ticket else 0,
            serial_us=clock_us(),
        )
        order = replace(order, **changes)
        return LineRequest(
            id=order.line,
            leg=order.leg,
            seq=order.seq,
            checkpoint=order.digest,
            rewind=order.rewind,
            order=order.sign(owner.signing),
        )


def attest(owner: Owner, launch: LaunchFile) -> tuple[Actor, Reply]:
    """Send perfect evidence of a new runtime for a launch."""
    actor = Actor.enter(owner, launch)
    return actor, actor.send(actor.sign(actor.claims(actor.challenge())))


def flipped(data: bytes) -> bytes:
    """Return the bytes with their last bit changed."""
    return data[:-1] + bytes([data[-1] ^ 1])
