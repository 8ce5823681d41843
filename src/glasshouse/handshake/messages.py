"""The messages of the exchange that neither side's logic owns: challenge request, challenge, release, waiting.

Evidence is `attestation.evidence`; sizes and grammar are those of spec/key-release.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.attestation.claims import ID_BYTES, NONCE_BYTES
from glasshouse.errors import Code, FormatError
from glasshouse.wire import dsse, hpke, jwt
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.group import MAX_MACHINES
from glasshouse.wire.kdf import lengths_prefixed, sha256
from glasshouse.wire.signing import SigningKey

__all__ = [
    "MAX_CHALLENGE_LIFETIME_US",
    "MAX_RELEASE_REQUEST_BYTES",
    "MAX_REQUEST_BYTES",
    "PACKAGE_KEY_BYTES",
    "RELEASE_REQUEST_TYPE",
    "REQUEST_TYPE",
    "Challenge",
    "ChallengeRequest",
    "Pending",
    "ReleaseMessage",
    "ReleaseRequest",
    "release_info",
]

REQUEST_TYPE = "application/vnd.glasshouse.challenge-request+json"
RELEASE_REQUEST_TYPE = "application/vnd.glasshouse.release-request+json"
REQUEST_ID_BYTES = 16
MAX_REQUEST_BYTES = 32 * 1024
MAX_RELEASE_REQUEST_BYTES = 4 * 1024
MAX_REQUEST_ELEMENTS = 16
MAX_CHALLENGE_BYTES = 1024
MAX_PENDING_BYTES = 1024
MAX_RELEASE_BYTES = 64 * 1024
MAX_CHALLENGE_LIFETIME_US = 600 * 1_000_000
PACKAGE_KEY_BYTES = 32
_INFO_LABEL = b"glasshouse key release v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChallengeRequest:
    """What a runtime asks a challenge with, signed by the launch key.

    Attributes:
        token: the launch token, compact.
        request_id: 16 random bytes; the same request, sent again, is the same request.
    """

    token: str
    request_id: bytes

    def sign(self, launch_key: SigningKey) -> bytes:
        """Return the signed message."""
        payload = encode({"request_id": b64encode(self.request_id), "token": self.token})
        return dsse.sign(REQUEST_TYPE, payload, [launch_key]).encode()

    @classmethod
    def parse(cls, message: bytes) -> tuple[ChallengeRequest, dsse.Envelope]:
        """Return the request and its envelope, whose signature is **not** checked yet.

        Raises:
            FormatError: `too-large`, `not-canonical`, `schema-invalid` or `wrong-type`.
        """
        envelope = dsse.Envelope.parse(message, max_bytes=MAX_REQUEST_BYTES)
        if envelope.payload_type != REQUEST_TYPE:
            raise FormatError(Code.WRONG_TYPE, "an envelope of another type where a challenge request was expected")
        value = decode(envelope.payload, max_bytes=MAX_REQUEST_BYTES, max_elements=MAX_REQUEST_ELEMENTS)
        fields = Fields(value, "request")
        request = cls(
            token=fields.text("token", max_chars=jwt.MAX_TOKEN_BYTES),
            request_id=fields.octets("request_id", length=REQUEST_ID_BYTES),
        )
        fields.end()
        return request, envelope


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """A broker's challenge. Law: ``Challenge.parse(c.encode()) == c`` and the reverse, byte for byte.

    It is not signed: a change on the way breaks the release, whose HPKE `info` holds its bytes.

    Attributes:
        nonce: 32 random bytes, used once.
        deployment: for which deployment.
        issued_us, expires_us: by the broker's clock; the end is exclusive.
        suite: the HPKE suite of the release; there is one.
    """

    nonce: bytes
    deployment: str
    issued_us: int
    expires_us: int
    suite: str = hpke.SUITE_ID

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise FormatError(Code.SCHEMA, "a challenge whose nonce is not 32 bytes")
        if not 0 < self.expires_us - self.issued_us <= MAX_CHALLENGE_LIFETIME_US:
            raise FormatError(Code.SCHEMA, "a challenge that lives for no time or for more than ten minutes")

    def encode(self) -> bytes:
        return encode(
            {
                "deployment": self.deployment,
                "expires_us": self.expires_us,
                "issued_us": self.issued_us,
                "nonce": b64encode(self.nonce),
                "suite": self.suite,
            }
        )

    @classmethod
    def parse(cls, data: bytes) -> Challenge:
        """Inverse of `encode`; raises `FormatError`."""
        fields = Fields(decode(data, max_bytes=MAX_CHALLENGE_BYTES), "challenge")
        challenge = cls(
            nonce=fields.octets("nonce", length=NONCE_BYTES),
            deployment=fields.digest("deployment", length=ID_BYTES).hex(),
            issued_us=fields.integer("issued_us"),
            expires_us=fields.integer("expires_us"),
            suite=fields.choice("suite", [hpke.SUITE_ID]),
        )
        fields.end()
        return challenge


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseMessage:
    """A broker's answer to acceptable evidence. Law: ``ReleaseMessage.parse(r.encode()) == r`` and the reverse.

    Attributes:
        ear: the attestation result, compact.
        sealed_key: the package key, sealed by HPKE to the attested key.
    """

    ear: str
    sealed_key: bytes

    def encode(self) -> bytes:
        return encode({"ear": self.ear, "sealed_key": b64encode(self.sealed_key), "suite": hpke.SUITE_ID})

    @classmethod
    def parse(cls, data: bytes) -> ReleaseMessage:
        """Inverse of `encode`; raises `FormatError`."""
        fields = Fields(decode(data, max_bytes=MAX_RELEASE_BYTES), "release")
        fields.choice("suite", [hpke.SUITE_ID])
        release = cls(
            ear=fields.text("ear", max_chars=jwt.MAX_TOKEN_BYTES),
            sealed_key=fields.octets("sealed_key", length=hpke.OVERHEAD_BYTES + PACKAGE_KEY_BYTES),
        )
        fields.end()
        return release


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A broker's answer to a machine of a group that it accepted while others are missing; for people.

    Law: ``Pending.parse(p.encode()) == p``.

    Attributes:
        accepted, machines: how many of how many.
        deadline_us: when the group is over, by the broker's clock.
    """

    accepted: int
    machines: int
    deadline_us: int

    def encode(self) -> bytes:
        return encode({"accepted": self.accepted, "deadline_us": self.deadline_us, "machines": self.machines})

    @classmethod
    def parse(cls, data: bytes) -> Pending:
        """Inverse of `encode`; raises `FormatError`."""
        fields = Fields(decode(data, max_bytes=MAX_PENDING_BYTES), "pending")
        pending = cls(
            accepted=fields.integer("accepted", low=1, high=MAX_MACHINES),
            machines=fields.integer("machines", low=1, high=MAX_MACHINES),
            deadline_us=fields.integer("deadline_us"),
        )
        fields.end()
        return pending


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseRequest:
    """What an accepted machine of a group asks for its release with, signed by the evidence key.

    Attributes:
        nonce: of the challenge that it answered.
        evidence_sha256: digest of the evidence that it answered it with.
    """

    nonce: bytes
    evidence_sha256: bytes

    def sign(self, evidence_key: SigningKey) -> bytes:
        """Return the signed message."""
        payload = encode({"evidence_sha256": self.evidence_sha256.hex(), "nonce": b64encode(self.nonce)})
        return dsse.sign(RELEASE_REQUEST_TYPE, payload, [evidence_key]).encode()

    @classmethod
    def parse(cls, message: bytes) -> tuple[ReleaseRequest, dsse.Envelope]:
        """Return the request and its envelope, whose signature is **not** checked yet.

        Raises:
            FormatError: `too-large`, `not-canonical`, `schema-invalid` or `wrong-type`.
        """
        envelope = dsse.Envelope.parse(message, max_bytes=MAX_RELEASE_REQUEST_BYTES)
        if envelope.payload_type != RELEASE_REQUEST_TYPE:
            raise FormatError(Code.WRONG_TYPE, "an envelope of another type where a release request was expected")
        value = decode(envelope.payload, max_bytes=MAX_RELEASE_REQUEST_BYTES, max_elements=MAX_REQUEST_ELEMENTS)
        fields = Fields(value, "request")
        request = cls(
            nonce=fields.octets("nonce", length=NONCE_BYTES), evidence_sha256=fields.digest("evidence_sha256")
        )
        fields.end()
        return request, envelope


def release_info(
    *, challenge: bytes, evidence_sha256: bytes, ear: str, floor_sha256: bytes, policy_sha256: bytes
) -> bytes:
    """Return the HPKE `info` of a release: everything that the exchange agreed on, unambiguously joined.

    Args:
        challenge: the challenge's bytes as they travelled.
        evidence_sha256: SHA-256 of the evidence message as it travelled.
        ear: the attestation result, compact; its SHA-256 goes in.
        floor_sha256, policy_sha256: the digests of both policies.
    """
    return lengths_prefixed(
        _INFO_LABEL,
        challenge,
        evidence_sha256,
        sha256(ear.encode("ascii")),
        floor_sha256,
        policy_sha256,
        hpke.SUITE_ID.encode("ascii"),
    )
