"""The messages of the exchange that neither side's logic owns: challenge request, challenge, release, waiting.

Evidence is `attestation.evidence`; sizes and grammar are those of spec/key-release.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self, TypeAlias

from glasshouse.attestation.claims import NONCE_BYTES
from glasshouse.errors import Code, FormatError
from glasshouse.wire import dsse, jwt
from glasshouse.wire.crypto import HPKE_OVERHEAD_BYTES, HPKE_SUITE, lengths_prefixed, sha256
from glasshouse.wire.group import MAX_MACHINES
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.record import LEFT_OUT, Id, Record, Sha256, choice, integer, octets, text

REQUEST_TYPE = "application/vnd.glasshouse.challenge-request+json"
RELEASE_REQUEST_TYPE = "application/vnd.glasshouse.release-request+json"
MAX_REQUEST_BYTES = 32 * 1024
MAX_RELEASE_REQUEST_BYTES = 4 * 1024
MAX_CHALLENGE_LIFETIME_US = 600 * 1_000_000
PACKAGE_KEY_BYTES = 32
MAX_AK_BYTES = 1024
MAX_EK_BYTES = 4096
MAX_CREDENTIAL_BYTES = 3 * 1024
MAX_CHALLENGE_BYTES = 1024 + MAX_CREDENTIAL_BYTES * 4 // 3
_INFO_LABEL = b"glasshouse key release v1"

Token: TypeAlias = Annotated[str, text(jwt.MAX_TOKEN_BYTES)]
Machines: TypeAlias = Annotated[int, integer(1, MAX_MACHINES)]


class _Request(dsse.Signed, name="request", max_elements=16):
    """Base of what a runtime signs before it is clear by which key that must be."""

    __slots__ = ()

    @classmethod
    def open(cls, message: bytes) -> tuple[Self, dsse.Envelope]:
        """Return the request and its envelope, whose signature is **not** checked yet.

        Raises:
            FormatError: `too-large`, `not-canonical`, `schema-invalid` or `wrong-type`.
        """
        envelope = dsse.Envelope.parse(message, max_bytes=cls._max_bytes)
        return cls.parse(envelope.payload_of(cls._payload_type)), envelope


@dataclass(frozen=True, kw_only=True, slots=True)
class TpmKeys(Record, name="request.tpm"):
    """The keys of a TPM that shows to hold both by opening the challenge's credential (spec/hardware-evidence.md, 3.1).

    Neither was looked into.
    """

    ak: Annotated[bytes, octets(max_length=MAX_AK_BYTES)]  # TPMT_PUBLIC of the key that will sign the quote
    ek: Annotated[bytes, octets(max_length=MAX_EK_BYTES)]  # the endorsement key's certificate, DER


@dataclass(frozen=True, kw_only=True, slots=True)
class ChallengeRequest(_Request, max_bytes=MAX_REQUEST_BYTES, payload_type=REQUEST_TYPE):
    """What a runtime asks a challenge with, signed by the launch key."""

    token: Token
    request_id: Annotated[bytes, octets(16)]  # random; the same request, sent again, is the same request
    tpm: Annotated[TpmKeys | None, LEFT_OUT] = None  # where the runtime has a TPM to activate


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge(Record, name="challenge", max_bytes=MAX_CHALLENGE_BYTES):
    """A broker's challenge.

    It is not signed: a change on the way breaks the release, whose HPKE `info` holds its bytes.
    """

    nonce: Annotated[bytes, octets(NONCE_BYTES)]  # random, used once
    deployment: Id
    issued_us: int  # by the broker's clock
    expires_us: int  # exclusive
    suite: Annotated[str, choice((HPKE_SUITE,))] = HPKE_SUITE  # of the release
    # For the TPM whose keys the request named to open: TPM2B_ID_OBJECT || TPM2B_ENCRYPTED_SECRET.
    credential: Annotated[bytes | None, octets(max_length=MAX_CREDENTIAL_BYTES), LEFT_OUT] = None

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise FormatError(Code.SCHEMA, "a challenge whose nonce is not 32 bytes")
        if not 0 < self.expires_us - self.issued_us <= MAX_CHALLENGE_LIFETIME_US:
            raise FormatError(Code.SCHEMA, "a challenge that lives for no time or for more than ten minutes")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseMessage(Record, name="release", max_bytes=64 * 1024, constants={"suite": HPKE_SUITE}):
    """A broker's answer to acceptable evidence."""

    ear: Token  # the attestation result, compact
    sealed_key: Annotated[bytes, octets(HPKE_OVERHEAD_BYTES + PACKAGE_KEY_BYTES)]  # to the attested key, by HPKE


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending(Record, name="pending", max_bytes=1024):
    """A broker's answer to a machine of a group that it accepted while others are missing; for people."""

    accepted: Machines
    machines: Machines
    deadline_us: int  # when the group is over, by the broker's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseRequest(_Request, max_bytes=MAX_RELEASE_REQUEST_BYTES, payload_type=RELEASE_REQUEST_TYPE):
    """What an accepted machine of a group asks for its release with, signed by the evidence key."""

    nonce: Annotated[bytes, octets(NONCE_BYTES)]  # of the challenge that it answered
    evidence_sha256: Sha256  # of the evidence that it answered it with


def release_info(
    *,
    challenge: bytes,
    evidence_sha256: bytes,
    ear: str,
    floor_sha256: bytes,
    policy_sha256: bytes,
    line: LineStart | None = None,
) -> bytes:
    """Return the HPKE `info` of a release: everything that the exchange agreed on, unambiguously joined.

    The leg of a line stands behind the rest: the custodian, which sees no EAR, puts it there itself.

    Args:
        challenge: its bytes as they travelled.
        ear: compact; its SHA-256 goes in.
        line: the EAR's.
    """
    info = lengths_prefixed(
        _INFO_LABEL,
        challenge,
        evidence_sha256,
        sha256(ear.encode("ascii")),
        floor_sha256,
        policy_sha256,
        HPKE_SUITE.encode("ascii"),
    )
    return info if line is None else info + lengths_prefixed(line.encode())
