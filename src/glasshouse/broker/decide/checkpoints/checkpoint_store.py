"""Keeps the checkpoints of lines, sealed, and states which are whole (spec/checkpoints.md section 4).

Laws: a part is of a machine that the gate released this leg to, and of no leg before the highest; what is whole here
has its digest and is on the disk; `stored` is signed only for a header that is, with all of its parts; an older
checkpoint goes only after the ticket of a newer.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, select

from glasshouse.broker.decide.checkpoints.kept_parts import KeptParts
from glasshouse.broker.decide.decisions import ApiAnswer, Decision, Effect, keep
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import legs
from glasshouse.broker.store.line_rows import Leg, leg_of
from glasshouse.broker.store.uploads import StoreSpace
from glasshouse.errors import Code, FormatError, PackageError, RefusedError
from glasshouse.wire.canonical import b64encode
from glasshouse.wire.crypto import SigningKey, derive, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.checkpoint import (
    FRONT_BYTES,
    CheckpointHeader,
    PartHeader,
    PartRow,
    front_length,
)
from glasshouse.wire.lines.statements import (
    HEADER_RANK,
    HEADER_TYPE,
    MAX_DATA_BYTES,
    MAX_SIGNED_HEADER_BYTES,
    PART_TYPE,
    READ_TYPE,
    PartClaim,
    PartPiece,
    ReadRequest,
    Stored,
)
from glasshouse.wire.record import Record

_LABEL = b"glasshouse store key v1"
_MOST_READERS = 4096
_HOLDERS = select(legs.c.run_id).where(legs.c.machine == 0)

Parsed = TypeVar("Parsed", bound=Record)


class CheckpointStore:
    """The checkpoints of all lines.

    Attributes:
        memory: what the gate keeps of lines beside its database.
        key: which states that a checkpoint is here.
    """

    def __init__(self, broker: BrokerState, space: StoreSpace) -> None:
        self._broker = broker
        self.executor = space.executor
        self.key = SigningKey(derive(broker.key.seed(), _LABEL))
        self._parts = KeptParts(broker, space)
        self.memory = self._parts.folders
        self._reading: OrderedDict[str, int] = OrderedDict()  # where the next piece begins, by run and rank

    def part(self, body: bytes) -> Decision:
        """Read a piece of a part; what is returned writes it.

        Raises:
            FormatError: `message-invalid` or `signature-invalid`. The decision: `upload-damaged`.
            RefusedError: `run-unknown`, `line-superseded`, `checkpoint-foreign` or `checkpoint-stale`. The decision:
                `owner-quota`; `UsageError`, `disk-full`.
        """
        piece = _message(lambda: PartPiece.parse(body))
        claim = _message(lambda: PartClaim.parse(piece.claim.payload_of(PART_TYPE)))
        if piece.start + len(piece.data) > claim.bytes:
            raise FormatError(Code.MESSAGE_INVALID, "bytes behind the end of a part")
        leg = self._leg(claim.run_id, piece.claim, PART_TYPE, line=claim.line, leg=claim.leg)
        if claim.rank not in leg.ranks:
            raise RefusedError(Code.CHECKPOINT_FOREIGN, "a part of a rank that another machine has")
        self._check_next(leg, claim.seq)
        known = self._parts.coming(claim)
        # What changes nothing is no sign of life: a recording can be sent again, of a first piece too.
        goes_on = bool(piece.data) and known is not None and piece.start == known.here > 0
        return Decision(
            decide=partial(self._take, claim, piece, leg), effect=Effect.CREDIT if goes_on else Effect.CHARGE
        )

    def header(self, body: bytes) -> Decision:
        """Read a checkpoint's header; what is returned keeps it, and answers that all is here.

        Raises:
            FormatError: `message-invalid` or `signature-invalid`.
            RefusedError: as `part`. The decision: `checkpoint-incomplete` or `checkpoint-foreign`; `UsageError`,
                `disk-full`.
        """
        envelope = _message(lambda: Envelope.parse(body, max_bytes=MAX_SIGNED_HEADER_BYTES))
        header = _message(lambda: CheckpointHeader.parse(envelope.payload_of(HEADER_TYPE)))
        place = _HOLDERS.where(legs.c.line == header.line, legs.c.leg == header.leg)
        run_id = self._broker.database.read(lambda connection: connection.execute(place).scalar_one_or_none())
        leg = self._leg(run_id or "", envelope, HEADER_TYPE, line=header.line, leg=header.leg)
        line = leg.line
        found = (header.deployment, header.manifest_sha256, header.machines, header.ranks)
        if found != (line.deployment, leg.manifest_sha256, line.machines, line.ranks):
            raise RefusedError(Code.CHECKPOINT_FOREIGN, "a checkpoint of another package, deployment or world")
        self._check_next(leg, header.seq)
        if header.previous != line.head.digest:
            raise RefusedError(Code.CHECKPOINT_STALE, "a checkpoint that does not follow the last of its line")
        # Charged: it may come to nothing, or be a recording, and an honest runtime sends few.
        return Decision(decide=partial(self._keep_whole, header, leg), effect=Effect.CHARGE)

    def read(self, body: bytes) -> Decision:
        """Read a request of a machine that resumes; what is returned answers it.

        Raises:
            FormatError: `message-invalid` or `signature-invalid`.
            RefusedError: `run-unknown`, `line-superseded` or `checkpoint-foreign`. The decision:
                `checkpoint-incomplete`.
        """
        envelope = _message(lambda: Envelope.parse(body, max_bytes=len(body)))
        request = _message(lambda: ReadRequest.parse(envelope.payload_of(READ_TYPE)))
        leg = self._leg(request.run_id, envelope, READ_TYPE, line=request.line)
        if request.rank != HEADER_RANK and request.rank not in leg.ranks:
            raise RefusedError(Code.CHECKPOINT_FOREIGN, "a part of a rank that another machine has")
        reader = f"{request.run_id} {request.rank}"
        goes_on = 0 < request.start == self._reading.get(reader)
        return Decision(
            decide=partial(self._piece, request, leg, reader), effect=Effect.CREDIT if goes_on else Effect.CHARGE
        )

    def _leg(self, run_id: str, envelope: Envelope, payload_type: str, *, line: bytes, leg: int | None = None) -> Leg:
        """Return which leg signed a message, if it is the newest one of its line."""
        signer = envelope.signatures[0][0]
        public = self._broker.public

        def look(connection: Connection) -> Leg:
            return leg_of(connection, run_id, signer, broker_public=public)

        found = self._broker.database.read(look)
        if found.line.id != line or leg not in (None, found.start.leg):
            raise RefusedError(Code.RUN_UNKNOWN, "a runtime that was given another leg, or another line")
        envelope.verify(payload_type, found.evidence_public)
        if not found.is_current:
            raise _superseded()
        self._check_newest(found)
        return found

    def _check_newest(self, leg: Leg) -> None:
        """Refuse a leg before the highest that was released; again where something is written, as time has passed."""
        if leg.start.leg < self.memory.note(leg.line.id).leg:
            raise _superseded()

    def _check_next(self, leg: Leg, seq: int) -> None:
        if seq != max(leg.line.seq, self.memory.note(leg.line.id).seq) + 1:
            raise RefusedError(Code.CHECKPOINT_STALE, "a number that does not follow the last that was counted")

    def _take(self, claim: PartClaim, piece: PartPiece, leg: Leg) -> ApiAnswer:
        self._check_newest(leg)
        self._check_next(leg, claim.seq)
        self._parts.check_attempt(claim)
        path = self.memory.part_path(claim)
        known = self._parts.known(claim)
        if known is None:
            if path.is_file():
                return ApiAnswer.of({"bytes": path.stat().st_size, "whole": True})
            if piece.start or not piece.data:
                return ApiAnswer.of({"bytes": 0, "whole": False})
            known = self._parts.begin(claim, leg.owner, path)
        whole = self._parts.add(claim, known, piece.start, piece.data)
        return ApiAnswer.of({"bytes": known.here, "whole": whole})

    def _keep_whole(self, header: CheckpointHeader, leg: Leg) -> ApiAnswer:
        self._check_newest(leg)
        self._check_next(leg, header.seq)
        for rank, row in enumerate(header.parts):
            found = _front_of(self.memory.part_of(header, rank), row)
            try:
                header.check_part(found)
            except PackageError as error:
                raise RefusedError(error.code, error.message) from None
            if found.rank != rank:
                raise RefusedError(Code.CHECKPOINT_FOREIGN, "a part of another rank")
        if self.memory.header(header.line, header.digest) is None:
            self.memory.put_header(header)
        stored = Stored(
            deployment=header.deployment, digest=header.digest, leg=header.leg, line=header.line, seq=header.seq
        )
        return ApiAnswer(body=stored.sign(self.key).encode())

    def _piece(self, request: ReadRequest, leg: Leg, reader: str) -> ApiAnswer:
        header = None if leg.start.checkpoint is None else self.memory.header(request.line, leg.start.checkpoint)
        if header is None:
            raise RefusedError(
                Code.CHECKPOINT_INCOMPLETE, "the checkpoint that this leg begins from is not stored here"
            )
        path = self.memory.header_path(request.line, leg=header.leg, seq=header.seq)
        if request.rank != HEADER_RANK:
            path = self.memory.part_of(header, request.rank)
        try:
            with path.open("rb") as file:
                size, data = os.fstat(file.fileno()).st_size, os.pread(file.fileno(), MAX_DATA_BYTES, request.start)
        except OSError:
            raise RefusedError(Code.CHECKPOINT_INCOMPLETE, "a part of this checkpoint is not stored here") from None
        keep(self._reading, reader, request.start + len(data), most=_MOST_READERS)
        return ApiAnswer.of({"bytes": size, "data": b64encode(data)})


def _front_of(path: Path, row: PartRow) -> PartHeader:
    """Return the header of a part that is here whole, as a checkpoint's header names it."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != row.bytes:
                raise RefusedError(Code.CHECKPOINT_INCOMPLETE, "a part of another length than the checkpoint names")
            begin = file.read(FRONT_BYTES)
            front = begin + file.read(front_length(begin) - FRONT_BYTES)
        if sha256(front) != row.head_sha256:
            raise RefusedError(Code.CHECKPOINT_INCOMPLETE, "a part that begins otherwise than the checkpoint names")
        return PartHeader.parse_front(front)
    except OSError:
        raise RefusedError(Code.CHECKPOINT_INCOMPLETE, "a part of this checkpoint is not here whole") from None
    except (FormatError, PackageError) as error:
        raise RefusedError(
            Code.CHECKPOINT_FOREIGN, f"a part that is none of this checkpoint: {error.message}"
        ) from None


def _message(parse: Callable[[], Parsed]) -> Parsed:
    try:
        return parse()
    except FormatError as error:
        raise FormatError(Code.MESSAGE_INVALID, error.message) from None


def _superseded() -> RefusedError:
    return RefusedError(Code.LINE_SUPERSEDED, "another leg of this line was released")
