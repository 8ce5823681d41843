"""The evidence message: claims, composite and hardware evidence, signed by evidence key and launch key.

DSSE over canonical JSON; see spec/key-release.md section 4. Parsing checks no signature:
`attestation.verify` does, once it is clear whose they must be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.claims import Claims, ContainerSource
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.attestation.roots.kinds import MAX_BLOBS, MAX_BLOBS_BYTES
from glasshouse.errors import Code, FormatError
from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64decode
from glasshouse.wire.crypto import sha256
from glasshouse.wire.policy import Assurance
from glasshouse.wire.record import IDENTIFIER, Sha256, items

EVIDENCE_TYPE = "application/vnd.glasshouse.evidence+json"
MAX_EVIDENCE_BYTES = 32 * 1024  # of the envelope: hardware evidence follows it
MAX_EVIDENCE_ELEMENTS = 512  # 64 GPUs, 16 hardware reports and 32 details have 459

# The one way in which a payload in canonical form begins: its first claims by name, whatever follows them.
_BEGIN = re.compile(
    rf'\{{"claims":\{{"assurance":"(?:{"|".join(Assurance)})",'
    r'"cnf":\{"jwk":\{"crv":"Ed25519","kty":"OKP","x":"(?P<key>[A-Za-z0-9_-]{43})"\}\},'
    rf'"container":\{{"id":"{IDENTIFIER.pattern}","source":"(?:{"|".join(ContainerSource)})"\}},'
    r'"deployment":"[0-9a-f]{32}","eat_nonce":"(?P<nonce>[A-Za-z0-9_-]{43})",'
)
_BEGIN_CHARACTERS = 1024  # are more than it can have


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence(
    dsse.Signed,
    name="evidence",
    max_bytes=MAX_EVIDENCE_BYTES,
    max_elements=MAX_EVIDENCE_ELEMENTS,
    payload_type=EVIDENCE_TYPE,
):
    """The signed payload."""

    claims: Claims
    composite: Sha256  # their digest, as claimed; recomputed by check 9
    # What of hardware follows the envelope, sorted by kind; empty at the level `software`.
    hardware: Annotated[tuple[Blob, ...], items(MAX_BLOBS)]

    def __post_init__(self) -> None:
        kinds = [blob.kind for blob in self.hardware]
        if kinds != sorted(kinds) or sum(blob.size for blob in self.hardware) > MAX_BLOBS_BYTES:
            raise FormatError(Code.SCHEMA, f"evidence.hardware is not sorted by kind, or above {MAX_BLOBS_BYTES} bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedEvidence:
    """A parsed evidence message whose signatures have **not** been checked yet."""

    envelope: dsse.Envelope
    evidence: Evidence
    sha256: bytes  # the evidence digest: SHA-256 of the message as it travelled


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceEnvelope:
    """An evidence message whose payload was not parsed: its cost does not depend on what a stranger wrote in it."""

    message: bytes  # as it travelled
    envelope: dsse.Envelope
    nonce: bytes  # the challenge that the payload names
    evidence_public: bytes  # the evidence key that the payload names

    @classmethod
    def open(cls, message: bytes) -> EvidenceEnvelope:
        """Open the envelope; raises `FormatError`."""
        envelope = dsse.Envelope.parse(message, max_bytes=MAX_EVIDENCE_BYTES)
        envelope.payload_of(EVIDENCE_TYPE)
        if len(envelope.signatures) != 2:
            raise FormatError(Code.SCHEMA, "evidence that does not carry exactly two signatures")
        named = _BEGIN.match(envelope.payload[:_BEGIN_CHARACTERS].decode("latin-1"))
        if named is None:
            raise FormatError(
                Code.SCHEMA,
                "evidence.claims does not begin with assurance, cnf, container, deployment, eat_nonce in their forms",
            )
        return cls(
            message=message,
            envelope=envelope,
            nonce=b64decode(named["nonce"]),
            evidence_public=b64decode(named["key"]),
        )

    def read(self) -> SignedEvidence:
        """Parse the payload; raises `FormatError`.

        Its claims have the nonce and the evidence key that it begins with: no key stands twice in one object.
        """
        return SignedEvidence(
            envelope=self.envelope, evidence=Evidence.parse(self.envelope.payload), sha256=sha256(self.message)
        )
