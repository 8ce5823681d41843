"""The receipt bundle: every link from the owner's key to what happened, in one file (spec/evidence.md section 7).

Nothing is verified here: `glasshouse.jobs.verify.documents` walks the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.heads import COUNTERSIGNED_HEAD_TYPE, HEAD_TYPE
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.jwt import MAX_TOKEN_BYTES
from glasshouse.wire.record import Record, raw, text

BUNDLE_KIND = "https://glasshouse.dev/receipt-bundle/v1"


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
