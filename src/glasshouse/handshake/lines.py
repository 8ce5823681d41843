"""Lines: which leg may be released, and which checkpoint counts; without I/O (spec/checkpoints.md sections 5 and 6).

Laws: of each number of a line there is one ticket, and of each leg one release; only the holder of the current leg
counts; what a gate is shown of its own moves a record forward and never back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from glasshouse.attestation.refusal import CheckFailedError, check_1
from glasshouse.errors import Code, FormatError, RefusedError, VerificationError
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import (
    CHECKPOINT_TYPE,
    MAX_STATEMENT_BYTES,
    CheckpointMessage,
    ResumeOrder,
    Stored,
    Ticket,
)

OVER_AFTER_S = 60
"""Beyond the lease: how far a clock may be off before a leg that fell silent is over."""
UNKNOWN_HOLDER = "0" * 32
"""The `previous` of a leg whose predecessor's holder a gate does not know that was put back from a backup."""
_SECOND_US = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The checkpoint that the next leg goes on from."""

    seq: int = 0  # 0 for the beginning
    step: int = 0
    digest: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LineRecord:
    """What the gate's store holds of a line."""

    id: bytes
    deployment: str
    # The world: that of the first leg.
    machines: int
    ranks: int
    leg: int = 0  # the last that was released; 0 before the first
    holder: str | None = None  # key id of its machine 0's evidence key; None where the gate does not know it
    lost: bool = False  # whether its owner said so of that leg
    since_us: int = 0  # when that leg was released, or this gate came to know of it
    head: Head = Head()
    ticket: Ticket | None = None  # the newest
    order_us: int = 0  # the greatest serial of an order

    @property
    def seq(self) -> int:
        """The greatest number that was counted."""
        return 0 if self.ticket is None else self.ticket.seq

    def counted_beside(self, seq: int) -> int:
        """Return what stands as `counted` beside a beginning at `seq`: the greatest number, 0 where that is `seq`."""
        return self.seq if self.seq > seq else 0

    def ended(self, *, receipts: bool, contact_us: int, lease_s: int, now_us: int) -> str:
        """Return how the current leg ended: `receipt`, `lost` or `lease`; nothing while it goes on.

        Args:
            receipts: whether each of its machines left one.
            contact_us: when one of them was last heard from; 0 where none is known.
        """
        if receipts:
            return "receipt"
        if self.lost:
            return "lost"
        silent_us = now_us - max(contact_us, self.since_us)
        return "lease" if silent_us > (lease_s + OVER_AFTER_S) * _SECOND_US else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What check 15 compares a launch with, beside the record of its line."""

    deployment: str
    machines: int
    ranks: int
    max_legs: int  # the policy's
    owner: bytes  # the package's, their public signing key
    over: str  # how the current leg ended; see `LineRecord.ended`
    order: Envelope | None  # the owner's


def check_15_line(line: LineRecord | None, start: LineStart, terms: Terms) -> LineRecord:
    """The leg is the next one of its line, the one before is over, and it begins where that left off.

    One that only repeats a release to the same keys is for the caller to see first.

    Returns:
        The line, whose `order_us` is that of the order if there is one.

    Raises:
        CheckFailedError: `run-unknown`, `line-forked`, `checkpoint-stale`, `line-busy`, `resume-world-mismatch` or
            `line-order-missing`.
    """
    if line is None or line.deployment != terms.deployment:
        raise CheckFailedError("15", Code.RUN_UNKNOWN, "this broker has no such line")
    expected, actual = f"leg {line.leg + 1}", f"leg {start.leg}"
    if start.leg <= line.leg:
        raise forked(start.leg, line.leg)
    if start.leg != line.leg + 1:
        what = "a leg whose predecessor was not released: report that one lost, and this gate goes on from there"
        raise CheckFailedError("15", Code.CHECKPOINT_STALE, what, expected=expected, actual=actual)
    if line.leg and not terms.over:
        what = f"leg {line.leg} is not over: end its machines, report them lost, or wait for a lease and a minute"
        raise CheckFailedError("15", Code.LINE_BUSY, what)
    begins, seq = (start.seq, start.checkpoint), start.counted or start.seq
    if (begins != (line.head.seq, line.head.digest) and not start.rewind) or seq != line.seq:
        what = "not the last checkpoint of its line: ask how the line stands, or order a rewind"
        numbers = f"checkpoint {line.head.seq} of {line.seq}", f"checkpoint {start.seq} of {seq}"
        raise CheckFailedError("15", Code.CHECKPOINT_STALE, what, expected=numbers[0], actual=numbers[1])
    if (terms.machines, terms.ranks) != (line.machines, line.ranks):
        worlds = (f"{line.machines} × {line.ranks}", f"{terms.machines} × {terms.ranks}")
        what = "machines and ranks on each are not the line's"
        raise CheckFailedError("15", Code.RESUME_WORLD, what, expected=worlds[0], actual=worlds[1])
    return replace(line, order_us=_ordered(line, start, terms))


def forked(leg: int, current: int) -> CheckFailedError:
    """Return the refusal of a leg that was released before, to another machine."""
    what = f"leg {leg} was released before, to another machine: ask how the line stands, and for the next"
    return CheckFailedError("15", Code.LINE_FORKED, what, expected=f"leg {current + 1}", actual=f"leg {leg}")


def _ordered(line: LineRecord, start: LineStart, terms: Terms) -> int:
    """Return the serial of the order, or that of the last where none is needed."""
    if terms.order is None:
        if start.rewind or start.leg > terms.max_legs:
            what = "a rewind" if start.rewind else f"more than the {terms.max_legs} legs of the policy"
            raise CheckFailedError("15", Code.LINE_ORDER, f"{what}, without an order of the owner's")
        return line.order_us
    try:
        order = ResumeOrder.from_envelope(terms.order, terms.owner)
    except FormatError as error:
        raise CheckFailedError("15", Code.LINE_ORDER, f"no order of this owner's: {error.message}") from None
    named = (order.deployment, order.line, order.leg, order.seq, order.digest, order.rewind)
    if named != (line.deployment, line.id, start.leg, start.seq, start.checkpoint, start.rewind):
        raise CheckFailedError("15", Code.LINE_ORDER, "an order of another leg, checkpoint or line")
    if order.serial_us <= line.order_us:
        raise CheckFailedError("15", Code.LINE_ORDER, "an order that is not later than the last of this line")
    return order.serial_us


def check_rewound(start: LineStart, step: int | None) -> Head:
    """Return the head that a rewind sets.

    Args:
        step: of the checkpoint in the store; None where that has it no more.

    Raises:
        CheckFailedError: `checkpoint-stale`.
    """
    if start.seq and step is None:
        raise CheckFailedError("15", Code.CHECKPOINT_STALE, "a rewind to a checkpoint that is not stored any more")
    return Head(seq=start.seq, step=step or 0, digest=start.checkpoint)


def released(line: LineRecord, start: LineStart, *, holder: str, head: Head, now_us: int) -> LineRecord:
    """Return a line after the release of a leg that passed check 15."""
    return replace(line, leg=start.leg, holder=holder, lost=False, since_us=now_us, head=head)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counter:
    """The runtime that signed a checkpoint message: what it was released as."""

    leg: int
    machine: int
    run_id: str
    holder: str  # key id of its evidence key
    manifest_sha256: bytes


def open_message(body: bytes) -> tuple[Envelope, CheckpointMessage]:
    """Return a checkpoint message and its envelope, whose signature is **not** checked yet.

    Raises:
        CheckFailedError: `message-too-large` or `message-invalid`.
    """

    def read(message: bytes) -> tuple[Envelope, CheckpointMessage]:
        envelope = Envelope.parse(message, max_bytes=MAX_STATEMENT_BYTES)
        return envelope, CheckpointMessage.parse(envelope.payload_of(CHECKPOINT_TYPE))

    return check_1("a checkpoint message", body, MAX_STATEMENT_BYTES, read)


def count(
    line: LineRecord, message: CheckpointMessage, counter: Counter, *, store_public: bytes | None, now_us: int
) -> Ticket:
    """Decide on a checkpoint message whose signature holds: the line's own ticket where it repeats that, or a new one.

    Args:
        store_public: the store key that the owner's delegation names; None where it names none.

    Raises:
        RefusedError: `run-unknown`, `line-forked`, `checkpoint-incomplete`, `line-superseded` or `checkpoint-stale`.
        VerificationError: `delegation-invalid`.
    """
    if (message.line, message.deployment) != (line.id, line.deployment):
        raise RefusedError(Code.RUN_UNKNOWN, "a checkpoint of another line than the runtime's")
    if counter.machine != 0 or (message.leg, message.run_id) != (counter.leg, counter.run_id):
        raise RefusedError(Code.LINE_FORKED, "a checkpoint that machine 0 of its leg did not sign")
    _check_stored(message, store_public)
    if counter.leg < line.leg:
        raise RefusedError(Code.LINE_SUPERSEDED, f"leg {line.leg} of this line was released since")
    if (counter.leg, counter.holder) != (line.leg, line.holder):
        raise RefusedError(Code.LINE_FORKED, "a leg that another machine has")
    ticket = Ticket(
        counted_us=max(now_us, line.ticket.counted_us if line.ticket else 0),
        deployment=line.deployment,
        digest=message.digest,
        holder=counter.holder,
        leg=message.leg,
        line=line.id,
        manifest_sha256=counter.manifest_sha256,
        previous=message.previous,
        run_id=message.run_id,
        seq=message.seq,
        step=message.step,
    )
    if line.ticket is not None and ticket == replace(line.ticket, counted_us=ticket.counted_us):
        return line.ticket
    if (message.seq, message.previous) != (line.seq + 1, line.head.digest):
        raise RefusedError(
            Code.CHECKPOINT_STALE,
            f"checkpoint {message.seq} of a line whose next is {line.seq + 1}, after the one that is its head",
        )
    return ticket


def _check_stored(message: CheckpointMessage, store_public: bytes | None) -> None:
    try:
        if store_public is None:
            raise FormatError(Code.SIGNATURE, "the owner named no store")
        stored = Stored.from_envelope(message.stored, store_public)
    except FormatError as error:
        raise VerificationError(Code.CHAIN_DELEGATION, f"not stored where the owner said: {error.message}") from None
    said = (stored.deployment, stored.digest, stored.leg, stored.line, stored.seq)
    if said != (message.deployment, message.digest, message.leg, message.line, message.seq):
        raise RefusedError(Code.CHECKPOINT_INCOMPLETE, "the store stated this of another checkpoint")


def counted(line: LineRecord, ticket: Ticket) -> LineRecord:
    """Return a line after a ticket was made."""
    return replace(line, ticket=ticket, head=Head(seq=ticket.seq, step=ticket.step, digest=ticket.digest))


def shown(line: LineRecord, ticket: Ticket, *, now_us: int) -> LineRecord:
    """Return a line whose gate was shown a ticket of its own: moved forward if that is newer.

    Raises:
        RefusedError: `checkpoint-foreign`: another line's.
    """
    if (ticket.line, ticket.deployment) != (line.id, line.deployment):
        raise RefusedError(Code.CHECKPOINT_FOREIGN, "the ticket of another line")
    if ticket.seq <= line.seq:
        return line
    line = forward(line, ticket.leg, ticket.holder, now_us=now_us)
    if ticket.leg == line.leg:
        line = replace(line, holder=ticket.holder)
    return counted(line, ticket)


def lost(line: LineRecord, leg: int, *, now_us: int) -> LineRecord:
    """Return a line whose owner reported a leg lost: a later one than the current moves it forward to that."""
    return replace(forward(line, leg, None, now_us=now_us), lost=True) if leg >= line.leg else line


def forward(line: LineRecord, leg: int, holder: str | None, *, now_us: int, head: Head | None = None) -> LineRecord:
    """Return a line of which a leg was released, as the gate is shown that may have forgotten it.

    Args:
        head: what that leg began from, which may be older than the newest ticket; None where that is not known.
    """
    if leg <= line.leg:
        return line
    return replace(line, leg=leg, holder=holder, lost=False, since_us=now_us, head=head or line.head)
