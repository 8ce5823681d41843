"""Signed heads of the log, and the broker's countersignature on them (spec/evidence.md section 4).

The broker countersigns a head only when it is larger than, and consistent with, the last one of this run
under this run's attested evidence key. So a runtime cannot show two histories, nor take one back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.evidence.events import MAX_EVENTS
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Codec, decode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.merkle import verify_consistency
from glasshouse.wire.record import Id, Record, Sha256, integer, items, octets
from glasshouse.wire.states import State

HEAD_TYPE = "application/vnd.glasshouse.head+json"
COUNTERSIGNED_HEAD_TYPE = "application/vnd.glasshouse.countersigned-head+json"
MAX_HEAD_BYTES = 2048
MAX_COUNTERSIGNED_HEAD_BYTES = 8192
MAX_SUBMISSION_BYTES = 8192
_ORDER = tuple(State)


Proof: TypeAlias = Annotated[tuple[bytes, ...], items(64, octets(32))]  # of inclusion or consistency


def signed(max_bytes: int) -> Codec:
    """A signed message of at most `max_bytes`, kept as its bytes."""
    return Codec(
        lambda value, _where: Envelope.from_json(value).encode(), lambda message: decode(message, max_bytes=max_bytes)
    )


class Versioned(dsse.Signed, constants={"version": 1}):
    """Base of what stands in or closes a log."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Head(Versioned, name="head", max_bytes=MAX_HEAD_BYTES, max_elements=16, payload_type=HEAD_TYPE):
    """The log as it stood at one moment."""

    run_id: Id
    sequence: int  # among the run's heads, from 0
    size: Annotated[int, integer(1, MAX_EVENTS)]  # of the Merkle tree over the events
    root: Sha256
    state: State  # of the run at that moment
    time_us: int  # by the runtime's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class _Countersigned(
    Versioned, name="countersigned head", max_bytes=MAX_COUNTERSIGNED_HEAD_BYTES, payload_type=COUNTERSIGNED_HEAD_TYPE
):
    """What the broker signs."""

    head: Envelope
    previous_size: int
    time_us: int

    def __post_init__(self) -> None:
        if len(self.head.encode()) > MAX_HEAD_BYTES:
            raise FormatError(Code.TOO_LARGE, "a head that is too long")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountersignedHead:
    """A signed head that the broker has countersigned: self-contained, one line of `heads.log`.

    Law: ``CountersignedHead.parse(c.encode(), ...) == c``.
    """

    head: Head  # what was countersigned
    envelope: Envelope  # the broker's envelope, with the runtime's within
    previous_size: int  # of the last head that this one was found consistent with; 0 for the first
    time_us: int  # by the broker's clock

    def encode(self) -> bytes:
        return self.envelope.encode()

    @classmethod
    def parse(cls, data: bytes, *, broker_public: bytes, evidence_public: bytes) -> CountersignedHead:
        """Check both signatures.

        Raises:
            FormatError: `too-large`, `schema-invalid`, `not-canonical`, `wrong-type` or `signature-invalid`.
        """
        envelope = Envelope.parse(data, max_bytes=MAX_COUNTERSIGNED_HEAD_BYTES)
        return cls.from_envelope(envelope, broker_public=broker_public, evidence_public=evidence_public)

    @classmethod
    def from_envelope(cls, envelope: Envelope, *, broker_public: bytes, evidence_public: bytes) -> CountersignedHead:
        """The same for an envelope that is part of another document."""
        found = _Countersigned.from_envelope(envelope, broker_public)
        head = Head.from_envelope(found.head, evidence_public)
        if found.previous_size >= head.size:
            raise FormatError(Code.SCHEMA, "a countersigned head that is not larger than the one before")
        return cls(head=head, envelope=envelope, previous_size=found.previous_size, time_us=found.time_us)

    @classmethod
    def sign(
        cls, head: Head, signed: Envelope, *, previous_size: int, time_us: int, broker_key: SigningKey
    ) -> CountersignedHead:
        envelope = _Countersigned(head=signed, previous_size=previous_size, time_us=time_us).sign(broker_key)
        return cls(head=head, envelope=envelope, previous_size=previous_size, time_us=time_us)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSubmission(Record, name="head submission", max_bytes=MAX_SUBMISSION_BYTES, max_elements=128):
    """What the runtime sends to have a head countersigned: the body of ``POST /v1/heads``."""

    head: Annotated[bytes, signed(MAX_HEAD_BYTES)]
    proof: Proof = ()  # consistency with the last countersigned head; empty for the first and for a repeat


def claimed_head(data: bytes) -> Head:
    """Return a signed head **without checking its signature**, to find the record of its run; raises `FormatError`."""
    return Head.parse(Envelope.parse(data, max_bytes=MAX_HEAD_BYTES).payload)


def claimed_in(envelope: Envelope, broker_public: bytes) -> tuple[Head, str]:
    """Return the head that this broker countersigned, and its signer's key id, **without checking its signature**.

    Raises:
        FormatError: as `CountersignedHead.parse`.
    """
    signed = _Countersigned.from_envelope(envelope, broker_public).head
    return Head.parse(signed.payload), signed.signatures[0][0]


def countersign(
    head: bytes,
    proof: Sequence[bytes],
    *,
    run_id: str,
    previous: CountersignedHead | None,
    evidence_public: bytes,
    broker_key: SigningKey,
    now_us: int,
) -> CountersignedHead:
    """Decide on a head and countersign it: the broker's side, without its storage.

    The identical head again is answered with `previous` itself: a runtime that lost the answer gets the same one, and
    the broker has nothing new to store.

    Args:
        proof: consistency with `previous`.
        run_id: of the record that the attested key belongs to.
        previous: the last countersigned head of this run.
        evidence_public: the key that this run's EAR names.

    Raises:
        RefusedError: `message-too-large` or `message-invalid` for what is not a head,
            `evidence-signature-invalid` for one by another key, `head-inconsistent` for one that is not
            this run's, not larger, goes back, or does not extend the last.
    """
    envelope, claimed = check_signed(head, evidence_public)
    if claimed.run_id != run_id:
        raise _refused("a head of another run")
    last = previous.head if previous else None
    if previous and claimed == last:
        return previous
    if last:
        _check_growth(last, claimed)
        try:
            verify_consistency(
                old=last.size, new=claimed.size, old_root=last.root, new_root=claimed.root, proof=list(proof)
            )
        except FormatError:
            raise _refused("a head that does not extend the last one") from None
    elif proof:
        raise _refused("a first head has nothing to be consistent with")
    return CountersignedHead.sign(
        claimed,
        envelope,
        previous_size=last.size if last else 0,
        time_us=max(now_us, previous.time_us) if previous else now_us,
        broker_key=broker_key,
    )


def check_signed(head: bytes, evidence_public: bytes) -> tuple[Envelope, Head]:
    """Return a head and its envelope if this key signed it.

    Raises:
        RefusedError: `message-too-large`, `message-invalid` or `evidence-signature-invalid`.
    """
    try:
        envelope = Envelope.parse(head, max_bytes=MAX_HEAD_BYTES)
        return envelope, Head.from_envelope(envelope, evidence_public)
    except FormatError as error:
        raise refusal_of(error) from None


def refusal_of(error: FormatError, kind: type[RefusedError] = RefusedError) -> RefusedError:
    """Return how a gate refuses a message that is not what it should be."""
    code = {Code.TOO_LARGE: Code.MESSAGE_TOO_LARGE, Code.SIGNATURE: Code.EVIDENCE_SIGNATURE}
    return kind(code.get(error.code, Code.MESSAGE_INVALID), error.message)


def _check_growth(last: Head, claimed: Head) -> None:
    if last.state is State.ZEROIZED:
        raise _refused("a head after the end of the run")
    if claimed.size <= last.size or claimed.sequence <= last.sequence or claimed.time_us < last.time_us:
        raise _refused("a head that is not larger and later than the last one")
    if _ORDER.index(claimed.state) < _ORDER.index(last.state):
        raise _refused("a head whose state goes back")


def _refused(why: str) -> RefusedError:
    return RefusedError(Code.HEAD_INCONSISTENT, why)
