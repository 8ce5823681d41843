"""A gate with a store of checkpoints, called in this process, and machines of lines that send it parts."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from glasshouse.broker.client.owner_client import Reply
from glasshouse.broker.decide.checkpoints.checkpoint_store import CheckpointStore
from glasshouse.broker.http_api import LineRequest
from glasshouse.broker.store.broker_state import open_broker
from glasshouse.broker.store.uploads import NO_LIMIT, StoreSpace
from glasshouse.errors import Code
from glasshouse.package.checkpoints.part_content import PartWriter
from glasshouse.package.checkpoints.part_sealer import PartSealer, SealedPart
from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64decode, decode
from glasshouse.wire.crypto import RecipientKey, SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.checkpoint import CheckpointHeader, PartRow, Place
from glasshouse.wire.lines.statements import (
    COUNT_PATH,
    HEADER_PATH,
    HEADER_RANK,
    HEADER_TYPE,
    MAX_STATEMENT_BYTES,
    PART_PATH,
    READ_PATH,
    CheckpointMessage,
    PartClaim,
    PartPiece,
    ReadRequest,
    Stored,
)
from simulators.direct_gate import DirectGate, LineOwner, Machine

RESUME = RecipientKey.generate().public  # as good as any: the store opens nothing
PIECE = 1500


class StoringGate(DirectGate):
    """The same decisions, and those of its store.

    Args:
        limit_bytes: the most that it keeps.
    """

    def __init__(self, directory: Path, *, limit_bytes: int = NO_LIMIT) -> None:
        self.folder, self.limit_bytes = directory.parent / "store", limit_bytes
        super().__init__(directory)

    def open(self) -> None:
        stored = open_broker(self.directory, clock_us=self.clock_us)
        self.space = StoreSpace(stored, folder=self.folder, limit_bytes=self.limit_bytes)
        self.store = CheckpointStore(stored, self.space)
        self.store_key = self.store.key
        self.memory = self.store.memory  # type: ignore[assignment]  # the real one, in the place of a stand-in
        super().open()
        self._messages |= {
            PART_PATH: self.store.part,
            HEADER_PATH: self.store.header,
            READ_PATH: self.store.read,
        }

    def close(self) -> None:
        self.space.close()
        super().close()

    def again(self) -> None:
        """End as a crash does, and start on what is on the disk."""
        self.close()
        self.open()

    def settle(self) -> None:
        """Wait until the store has done what was left to its thread."""
        self.space.executor.submit(lambda: None).result()

    def files(self) -> list[str]:
        """Return the names of all that is kept of lines but the notes."""
        self.settle()
        return sorted(path.name for path in (self.folder / "lines").glob("*/*") if path.name != "newest.json")


class Holder:
    """One machine of a leg that was released to it, and the parts that it seals.

    Args:
        released: the answer with its release; None to attest now.
    """

    def __init__(self, gate: StoringGate, machine: Machine, released: Reply | None = None) -> None:
        start = machine.opened(released or machine.attest())
        self.gate, self.start, self.actor = gate, start, machine.actor
        self.evidence = machine.actor.evidence
        claims = machine.actor.launch.claims()
        self.run_id, self.group = claims.run_id, claims.group or Group(id=bytes(32), machines=1, machine=0, ranks=1)
        self.seq, self.head, self.attempt = start.next_seq - 1, start.checkpoint, 1

    @property
    def place(self) -> Place:
        """Return where the next checkpoint stands."""
        return Place(
            deployment=self.actor.owner.deployment,
            environment_sha256=bytes(32),
            leg=self.start.leg,
            line=self.start.id,
            machines=self.group.machines,
            manifest_sha256=self.actor.owner.manifest.sha256,
            ranks=self.group.ranks,
            seq=self.seq + 1,
            step=10 * (self.seq + 1),
            previous=self.head,
        )

    def seal(self, rank: int = 0, content: bytes = b"state", **changes: Any) -> tuple[bytes, SealedPart]:
        """Return a sealed part of this machine's next checkpoint."""
        out = io.BytesIO()
        sealer = PartSealer(out, place=replace(self.place, **changes), rank=rank, recipients=[RESUME], chunk_bytes=1024)
        writer = PartWriter(sealer.update)
        writer.begin("state")
        writer.update(content)
        writer.finish()
        sealed = sealer.finish()
        return out.getvalue(), sealed

    def claim(self, row: PartRow, rank: int = 0, **changes: Any) -> PartClaim:
        """Return the claim of a part."""
        made = PartClaim(
            attempt=self.attempt,
            bytes=row.bytes,
            leg=self.start.leg,
            line=self.start.id,
            rank=rank,
            run_id=self.run_id,
            seq=self.seq + 1,
            sha256=row.sha256,
        )
        return replace(made, **changes)

    def piece(self, claim: PartClaim, data: bytes, start: int = 0, *, signer: SigningKey | None = None) -> Reply:
        """Send a piece of a part."""
        piece = PartPiece(claim=claim.sign(signer or self.evidence), data=data, start=start)
        return self.gate.send("POST", PART_PATH, piece.encode())

    def send(self, part: bytes, claim: PartClaim, *, until: int | None = None) -> Reply:
        """Send a part, piece by piece, all of it or so many bytes."""
        for start in range(0, len(part[:until]), PIECE):
            reply = self.piece(claim, part[:until][start : start + PIECE], start)
            assert reply.status == 200, reply.body
        return reply

    def upload(self, *ranks: int, **changes: Any) -> list[PartRow]:
        """Seal and send the parts of ranks: of all of this machine by default."""
        rows = []
        for rank in ranks or range(self.group.first_rank, self.group.first_rank + self.group.ranks):
            part, sealed = self.seal(rank, **changes)
            found = answer(self.send(part, self.claim(sealed.row, rank)))
            assert found == {"bytes": len(part), "whole": True}, found
            rows.append(sealed.row)
        return rows

    def header(self, *rows: PartRow, **changes: Any) -> CheckpointHeader:
        """Return the header over parts."""
        place = self.place
        made = CheckpointHeader(**place.shared(), environment_sha256=place.environment_sha256, parts=rows)
        return replace(made, **changes)

    def state(self, header: CheckpointHeader, *, signer: SigningKey | None = None) -> Reply:
        """Send a header."""
        signed = dsse.sign(HEADER_TYPE, header.encode(), [signer or self.evidence])
        reply = self.gate.send("POST", HEADER_PATH, signed.encode())
        if reply.status == 200:
            self.stored = Envelope.parse(reply.body, max_bytes=MAX_STATEMENT_BYTES)
        return reply

    def checkpoint(self, **changes: Any) -> CheckpointHeader:
        """Send a whole checkpoint of one machine and have it stored."""
        header = self.header(*self.upload(**changes))
        assert self.state(header).status == 200
        said = Stored.from_envelope(self.stored, self.gate.store_key.public)
        assert (said.digest, said.seq) == (header.digest, header.seq)
        return header

    def count(self, header: CheckpointHeader) -> Reply:
        """Have the checkpoint that was stored last counted, and go on from it."""
        message = CheckpointMessage(
            deployment=header.deployment,
            digest=header.digest,
            leg=header.leg,
            line=header.line,
            previous=header.previous,
            run_id=self.run_id,
            seq=header.seq,
            step=header.step,
            stored=self.stored,
        )
        reply = self.gate.send("POST", COUNT_PATH, message.sign(self.evidence).encode())
        if reply.status == 200:
            self.seq, self.head = header.seq, header.digest
        return reply

    def counted(self, **changes: Any) -> CheckpointHeader:
        """Send a checkpoint and have it counted."""
        header = self.checkpoint(**changes)
        assert self.count(header).status == 200
        return header

    def ask(
        self, rank: int = HEADER_RANK, start: int = 0, *, signer: SigningKey | None = None, **changes: Any
    ) -> Reply:
        """Ask for a piece of the checkpoint that this leg begins from."""
        request = replace(ReadRequest(line=self.start.id, rank=rank, run_id=self.run_id, start=start), **changes)
        return self.gate.send("POST", READ_PATH, request.sign(signer or self.evidence).encode())

    def fetch(self, rank: int = HEADER_RANK) -> bytes:
        """Return a whole part, or the header, of that checkpoint."""
        content = b""
        while piece := b64decode((found := answer(self.ask(rank, len(content))))["data"]):
            content += piece
        assert len(content) == found["bytes"]
        return content


def answer(reply: Reply) -> dict[str, Any]:
    """Return what was answered."""
    assert reply.status == 200, reply.body
    found = decode(reply.body, max_bytes=1 << 20)
    assert isinstance(found, dict)
    return found


def refused(reply: Reply) -> Code:
    """Return the code of a refusal."""
    assert reply.status != 200
    return reply.problem().code


def checkpoints(gate: StoringGate) -> list[str]:
    """Return the checkpoints that are there whole, and have all of their parts, as leg-number."""
    names = gate.files()
    headers = [name.removesuffix(".header") for name in names if name.endswith(".header")]
    assert {name.rsplit("-", 3)[0] for name in names if name.count("-") == 4} >= set(headers)
    return headers


def first_leg(gate: StoringGate, owner: LineOwner, *, ranks: int = 1) -> Holder:
    """Return the only machine of a new line's first leg."""
    group = None
    if ranks > 1:
        (group,) = owner.client().add_group(owner.deployment, machines=1, ranks=ranks)
    return Holder(gate, owner.leg(group=group))


def group_leg(gate: StoringGate, owner: LineOwner, asked: LineRequest | None = None) -> tuple[Holder, Holder]:
    """Return two machines of a leg, with two ranks each, of a new line if none is named."""
    places = owner.client().add_group(owner.deployment, machines=2, ranks=2)
    zero = owner.leg(asked, group=places[0])
    one = owner.leg(asked or LineRequest(id=zero.line), group=places[1])
    assert zero.attest().status == 202
    second = Holder(gate, one)
    return Holder(gate, zero, zero.actor.ask(zero.challenge, zero.evidence)), second


def next_leg(
    gate: StoringGate,
    owner: LineOwner,
    before: Holder,
    *,
    back_to: CheckpointHeader | None = None,
) -> Holder:
    """Return the machine of the leg after one whose lease has run out."""
    gate.advance(661)
    group = None
    if before.group.ranks > 1:
        (group,) = owner.client().add_group(owner.deployment, machines=1, ranks=before.group.ranks)
    seq, head = (before.seq, before.head) if back_to is None else (back_to.seq, back_to.digest)
    asked = LineRequest(
        id=before.start.id, leg=before.start.leg + 1, seq=seq, checkpoint=head, rewind=back_to is not None
    )
    return Holder(gate, owner.leg(owner.order(asked), group=group))
