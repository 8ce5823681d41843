"""Is it genuine? The checks of the gate that need no policy: 1, 4, 9; `roots.root_table` has the second half of 12.

The numbers are those of spec/key-release.md section 6; `handshake.broker_side` calls them in order.
"""

from __future__ import annotations

from glasshouse.attestation.claims import composite
from glasshouse.attestation.evidence import (
    EVIDENCE_TYPE,
    MAX_EVIDENCE_BYTES,
    Evidence,
    EvidenceEnvelope,
    SignedEvidence,
)
from glasshouse.attestation.refusal import CheckFailedError, check_1, check_signed
from glasshouse.errors import Code, FormatError
from glasshouse.wire import dsse
from glasshouse.wire.crypto import check_recipient


def check_1_message(message: bytes) -> SignedEvidence:
    """Both parts of check 1, where nothing hangs on the signatures between them; raises `CheckFailedError`."""
    return check_1_payload(check_1_envelope(message))


def check_1_envelope(message: bytes) -> EvidenceEnvelope:
    """Size, the envelope, and what its payload begins with, which check 4 needs: all that is read of unsigned evidence.

    Raises:
        CheckFailedError: `message-too-large` or `message-invalid`.
    """
    return check_1("evidence", message, MAX_EVIDENCE_BYTES, EvidenceEnvelope.open)


def check_1_payload(opened: EvidenceEnvelope) -> SignedEvidence:
    """The payload's canonical form and schema; to be asked after check 4.

    Raises:
        CheckFailedError: `message-invalid`.
    """
    try:
        signed = opened.read()
        # A key that nothing can be sealed to is found now, not after the budget was touched.
        check_recipient(signed.evidence.claims.hpke_public)
        return signed
    except FormatError as error:
        raise CheckFailedError("1", Code.MESSAGE_INVALID, error.message) from None


def check_4_signatures(envelope: dsse.Envelope, *, evidence_public: bytes, launch_public: bytes) -> None:
    """Signed by the launch key of the record and by the evidence key of the claims, and by no other.

    Raises:
        CheckFailedError: `evidence-signature-invalid`.
    """
    check_signed(envelope, EVIDENCE_TYPE, launch_public, evidence_public, check="4", code=Code.EVIDENCE_SIGNATURE)


def check_9_composite(evidence: Evidence) -> None:
    """The composite is the digest of the claims beside it; raises `CheckFailedError`, `composite-mismatch`."""
    expected = composite(evidence.claims)
    if evidence.composite != expected:
        raise CheckFailedError(
            "9",
            Code.COMPOSITE_MISMATCH,
            "a composite that is not the digest of its claims",
            expected=expected.hex(),
            actual=evidence.composite.hex(),
        )
