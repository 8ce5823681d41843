"""What is signed about a line: by its runtimes, its store, its gate and its owner (spec/checkpoints.md section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.wire import dsse
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import MAX_MACHINES
from glasshouse.wire.lines.checkpoint import MAX_HEADER_BYTES, MAX_WORLD
from glasshouse.wire.lines.line_start import LINE_BYTES, MAX_LEGS
from glasshouse.wire.record import LEFT_OUT, Id, Record, Sha256, choice, digest, integer, items, octets

PART_TYPE = "application/vnd.glasshouse.checkpoint-part+json"
HEADER_TYPE = "application/vnd.glasshouse.checkpoint-header+json"
STORED_TYPE = "application/vnd.glasshouse.checkpoint-stored+json"
CHECKPOINT_TYPE = "application/vnd.glasshouse.checkpoint+json"
TICKET_TYPE = "application/vnd.glasshouse.ticket+json"
READ_TYPE = "application/vnd.glasshouse.checkpoint-read+json"
ORDER_TYPE = "application/vnd.glasshouse.resume-order+json"
LOST_TYPE = "application/vnd.glasshouse.leg-lost+json"
ABANDONED_TYPE = "application/vnd.glasshouse.leg-abandoned+json"

PART_PATH = "/v1/checkpoint/part"
HEADER_PATH = "/v1/checkpoint/header"
COUNT_PATH = "/v1/checkpoint/count"
READ_PATH = "/v1/checkpoint/read"

LINE_FORMAT = "glasshouse-line/1"
LINE_START = b'{"format":"glasshouse-line/1"'
"""What a line file begins with."""
MAX_LINE_BYTES = 64 << 20
MAX_PIECE_BYTES = 256 * 1024
MAX_DATA_BYTES = 176 * 1024
MAX_STATEMENT_BYTES = 8192
MAX_SIGNED_HEADER_BYTES = (MAX_HEADER_BYTES + 2) // 3 * 4 + 1024
HEADER_RANK = -1
"""The rank in a read request that stands for the header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfLine(dsse.Signed, max_bytes=MAX_STATEMENT_BYTES, max_elements=128):
    """Base: which leg of which line it is about."""

    leg: Annotated[int, integer(1, MAX_LEGS)]
    line: Annotated[bytes, digest(LINE_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartClaim(_OfLine, name="part claim", payload_type=PART_TYPE):
    """A part that a machine seals; signed by its evidence key."""

    attempt: Annotated[int, integer(1)]  # greater than in every part before that the machine gave up
    bytes: Annotated[int, integer(1)]  # of the sealed part
    rank: Annotated[int, integer(0, MAX_WORLD - 1)]
    run_id: Id  # of the machine
    seq: Annotated[int, integer(1)]
    sha256: Sha256  # of the sealed part


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPiece(Record, name="piece of a part", max_bytes=MAX_PIECE_BYTES, max_elements=64):
    """The body of ``POST /v1/checkpoint/part``."""

    claim: Envelope  # of a `PartClaim`
    data: Annotated[bytes, octets(max_length=MAX_DATA_BYTES)]  # may be empty
    start: Annotated[int, integer()]  # the place of its first byte in the part

    def __post_init__(self) -> None:
        if len(self.claim.encode()) > MAX_STATEMENT_BYTES:
            raise FormatError(Code.TOO_LARGE, "a claim that is too long")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted(_OfLine):
    """Base: one checkpoint by number and digest."""

    deployment: Id
    digest: Sha256  # of its header
    seq: Annotated[int, integer(1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored(_Counted, name="stored", payload_type=STORED_TYPE):
    """All parts and the header are on the store's disk; signed by the store key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMessage(_Counted, name="checkpoint", payload_type=CHECKPOINT_TYPE):
    """What machine 0 asks the gate to count, signed by its evidence key."""

    run_id: Id  # machine 0's
    step: int
    stored: Envelope  # of a `Stored`
    previous: Annotated[Sha256 | None, LEFT_OUT] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket(_Counted, name="ticket", payload_type=TICKET_TYPE):
    """The gate's word that a checkpoint is the line's head; signed by the broker key, once for each `seq`."""

    counted_us: int
    holder: Id  # key id of machine 0's evidence key
    manifest_sha256: Sha256
    run_id: Id
    step: int
    previous: Annotated[Sha256 | None, LEFT_OUT] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest(dsse.Signed, name="read request", max_bytes=4096, max_elements=16, payload_type=READ_TYPE):
    """What a machine that resumes asks the store for, signed by its evidence key."""

    line: Annotated[bytes, digest(LINE_BYTES)]
    rank: Annotated[int, integer(HEADER_RANK, MAX_WORLD - 1)]
    run_id: Id
    start: Annotated[int, integer()]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOrder(_OfLine, name="resume order", payload_type=ORDER_TYPE):
    """The owner's order that a line goes on, as which leg and from where."""

    deployment: Id
    seq: int  # 0: from the beginning
    serial_us: Annotated[int, integer(1)]  # when it was signed, and greater than in any order of this line before
    digest: Annotated[Sha256 | None, LEFT_OUT] = None
    rewind: Annotated[bool, LEFT_OUT] = False  # whether an older checkpoint than the last is meant


@dataclass(frozen=True, kw_only=True, slots=True)
class LegLost(_OfLine, name="leg lost", payload_type=LOST_TYPE):
    """The owner's word that the machines of a leg do not exist any more."""

    deployment: Id
    serial_us: Annotated[int, integer(1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LegAbandoned(_OfLine, name="leg abandoned", max_bytes=64 * 1024, max_elements=512, payload_type=ABANDONED_TYPE):
    """The gate's word that a leg is over without a receipt of each machine: its wiping is not shown."""

    deployment: Id
    # Key id of each machine's evidence key; at a gate that was put back from a backup of before that leg, machine 0's
    # where a note or a ticket names it, else none.
    evidence: Annotated[tuple[Id, ...], items(MAX_MACHINES)]
    manifest_sha256: Sha256
    run_ids: Annotated[tuple[Id, ...], items(MAX_MACHINES)]  # of each machine
    seq: int  # the last that was counted of the line
    time_us: int
    why: Annotated[str, choice(("lease", "lost"))]
    digest: Annotated[Sha256 | None, LEFT_OUT] = None  # of that checkpoint
    head: Annotated[Envelope | None, LEFT_OUT] = None  # the last countersigned head of machine 0
