"""How a run is closed: a countersigned receipt, and the bundle of all that leads to it (spec/evidence.md, 6 and 7).

The bundle has every link from the owner's key to what happened, in one file. Nothing of it is verified here:
`glasshouse.jobs.verify.documents` walks the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.evidence.heads import (
    COUNTERSIGNED_HEAD_TYPE,
    HEAD_TYPE,
    MAX_HEAD_BYTES,
    CountersignedHead,
    Versioned,
    refusal_of,
    signed,
)
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES, MAX_RECEIPT_BYTES, RECEIPT_TYPE, Receipt
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.jwt import MAX_TOKEN_BYTES
from glasshouse.wire.record import APART, LEFT_OUT, Id, Record, Sha256, integer, items, octets, raw, text
from glasshouse.wire.states import State

BUNDLE_KIND = "https://glasshouse.dev/receipt-bundle/v1"
COUNTERSIGNED_RECEIPT_TYPE = "application/vnd.glasshouse.countersigned-receipt+json"
MAX_COUNTERSIGNATURE_BYTES = 4096
MAX_DELEGATION_BYTES = 4096
MAX_SUBMISSION_BYTES = 256 * 1024
# Of hardware evidence (spec/hardware-evidence.md, 2 and 5), whose own limits are those of `attestation.roots`.
MAX_BLOBS, MAX_BLOB_BYTES, MAX_COLLATERAL_BYTES = 16, 256 * 1024, 2 * 1024 * 1024

# The one way in which a submission in canonical form begins and goes on: an envelope has no member called `receipt`.
_HEAD, _RECEIPT, _PAYLOAD = b'{"head":', b',"receipt":', b'{"payload":"'


@dataclass(frozen=True, kw_only=True, slots=True)
class _Closed(
    Versioned,
    name="countersigned receipt",
    max_bytes=MAX_COUNTERSIGNATURE_BYTES,
    payload_type=COUNTERSIGNED_RECEIPT_TYPE,
):
    """What the broker signs."""

    run_id: Id
    receipt_sha256: Sha256  # of the signed receipt's bytes
    log_root: Sha256  # of the final head, which the broker had countersigned
    log_size: Annotated[int, integer(1)]
    time_us: int  # by the broker's clock: the moment at which a verifier judges validity


@dataclass(frozen=True, kw_only=True, slots=True)
class CountersignedReceipt(_Closed):
    """The broker's signature on which receipt closed which run, and when.

    Law: ``CountersignedReceipt.parse_signed(c.encode(), ...) == c``.
    """

    envelope: Annotated[Envelope, APART]  # the signature over all the others

    def encode(self) -> bytes:
        """Return the envelope's bytes."""
        return self.envelope.encode()

    @classmethod
    def from_envelope(cls, envelope: Envelope, *publics: bytes) -> CountersignedReceipt:
        return cls.parse(envelope.verify(COUNTERSIGNED_RECEIPT_TYPE, *publics), envelope=envelope)


class SignedReceiptRefusedError(RefusedError):
    """A receipt that the run's own key signed and that is none of this run; its key signs no other."""


def countersign_receipt(
    receipt: bytes,
    *,
    final: CountersignedHead,
    previous: CountersignedReceipt | None,
    evidence_public: bytes,
    broker_key: SigningKey,
    now_us: int,
) -> CountersignedReceipt:
    """Decide on a receipt and countersign it: the broker's side, without its storage.

    A run has one receipt: the identical one again is answered with `previous`, another is refused. What costs little
    is checked first: of a run that has a receipt, or has not ended, none is opened, and nothing unsigned is parsed.

    Args:
        final: the last head of this run that the broker countersigned.
        evidence_public: the key that this run's EAR names.

    Raises:
        RefusedError: `head-inconsistent` for a second one or for a run that has not ended, `message-too-large` or
            `message-invalid` for what is no envelope of this type, `evidence-signature-invalid` for one by another key.
        SignedReceiptRefusedError: `message-invalid` for what is not a receipt,
            `evidence-signature-invalid` for one of a run that was never attested, `head-inconsistent` for one of
            another run or log.
    """
    if previous:
        if previous.receipt_sha256 == sha256(receipt):  # the same receipt has the same bytes: they have one form
            return previous
        raise RefusedError(Code.HEAD_INCONSISTENT, "a second receipt of one run")
    head = final.head
    if head.state is not State.ZEROIZED:
        raise RefusedError(Code.HEAD_INCONSISTENT, "a receipt of a run whose last head is not its end")
    try:
        payload = Envelope.parse(receipt, max_bytes=MAX_RECEIPT_BYTES).verify(RECEIPT_TYPE, evidence_public)
    except FormatError as error:
        raise refusal_of(error) from None
    try:
        checked = Receipt.parse(payload)
        checked.check_signers(evidence_public, by_launch_key=False)
    except FormatError as error:
        raise refusal_of(error, SignedReceiptRefusedError) from None
    if (checked.run_id, checked.log_root, checked.log_size) != (head.run_id, head.root, head.size):
        raise SignedReceiptRefusedError(Code.HEAD_INCONSISTENT, "a receipt of another run or log than the final head's")
    closed = _Closed(
        run_id=head.run_id,
        receipt_sha256=sha256(receipt),
        log_root=head.root,
        log_size=head.size,
        time_us=max(now_us, final.time_us),
    )
    return CountersignedReceipt.from_envelope(closed.sign(broker_key), broker_key.public)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptSubmission:
    """What the runtime sends to have its receipt countersigned: the body of ``POST /v1/receipt``.

    Law: ``ReceiptSubmission.parse(s.encode()) == s``.
    """

    receipt: bytes  # the signed receipt's bytes; `parse` has **not** looked into them
    head: bytes  # the signed final head's bytes, by which the broker finds the run

    def encode(self) -> bytes:
        return b"".join((_HEAD, self.head, _RECEIPT, self.receipt, b"}"))

    @classmethod
    def parse(cls, data: bytes) -> ReceiptSubmission:
        """Inverse of `encode`; no signature is checked. Raises `FormatError`.

        What it costs does not depend on the receipt: the whole is canonical if both parts are, and the second is an
        envelope's only if `Envelope.parse` takes it.
        """
        if len(data) > MAX_SUBMISSION_BYTES:
            raise FormatError(Code.TOO_LARGE, f"a receipt submission of more than {MAX_SUBMISSION_BYTES} bytes")
        # No quotation mark stands bare in a string: the first of these in what begins with an envelope is its end.
        end = data.find(_RECEIPT + _PAYLOAD, 0, len(_HEAD) + MAX_HEAD_BYTES + len(_RECEIPT + _PAYLOAD))
        if end < 0 or not data.startswith(_HEAD) or not data.endswith(b"}"):
            raise FormatError(Code.SCHEMA, "a receipt submission that is not a head, and an envelope with its payload")
        head = data[len(_HEAD) : end]
        Envelope.parse(head, max_bytes=MAX_HEAD_BYTES)
        return cls(receipt=data[end + len(_RECEIPT) : -1], head=head)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptAnswer(Record, name="receipt answer", max_bytes=2 * MAX_COUNTERSIGNATURE_BYTES):
    """The broker's answer: its countersignature, and the delegation that stands behind its key at that moment."""

    countersignature: Annotated[bytes, signed(MAX_COUNTERSIGNATURE_BYTES)]
    delegation: Annotated[bytes, signed(MAX_DELEGATION_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareParts(Record, name="bundle.hardware"):
    """What the appraisal of hardware evidence is repeated with; none of it was looked into.

    The runtime has the blobs, and its owner the other two.
    """

    # As they followed the evidence, of at most 416 KiB together.
    blobs: Annotated[tuple[bytes, ...], items(MAX_BLOBS, octets(max_length=MAX_BLOB_BYTES), min_items=1)]
    collateral: Annotated[bytes | None, octets(max_length=MAX_COLLATERAL_BYTES)] = None  # the pack that the EAR names
    policy: Annotated[Json, raw()] = None  # the deployment's, whose digest token and EAR name

    @property
    def named(self) -> list[tuple[int, bytes]]:
        """Length and SHA-256 of each blob, as evidence names it."""
        return [(len(blob), sha256(blob)) for blob in self.blobs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle(Record, name="bundle", max_bytes=MAX_BUNDLE_BYTES, constants={"kind": BUNDLE_KIND}):
    """What `receipt.json` holds; `parse` checks no signature.

    Raises:
        FormatError: `wrong-type` on construction with another head.
    """

    delegation: Envelope  # owner → broker
    manifest: Envelope | None  # of the owner; None when the package could not be read
    token: Annotated[str, text(MAX_TOKEN_BYTES)]  # launch token, compact
    evidence: Annotated[Json, raw()]  # the message as sent; None when the run ended before making it
    ear: Annotated[str | None, text(MAX_TOKEN_BYTES)]  # attestation result, compact; None when nothing was released
    head: Envelope  # the final one: countersigned, or only signed when the broker was away
    receipt: Envelope
    countersignature: Envelope | None  # the broker's on the receipt; None when the broker was away
    hardware: Annotated[HardwareParts | None, LEFT_OUT] = None  # of a run above the level `software`

    def __post_init__(self) -> None:
        if self.head.payload_type not in (HEAD_TYPE, COUNTERSIGNED_HEAD_TYPE):
            raise FormatError(Code.WRONG_TYPE, "a bundle whose head is neither signed nor countersigned")

    @property
    def head_is_countersigned(self) -> bool:
        return self.head.payload_type == COUNTERSIGNED_HEAD_TYPE

    @property
    def evidence_bytes(self) -> bytes | None:
        """The evidence message's canonical bytes, as they were sent to the broker."""
        return None if self.evidence is None else encode(self.evidence)
