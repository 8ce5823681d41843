"""The receipt bundle: every link from the owner's key to what happened, in one file (spec/evidence.md section 7).

Nothing is verified here: `glasshouse.jobs.verify` walks the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.heads import COUNTERSIGNED_HEAD_TYPE, HEAD_TYPE
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields
from glasshouse.wire.jwt import MAX_TOKEN_BYTES

__all__ = ["BUNDLE_KIND", "MAX_BUNDLE_BYTES", "Bundle"]

BUNDLE_KIND = "https://glasshouse.dev/receipt-bundle/v1"
MAX_BUNDLE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What `receipt.json` holds.

    Law: ``Bundle.parse(b.encode()) == b`` and the reverse, byte for byte.

    Attributes:
        delegation: owner → broker.
        manifest: the owner-signed manifest; None when the package could not be read.
        token: launch token, compact.
        evidence: the evidence message's JSON as sent; None when the run ended before making it.
        ear: attestation result, compact; None when nothing was released.
        head: final head: the countersigned one, or the signed one when the broker was away.
        receipt: the signed receipt.
        countersignature: the broker's on the receipt; None when the broker was away.
    """

    delegation: Envelope
    manifest: Envelope | None
    token: str
    evidence: Json
    ear: str | None
    head: Envelope
    receipt: Envelope
    countersignature: Envelope | None

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

    def encode(self) -> bytes:
        return encode(
            {
                "countersignature": _json(self.countersignature),
                "delegation": self.delegation.to_json(),
                "ear": self.ear,
                "evidence": self.evidence,
                "head": self.head.to_json(),
                "kind": BUNDLE_KIND,
                "manifest": _json(self.manifest),
                "receipt": self.receipt.to_json(),
                "token": self.token,
            }
        )

    @classmethod
    def parse(cls, data: bytes) -> Bundle:
        """Inverse of `encode`; no signature is checked.

        Raises:
            FormatError: `too-large`, `schema-invalid`, `not-canonical` or `wrong-type`. A part that is
                absent rather than null is `schema-invalid`.
        """
        fields = Fields(decode(data, max_bytes=MAX_BUNDLE_BYTES), "bundle")
        fields.choice("kind", [BUNDLE_KIND])
        bundle = cls(
            delegation=Envelope.from_json(fields.any("delegation")),
            manifest=_envelope(fields, "manifest"),
            token=fields.text("token", max_chars=MAX_TOKEN_BYTES),
            evidence=fields.any("evidence"),
            ear=None if fields.null("ear") else fields.text("ear", max_chars=MAX_TOKEN_BYTES),
            head=Envelope.from_json(fields.any("head")),
            receipt=Envelope.from_json(fields.any("receipt")),
            countersignature=_envelope(fields, "countersignature"),
        )
        fields.end()
        return bundle


def _json(envelope: Envelope | None) -> Json:
    return None if envelope is None else envelope.to_json()


def _envelope(fields: Fields, name: str) -> Envelope | None:
    return None if fields.null(name) else Envelope.from_json(fields.any(name))
