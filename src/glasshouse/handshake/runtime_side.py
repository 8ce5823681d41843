"""The runtime's half of the exchange: ask, answer the challenge, and check the release before using it.

Every refusal here is the runtime's own: a broker that answers what it must not is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glasshouse.attestation.claims import Claims, composite
from glasshouse.attestation.ear import Ear
from glasshouse.attestation.evidence import Evidence
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.errors import Code, FormatError, PeerError
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.messages import (
    Challenge,
    ChallengeRequest,
    ReleaseMessage,
    ReleaseRequest,
    TpmKeys,
    release_info,
)
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.policy import Floor

CLOCK_LEEWAY_S = 600
"""By how much a rented machine's clock may be off before it refuses what the broker dated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRelease:
    """A release that may be opened."""

    # The attestation result, parsed and as it travelled.
    ear: Ear
    ear_text: str
    sealed_key: bytes  # for `RecipientKey.open`
    info: bytes  # the HPKE `info` to open it under


def challenge_request(launch: LaunchFile, tpm: TpmKeys | None = None) -> bytes:
    """Return the message that asks for a challenge, with a credential for a TPM's keys, signed by the launch key."""
    return ChallengeRequest(token=launch.token, request_id=os.urandom(16), tpm=tpm).sign(launch.key()).encode()


def read_challenge(data: bytes, launch: LaunchFile, *, now_us: int) -> Challenge:
    """Parse the broker's challenge and check that it is for this launch; raises `PeerError`, `broker-protocol`."""
    try:
        challenge = Challenge.parse(data)
    except FormatError as error:
        raise PeerError(Code.BROKER_PROTOCOL, f"the broker's challenge is not one: {error.message}") from None
    if challenge.deployment != launch.claims().deployment:
        raise PeerError(Code.BROKER_PROTOCOL, "the broker's challenge is for another deployment")
    leeway_us = CLOCK_LEEWAY_S * 1_000_000
    if not challenge.issued_us - leeway_us <= now_us < challenge.expires_us + leeway_us:
        raise PeerError(
            Code.BROKER_PROTOCOL,
            "the broker's challenge is of another time",
            hint="the clocks of this machine and of the broker differ by more than ten minutes",
        )
    return challenge


def evidence_message(
    claims: Claims, hardware: Sequence[Blob], *, evidence_key: SigningKey, launch_key: SigningKey
) -> bytes:
    """Return the envelope of the evidence, signed by both keys; its SHA-256 is the evidence digest."""
    if claims.evidence_public != evidence_key.public:
        raise ValueError("claims that name another evidence key")
    evidence = Evidence(claims=claims, composite=composite(claims), hardware=tuple(hardware))
    return evidence.sign(evidence_key, launch_key).encode()


def with_blobs(envelope: bytes, blobs: Sequence[bytes]) -> bytes:
    """Return the evidence as it travels: hardware evidence follows the envelope, in the order in which that names it.

    Source: spec/hardware-evidence.md, section 2.
    """
    return b"".join((len(envelope).to_bytes(4, "big"), envelope, *blobs)) if blobs else envelope


def release_request(challenge: Challenge, evidence: bytes, *, evidence_key: SigningKey) -> bytes:
    """Return the message with which an accepted machine of a group asks for its release; the same each time."""
    return ReleaseRequest(nonce=challenge.nonce, evidence_sha256=sha256(evidence)).sign(evidence_key).encode()


def check_release(
    data: bytes,
    launch: LaunchFile,
    challenge: Challenge,
    *,
    evidence: bytes,
    evidence_public: bytes,
    manifest_sha256: bytes,
    floor: Floor,
    now_us: int,
) -> CheckedRelease:
    """Check everything about a release that can be checked without the HPKE key.

    Afterwards the custodian opens it (HPKE), checks the key commitment, and only then uses the key.

    Args:
        launch: pins the broker.
        challenge, evidence: what was answered, and with which message.
        manifest_sha256, floor: of the owner-signed manifest of the package in hand.

    Raises:
        PeerError: `broker-untrusted` when the result is not signed by the pinned broker;
            `release-invalid` when it is not the answer to this evidence.
    """
    try:
        release = ReleaseMessage.parse(data)
        ear = Ear.parse_token(
            release.ear,
            broker_public=launch.broker_public,
            evidence_public=evidence_public,
            now_us=now_us,
            leeway_s=CLOCK_LEEWAY_S,
        )
    except FormatError as error:
        code = Code.BROKER_UNTRUSTED if error.code is Code.SIGNATURE else Code.RELEASE_INVALID
        raise PeerError(code, f"the broker's release cannot be trusted: {error.message}") from None
    token, evidence_sha256 = launch.claims(), sha256(evidence)
    for what, right in (
        ("challenge", ear.nonce == challenge.nonce),
        ("piece of evidence", ear.evidence_sha256 == evidence_sha256),
        ("package", ear.manifest_sha256 == manifest_sha256 == token.manifest_sha256),
        ("deployment", ear.deployment == token.deployment == challenge.deployment),
        ("run", ear.run_id == token.run_id),
        ("policy floor", ear.floor_sha256 == token.floor_sha256 == floor.sha256),
        ("deployment policy", ear.policy_sha256 == token.policy_sha256),
        ("leg of a line", (None if ear.line is None else replace(ear.line, previous=None)) == token.line),
    ):
        if not right:
            raise PeerError(Code.RELEASE_INVALID, f"the broker's release is for another {what}")
    # A broker that released below the owner's floor did what the owner forbade: its release is not used.
    if not ear.assurance.at_least(floor.assurance) or not ear.profile.at_least(floor.profile):
        raise PeerError(Code.RELEASE_INVALID, "the broker released below the owner's policy floor")
    info = release_info(
        challenge=challenge.encode(),
        evidence_sha256=evidence_sha256,
        ear=release.ear,
        floor_sha256=ear.floor_sha256,
        policy_sha256=ear.policy_sha256,
    )
    return CheckedRelease(ear=ear, ear_text=release.ear, sealed_key=release.sealed_key, info=info)
