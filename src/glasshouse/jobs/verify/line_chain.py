"""Walks a line from its first machine to its last: each leg is there or abandoned, and begins where the line was.

Laws: every document is under the owner's key, or under the broker's that the owner delegates to; of one leg there is
one release, and of one number one ticket. Source: spec/checkpoints.md section 9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.evidence.heads import COUNTERSIGNED_HEAD_TYPE
from glasshouse.jobs.verify.line_file import LegDocuments, LineFile
from glasshouse.jobs.verify.run_files import check_group
from glasshouse.jobs.verify.verdict import Verdict, verify_bundle
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import key_id
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import LegAbandoned, ResumeOrder, Ticket
from glasshouse.wire.states import Outcome

# Of a leg before which its gate was put back from a backup: it does not know the holder.
_FORGOTTEN = "0" * 32
_ASK = "its gate has it: glasshouse fetch RUN -o DIR asks for it with your key"
Document = TypeVar("Document", LegAbandoned, ResumeOrder, Ticket)


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkedLeg:
    """A leg whose documents hold, and fit the leg before."""

    number: int
    machines: tuple[Verdict, ...]  # of those that left a receipt, in their order
    abandoned: LegAbandoned | None  # where not all did
    tickets: tuple[Ticket, ...]  # of its checkpoints, those that are known
    seq: int  # of the checkpoint that it began from
    step: int | None  # and its step; None where that is not known
    rewind: bool
    went_on: bool  # whether another leg was released after it

    @property
    def whole(self) -> bool:
        """Whether every machine left a receipt, be it after the leg was abandoned."""
        return bool(self.machines) and len(self.machines) == self.machines[0].machines

    @property
    def completed_too_soon(self) -> bool:
        """Whether a receipt says that the training completed in it, although the line went on after it."""
        return self.went_on and any(one.outcome is Outcome.COMPLETED for one in self.machines)

    @property
    def last(self) -> Ticket | None:
        """Its last checkpoint."""
        return self.tickets[-1] if self.tickets else None


@dataclass(kw_only=True, slots=True)
class _Standing:
    """Where a line is after some of its legs."""

    seq: int = 0  # of its head
    digest: bytes | None = None
    greatest: int = 0  # number that was counted
    holder: str | None = None  # key id, of the last leg
    known: dict[int, Ticket]  # of all legs


def walk_line(
    data: bytes, *, owner: bytes, now_us: int | None = None, open_end: bool = False
) -> tuple[bytes, tuple[WalkedLeg, ...]]:
    """Verify a line file; return the line's id and its legs.

    Args:
        open_end: whether of the last leg nothing need show that it is over: it is not `whole` then.

    Raises:
        FormatError: it is none.
        VerificationError: `line-forked`: two tickets of one number, two releases of one leg, or a leg that begins
            elsewhere than where the line was; `checkpoint-foreign`: a document of another line, package or gate;
            `line-order-missing`; `incomplete`: a leg or a ticket is missing; or as `verify_bundle`.
    """
    file = LineFile.parse(data)
    receipts = [
        [verify_bundle(encode(bundle), owner=owner, now_us=now_us) for bundle in leg.bundles] for leg in file.legs
    ]
    whole = [verdict for its in receipts for verdict in its]
    line = _check_one_line(whole)
    broker = whole[0].chain.delegation.broker_public
    walker = _Walker(line, broker, owner, whole[0], len(file.legs), open_end)
    walked = [
        walker.leg(number, leg, its) for number, (leg, its) in enumerate(zip(file.legs, receipts, strict=True), 1)
    ]
    walker.check_abandoned(walked)
    return line, tuple(walked)


def _check_one_line(receipts: Sequence[Verdict]) -> bytes:
    """Check that all receipts are of one line, package, deployment and gate; return the line's id."""
    if not receipts:
        raise VerificationError(
            Code.CHAIN_INCOMPLETE, "no leg of the line left a receipt: nothing names its gate's key"
        )
    starts = [one.chain.token.line for one in receipts]
    found = {None if start is None else start.id for start in starts}
    for what, values in (
        ("line", found),
        ("deployment", {one.chain.token.deployment for one in receipts}),
        ("package", {one.chain.token.manifest_sha256 for one in receipts}),
        ("gate", {one.chain.delegation.broker_public for one in receipts}),
    ):
        if len(values) != 1:
            raise VerificationError(Code.CHECKPOINT_FOREIGN, f"receipts of more than one {what}")
    line = found.pop()
    if line is None:
        raise VerificationError(Code.CHECKPOINT_FOREIGN, "a receipt of a run that is of no line")
    if any(one.chain.ear is None for one in receipts):
        raise VerificationError(Code.CHAIN_INCOMPLETE, "a receipt of a run that no key was released to")
    worlds = {(1, 1) if (group := one.chain.token.group) is None else (group.machines, group.ranks) for one in receipts}
    if len(worlds) != 1:
        raise VerificationError(Code.RESUME_WORLD, "legs on another number of machines or ranks than the first")
    return line


class _Walker:
    """Holds each leg to the ones before it."""

    def __init__(self, line: bytes, broker: bytes, owner: bytes, first: Verdict, count: int, open_end: bool) -> None:
        self._line, self._broker, self._owner, self._count, self._open_end = line, broker, owner, count, open_end
        token = first.chain.token
        self._deployment, self._manifest = token.deployment, token.manifest_sha256
        self._machines = first.machines
        self._at = _Standing(known={})

    def leg(self, number: int, documents: LegDocuments, machines: Sequence[Verdict]) -> WalkedLeg:
        """Check the next leg, and go on to where it left the line."""
        at = self._at
        abandoned = self._abandoned(number, documents.abandoned, machines)
        start = self._start(number, machines, abandoned)
        order = None if documents.order is None else self._of_line(ResumeOrder, documents.order, self._owner, number)
        seq, digest, rewind = self._begin(number, start, order)
        begun_step = at.known[seq].step if seq in at.known else None if seq else 0
        at.seq, at.digest = seq, digest
        holder = _holder(machines, abandoned)
        tickets = self._tickets(number, documents.tickets, holder, machines, abandoned)
        self._check_last(number, tickets, machines, abandoned)
        at.holder = tickets[-1].holder if holder is None and tickets else holder
        return WalkedLeg(
            number=number,
            machines=tuple(machines),
            abandoned=abandoned,
            tickets=tuple(tickets),
            seq=seq,
            step=begun_step,
            rewind=rewind,
            went_on=number < self._count,
        )

    def _abandoned(self, number: int, envelope: Envelope | None, machines: Sequence[Verdict]) -> LegAbandoned | None:
        """Return the gate's word on a leg, checked against its receipts: all of them are there, or it is."""
        keys = _by_machine(number, machines)
        if self._machines > 1 and machines:
            with _within(number):
                check_group([one.chain for one in machines], whole=False)
        if envelope is None:
            missing = sorted(set(range(self._machines)) - set(keys))
            if missing and not (self._open_end and number == self._count):
                named = "" if self._machines == 1 else f" of machine {', '.join(map(str, missing))}"
                raise VerificationError(
                    Code.CHAIN_INCOMPLETE,
                    f"leg {number} left no receipt{named} that is known here, and no word of its gate that it is over",
                    hint=_ASK,
                )
            return None
        said = self._of_line(LegAbandoned, envelope, self._broker, number)
        if said.manifest_sha256 != self._manifest:
            raise VerificationError(Code.CHECKPOINT_FOREIGN, f"leg {number} was abandoned with another package")
        if said.head is not None:
            with _within(number):
                said.head.verify(COUNTERSIGNED_HEAD_TYPE, self._broker)
        # Of a leg that its gate had forgotten, it names machine 0 at most.
        all_named = bool(said.run_ids)
        for machine, key in keys.items():
            stated = said.evidence[machine] if machine < len(said.evidence) else None
            if stated != key and (stated is not None or all_named):
                raise _forked(f"leg {number} was released to two machines: one left a receipt, one was abandoned")
        return said

    def _start(self, number: int, machines: Sequence[Verdict], abandoned: LegAbandoned | None) -> LineStart | None:
        """Return where the receipts of a leg say that it began; None where it left none."""
        starts = {one.chain.ear.line for one in machines if one.chain.ear is not None}
        start = next(iter(starts), None)
        if start is None:
            return None
        if len(starts) != 1:
            raise _forked(f"the machines of leg {number} began in more than one place")
        _check_leg(start.leg, number)
        if number > 1 and start.previous != (self._at.holder or _FORGOTTEN):
            raise _forked(f"leg {number} does not follow the machine of the leg before it")
        return start

    def _begin(self, number: int, start: LineStart | None, order: ResumeOrder | None) -> tuple[int, bytes | None, bool]:
        """Return number and digest of the checkpoint that a leg began from, checked against where the line was."""
        at = self._at
        if start is None:  # of an abandoned leg its owner's order says where, or it was the head
            rewind = order is not None and order.rewind
            return (order.seq, order.digest, True) if order is not None and rewind else (at.seq, at.digest, False)
        if max(start.seq, start.counted) > at.greatest:
            missing = max(start.seq, start.counted)
            raise VerificationError(
                Code.CHAIN_INCOMPLETE, f"leg {number} began after checkpoint {missing}, whose ticket is not here"
            )
        if max(start.seq, start.counted) < at.greatest:
            raise _forked(f"leg {number} began before checkpoint {at.greatest} was counted, and the leg before had it")
        if start.rewind:
            named = order is not None and (order.seq, order.digest, order.rewind)
            if named != (start.seq, start.checkpoint, True):
                raise VerificationError(
                    Code.LINE_ORDER, f"leg {number} went back to checkpoint {start.seq} without its owner's order"
                )
        elif (start.seq, start.checkpoint) != (at.seq, at.digest):
            raise _forked(f"leg {number} began from checkpoint {start.seq}, and the line was at {at.seq}")
        return start.seq, start.checkpoint, start.rewind

    def _tickets(
        self,
        number: int,
        envelopes: Sequence[Envelope],
        holder: str | None,
        machines: Sequence[Verdict],
        abandoned: LegAbandoned | None,
    ) -> list[Ticket]:
        """Return the tickets of a leg in order; the line goes on to each."""
        at, found = self._at, list[Ticket]()
        run_id = next((one.chain.receipt.run_id for one in machines if _machine(one) == 0), None)
        if abandoned is not None and abandoned.run_ids:
            run_id = abandoned.run_ids[0]
        said = [self._of_line(Ticket, envelope, self._broker, number) for envelope in envelopes]
        for ticket in sorted(said, key=lambda one: one.seq):
            if ticket.manifest_sha256 != self._manifest:
                raise VerificationError(Code.CHECKPOINT_FOREIGN, f"checkpoint {ticket.seq} is of another package")
            if ticket.seq <= at.greatest:
                raise _forked(f"two checkpoints were counted as number {ticket.seq}")
            if (holder is not None and ticket.holder != holder) or (run_id is not None and ticket.run_id != run_id):
                raise _forked(f"checkpoint {ticket.seq} was counted for another machine than leg {number}'s first")
            if ticket.seq == at.greatest + 1 and ticket.previous != at.digest:
                raise _forked(f"checkpoint {ticket.seq} does not follow the one before it")
            at.seq, at.digest, at.greatest = ticket.seq, ticket.digest, ticket.seq
            at.known[ticket.seq] = ticket
            found.append(ticket)
        return found

    def _check_last(
        self, number: int, tickets: Sequence[Ticket], machines: Sequence[Verdict], abandoned: LegAbandoned | None
    ) -> None:
        """Hold a leg's tickets to the last that its receipt, or the gate's word on it, names."""
        by_seq = {ticket.seq: ticket.digest for ticket in tickets}
        for one in machines:
            line = one.chain.receipt.line
            if line is None or line.last is None or _machine(one) != 0:
                continue
            if line.last.seq not in by_seq:
                raise VerificationError(
                    Code.CHAIN_INCOMPLETE,
                    f"the ticket of checkpoint {line.last.seq}, of leg {number}, is not here",
                    hint=_ASK,
                )
            if by_seq[line.last.seq] != line.last.digest:
                raise _forked(f"two checkpoints were counted as number {line.last.seq}")
        if abandoned is not None and abandoned.seq < self._at.greatest:
            raise _forked(f"leg {number} was abandoned at checkpoint {abandoned.seq}, and had counted a later one")

    def check_abandoned(self, legs: Sequence[WalkedLeg]) -> None:
        """Hold what the gate said of abandoned legs, when later ones were released too, to all tickets."""
        for said in (leg.abandoned for leg in legs if leg.abandoned is not None):
            if said.seq in self._at.known and self._at.known[said.seq].digest != said.digest:
                raise _forked(f"two checkpoints were counted as number {said.seq}")

    def _of_line(self, kind: type[Document], envelope: Envelope, signer: bytes, number: int) -> Document:
        """Return a document of a leg of this line."""
        with _within(number):
            said = kind.from_envelope(envelope, signer)
        if (said.line, said.deployment) != (self._line, self._deployment):
            raise VerificationError(Code.CHECKPOINT_FOREIGN, f"a document of leg {number} is of another line")
        _check_leg(said.leg, number)
        return said


def _check_leg(leg: int, number: int) -> None:
    """Check that a document's leg is the one that follows the last."""
    if leg > number:
        raise VerificationError(Code.CHAIN_INCOMPLETE, f"there is nothing of leg {number}, and of one after it")
    if leg < number:
        raise _forked(f"leg {leg} is there twice")


def _by_machine(number: int, machines: Sequence[Verdict]) -> dict[int, str]:
    """Return the evidence key ids of a leg's machines; raises where one machine has two."""
    found: dict[int, str] = {}
    for one in machines:
        key = key_id(one.chain.receipt.evidence_public)
        if found.setdefault(_machine(one), key) != key:
            raise _forked(f"leg {number} was released twice, to two keys")
    if len(found) != len(machines):
        raise _forked(f"leg {number} has two receipts of one machine")
    return found


def _machine(one: Verdict) -> int:
    group = one.chain.token.group
    return 0 if group is None else group.machine


def _holder(machines: Sequence[Verdict], abandoned: LegAbandoned | None) -> str | None:
    """Return the key id of a leg's holder; None where its gate had forgotten it."""
    for one in machines:
        if _machine(one) == 0:
            return key_id(one.chain.receipt.evidence_public)
    return abandoned.evidence[0] if abandoned is not None and abandoned.evidence else None


def _forked(why: str) -> VerificationError:
    return VerificationError(
        Code.LINE_FORKED,
        f"the line forked: {why}",
        hint="its gate signed both: ask who runs it before you use a result",
    )


@contextlib.contextmanager
def _within(number: int) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise VerificationError(error.code, f"a document of leg {number} does not hold: {error.message}") from None
