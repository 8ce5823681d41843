"""Has checkpoints kept by the store and counted by the gate, while the job trains on.

Laws: one request is in flight at a time; silence is tried again with the same bytes, so that a ticket whose answer was
lost is asked for again; nothing counts but a statement signed by the store's key and a ticket signed by the pinned
broker key, each equal to what was asked for. What a gate refuses, or what makes no progress for the length of the
lease, is given up and training goes on; a checkpoint that the gate was asked to count is not given up on silence, for
it may be counted, and so it may where a refusal came: any hop on the way can send one. Where its number is stale later,
its ticket is asked for once more. A leg that was superseded ends the run. Source: spec/checkpoints.md sections 4 and 5.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError, RefusedError
from glasshouse.runtime.gate.broker_client import BrokerCall, BrokerClient
from glasshouse.runtime.keys.outdir import disk_errors, remove
from glasshouse.runtime.lines.leg_terms import LegTerms
from glasshouse.runtime.loop import Loop, Timer
from glasshouse.wire import dsse
from glasshouse.wire.canonical import decode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.checkpoint import CheckpointHeader, PartRow, Place
from glasshouse.wire.lines.statements import (
    COUNT_PATH,
    HEADER_PATH,
    HEADER_TYPE,
    MAX_DATA_BYTES,
    MAX_STATEMENT_BYTES,
    PART_PATH,
    CheckpointMessage,
    PartClaim,
    PartPiece,
    Stored,
    Ticket,
)
from glasshouse.wire.record import fixed, flag, integer

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 10.0
_KEPT = fixed(bytes=integer(), whole=flag())
# The store lacks a part: of another machine, which is on its way, or one that was damaged there.
_AGAIN = frozenset({Code.CHECKPOINT_INCOMPLETE, Code.UPLOAD_DAMAGED})
_REPAIRS = 3
_MAX_KEPT_BYTES = 256
_S = TypeVar("_S", bound=dsse.Signed)


@dataclass(kw_only=True, slots=True)
class _Upload:
    """A part on its way, which lies at `path`."""

    claim: Envelope
    path: str
    start: int = 0  # how much of it the store has
    known: bool = True  # whether that is sure

    def body(self) -> bytes:
        data = b""
        if self.known:
            with disk_errors(), open(self.path, "rb", buffering=0) as file:  # noqa: PTH123 - pathlib is slow to import
                data = os.pread(file.fileno(), MAX_DATA_BYTES, self.start)
        return PartPiece(claim=self.claim, data=data, start=self.start).encode()


class CheckpointKeeper:
    """Sends parts, header and count of one checkpoint after the other.

    Args:
        settled: called with each checkpoint whose parts were all there: with its ticket and header, or with why it was
            given up, or with that and the ticket and header of one whose refusal was forged; on a machine other than 0
            with neither, once its parts are in the store.
        trouble: called with the code of each kind of trouble, once per kind and checkpoint.
        patience_s: after so long without progress a checkpoint is given up.
    """

    def __init__(
        self,
        loop: Loop,
        gate: BrokerClient,
        terms: LegTerms,
        *,
        settled: Callable[[tuple[Ticket, CheckpointHeader] | None, Code | None], None],
        trouble: Callable[[Code], None],
        patience_s: float,
    ) -> None:
        self._loop, self._gate, self._terms = loop, gate, terms
        self._settled, self._trouble, self._patience_s = settled, trouble, patience_s
        self._call: BrokerCall | None = None
        self._timers: dict[str, Timer] = {}
        self._ending, self._attempt = False, 0
        self._asked: tuple[CheckpointMessage, CheckpointHeader] | None = None  # to be counted, and no ticket came
        self._reset()

    def _reset(self) -> None:
        self.close()
        self._attempt += 1  # a recording of what was given up takes the place of nothing that came after it
        self._uploads: list[_Upload] = []
        self._whole = 0  # how many of them the store has whole
        self._place: Place | None = None  # once this machine's parts are all there
        self._header: CheckpointHeader | None = None  # then, on machine 0
        self._message: CheckpointMessage | None = None  # once the store has it all
        self._given_up: Code | None = None
        self._again = False  # whether `_asked` is asked for before anything else
        self._counted: tuple[Ticket, CheckpointHeader] | None = None  # which that was
        self._retry_s, self._repairs = _FIRST_RETRY_S, _REPAIRS
        self._met: set[Code] = set()

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is on its way."""
        return not self._uploads

    def part(self, seq: int, rank: int, row: PartRow, path: str) -> None:
        """Have a sealed part kept."""
        terms = self._terms
        claim = PartClaim(
            attempt=self._attempt,
            bytes=row.bytes,
            leg=terms.start.leg,
            line=terms.start.id,
            rank=rank,
            run_id=terms.run_id,
            seq=seq,
            sha256=row.sha256,
        )
        self._uploads.append(_Upload(claim=claim.sign(terms.evidence_key), path=path))
        self._send()

    def there(self, place: Place, rows: dict[int, PartRow]) -> None:
        """Have a checkpoint counted whose parts are in the store or on their way."""
        self._place = place
        if self._given_up is not None:
            self._settle(self._counted, self._given_up)
            return
        if self._terms.leads:
            parts = tuple(row for _, row in sorted(rows.items()))
            self._header = CheckpointHeader(**place.shared(), environment_sha256=place.environment_sha256, parts=parts)
        self._send()

    def give_up(self, why: Code) -> None:
        """Send no more of the checkpoint that is coming or on its way, and leave no file of it."""
        self.close()
        self._given_up = why
        for upload in self._uploads:
            remove(upload.path)
        if self._place is not None:
            self._settle(self._counted, why)

    def finish(self, within_s: float) -> None:
        """Wait for the checkpoint on its way, as long as it makes progress at least every `within_s`."""
        self._patience_s, self._ending = within_s, True
        if self._place is None:
            self._reset()
        else:
            self._cancel("patience")
            self._guard()
        self._loop.run_until(lambda: self.idle)

    def close(self) -> None:
        """Stop sending; what is in flight is abandoned."""
        for name in list(self._timers):
            self._cancel(name)
        if self._call is not None:
            self._call.abandon()
            self._call = None

    def _send(self) -> None:
        if self._call is not None or self._given_up is not None:
            return
        self._cancel("retry")
        key = self._terms.evidence_key
        if self._again and self._asked is not None:
            self._count(*self._asked)
        elif self._whole < len(self._uploads):
            upload = self._uploads[self._whole]
            self._post(PART_PATH, upload.body(), partial(self._take_piece, upload))
        elif self._place is None:
            self._cancel("patience")  # the next part is the worker's to send
        elif self._header is None:
            self._settle(None, None)
        elif self._message is None:
            signed = dsse.sign(HEADER_TYPE, self._header.encode(), [key]).encode()
            self._post(HEADER_PATH, signed, partial(self._take_stored, self._header))
        else:
            self._count(self._message, self._header)

    def _count(self, message: CheckpointMessage, header: CheckpointHeader) -> None:
        self._asked = message, header
        body = message.sign(self._terms.evidence_key).encode()
        self._post(COUNT_PATH, body, partial(self._take_ticket, message, header))

    def _post(self, path: str, body: bytes, take: Callable[[bytes], None]) -> None:
        self._guard()
        self._call = self._gate.begin(path, body, partial(self._answered, take))

    def _answered(self, take: Callable[[bytes], None], call: BrokerCall) -> None:
        self._call = None
        try:
            take(call.body())
        except GlasshouseError as error:
            self._failed(error)
        else:
            self._retry_s = _FIRST_RETRY_S
            self._send()

    def _failed(self, error: GlasshouseError) -> None:
        if error.code is Code.LINE_SUPERSEDED:
            raise error
        if error.code not in self._met:
            self._met.add(error.code)
            self._trouble(error.code)
        if isinstance(error, RefusedError):
            if error.code is Code.CHECKPOINT_STALE and self._asked is not None and not self._again:
                self._again = True  # what gave its number away may have been forged
                self._send()
                return
            if error.code not in _AGAIN or not self._repairs or self._again:
                self.give_up(error.code)
                return
            # Another machine's part may be on its way for long; what is damaged here is so a few times at most.
            self._repairs -= error.code is Code.UPLOAD_DAMAGED
            self._whole, self._message = 0, None  # what was stored may be gone: the header is sent again too
            for upload in self._uploads:
                upload.start, upload.known = 0, False
        self._after("retry", self._retry_s, self._send)
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

    def _take_piece(self, upload: _Upload, answer: bytes) -> None:
        try:
            have, whole = _KEPT.read(decode(answer, max_bytes=_MAX_KEPT_BYTES), "answer")
        except FormatError:
            raise PeerError(Code.BROKER_PROTOCOL, "the store says otherwise than it must how much it has") from None
        known, before = upload.known, upload.start
        upload.known, upload.start = True, have
        self._whole += whole
        if not known:
            return
        if not whole and have <= before:
            raise PeerError(Code.BROKER_PROTOCOL, "the store takes no more of a part")
        self._cancel("patience")

    def _take_stored(self, header: CheckpointHeader, answer: bytes) -> None:
        terms = self._terms
        stored = _signed(Stored, answer, terms.store_public)
        wanted = Stored(
            deployment=terms.deployment,
            digest=header.digest,
            leg=terms.start.leg,
            line=terms.start.id,
            seq=header.seq,
        )
        if stored != wanted:
            raise PeerError(Code.BROKER_PROTOCOL, "the store's statement is about another checkpoint")
        self._message = CheckpointMessage(
            deployment=stored.deployment,
            digest=stored.digest,
            leg=stored.leg,
            line=stored.line,
            previous=header.previous,
            run_id=terms.run_id,
            seq=stored.seq,
            step=header.step,
            stored=Envelope.parse(answer, max_bytes=MAX_STATEMENT_BYTES),
        )
        self._cancel("patience")

    def _take_ticket(self, message: CheckpointMessage, header: CheckpointHeader, answer: bytes) -> None:
        terms = self._terms
        ticket = _signed(Ticket, answer, terms.broker_public)
        same = ("deployment", "digest", "leg", "line", "previous", "run_id", "seq", "step")
        wrong = [name for name in same if getattr(ticket, name) != getattr(message, name)]
        if wrong or (ticket.holder, ticket.manifest_sha256) != (terms.evidence_key.key_id, terms.manifest_sha256):
            raise PeerError(Code.BROKER_PROTOCOL, "the gate's ticket is for another checkpoint")
        self._asked, self._again = None, False
        if header is self._header:
            self._settle((ticket, header), None)
        else:  # what comes has a number that was counted, and goes
            self._counted = ticket, header
            self.give_up(Code.CHECKPOINT_STALE)

    def _guard(self) -> None:
        """Give up after so long without progress; what the gate was asked to count only at the end."""
        if self._message is not None and not self._ending:
            self._cancel("patience")
        elif "patience" not in self._timers:
            self._after("patience", self._patience_s, partial(self.give_up, Code.BROKER_UNREACHABLE))

    def _settle(self, counted: tuple[Ticket, CheckpointHeader] | None, refused: Code | None) -> None:
        for upload in self._uploads:
            remove(upload.path)
        self._reset()
        self._settled(counted, refused)

    def _after(self, name: str, delay_s: float, handler: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = self._loop.after(delay_s, handler)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


def _signed(kind: type[_S], answer: bytes, public: bytes) -> _S:
    try:
        return kind.parse_signed(answer, public)
    except FormatError:
        raise PeerError(Code.BROKER_UNTRUSTED, "a statement that its key did not sign") from None
