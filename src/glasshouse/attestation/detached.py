"""Hardware evidence as it travels: behind the signed envelope that names it, in a body of two parts.

Law: nothing here opens a blob; one that is returned is, byte for byte, what was signed.
Source: spec/hardware-evidence.md, section 2.
"""

from __future__ import annotations

from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES, Evidence
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.kinds import MAX_BLOBS_BYTES
from glasshouse.errors import Code
from glasshouse.wire.crypto import sha256

LENGTH_BYTES = 4
MIN_FIRST_BYTES = 4096
"""Of an envelope in a body of two parts, so that a reader of as many bytes at once reads none behind it."""
MAX_MESSAGE_BYTES = LENGTH_BYTES + MAX_EVIDENCE_BYTES + MAX_BLOBS_BYTES


def readable(begin: bytes | bytearray) -> int | None:
    """Return how many bytes of a body may be read by what it begins with; None for a body of one part.

    Args:
        begin: its first four bytes, or fewer where no more are known.
    """
    if begin and begin[0]:
        return None
    if len(begin) < LENGTH_BYTES:
        return MIN_FIRST_BYTES
    length = int.from_bytes(begin[:LENGTH_BYTES])
    return LENGTH_BYTES + (length if MIN_FIRST_BYTES <= length <= MAX_EVIDENCE_BYTES else 0)


def envelope_of(first: bytes) -> tuple[bytes, bool]:
    """Return the envelope in the first part of a body, and whether another part follows it.

    Raises:
        CheckFailedError: check 1, `message-invalid` or `message-too-large`.
    """
    if readable(first) is None or not first:
        return first, False
    length = int.from_bytes(first[:LENGTH_BYTES])
    if length > MAX_EVIDENCE_BYTES and len(first) >= LENGTH_BYTES:
        raise CheckFailedError(
            "1",
            Code.MESSAGE_TOO_LARGE,
            "evidence that is too large",
            expected=f"at most {MAX_EVIDENCE_BYTES} bytes",
            actual=f"{length} bytes",
        )
    if length < MIN_FIRST_BYTES or len(first) != LENGTH_BYTES + length:
        raise CheckFailedError("1", Code.MESSAGE_INVALID, "a body whose first part is not as long as it says")
    return first[LENGTH_BYTES:], True


def check_length(evidence: Evidence, behind: int | None) -> int:
    """As many bytes follow the envelope as it names; return how many.

    Args:
        behind: bytes that follow it; None where it travels alone.

    Raises:
        CheckFailedError: `hardware-length`. An attacker on the way can cut the rest off: it is no word of its signers.
    """
    size = sum(blob.size for blob in evidence.hardware)
    if behind != (size or None):
        raise CheckFailedError(
            "12",
            Code.HARDWARE_LENGTH,
            "not as many bytes of hardware evidence as were signed",
            expected=f"{size} bytes",
            actual=f"{behind or 0} bytes",
        )
    return size


def check_blobs(evidence: Evidence, rest: bytes) -> dict[str, bytes]:
    """Return the blobs of evidence by kind, each of the digest that was signed.

    Raises:
        CheckFailedError: `hardware-length` or `hardware-digest`.
    """
    check_length(evidence, len(rest) or None)
    blobs, at = {}, 0
    for named in evidence.hardware:
        blob = rest[at : at + named.size]
        at += named.size
        if sha256(blob) != named.sha256:
            raise CheckFailedError(
                "12",
                Code.HARDWARE_DIGEST,
                f"other hardware evidence of the kind {named.kind} than was signed",
                expected=named.sha256.hex(),
                actual=sha256(blob).hex(),
            )
        blobs[named.kind] = blob  # check 12 refuses a kind that is there twice
    return blobs


def split(message: bytes) -> tuple[bytes, bytes]:
    """Return the envelope of a stored message that was accepted, and what follows it."""
    end = readable(message[:LENGTH_BYTES])
    return (message, b"") if end is None else (message[LENGTH_BYTES:end], message[end:])
