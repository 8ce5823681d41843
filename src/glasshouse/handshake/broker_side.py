"""The gate: the numbered checks of spec/key-release.md section 6, in order, and the release.

Pure decisions. The broker brings what only its store holds (the challenge's state, check 2; the
budget, check 13) and commits them in one transaction with what is decided here. The first check
that fails raises `CheckFailedError` with its code, and nothing later is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from glasshouse.attestation import appraise as acceptable
from glasshouse.attestation import verify as genuine
from glasshouse.attestation.claims import Claims
from glasshouse.attestation.ear import RUNTIME, Ear, Submodule
from glasshouse.attestation.evidence import SignedEvidence
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import CHAINED_VECTOR, SOFTWARE_VECTOR, Appraised
from glasshouse.attestation.roots.collateral import EMPTY, Pack
from glasshouse.attestation.roots.root_table import bound_of, check_12_hardware
from glasshouse.errors import Code
from glasshouse.handshake.messages import PACKAGE_KEY_BYTES, Challenge, ReleaseMessage, release_info
from glasshouse.handshake.records import DeploymentRecord, LaunchRecord, check_3_token
from glasshouse.wire.crypto import SigningKey, hpke_seal
from glasshouse.wire.lines.line_start import LineStart

EAR_GRACE_S = 3600
"""Beyond the longest run and its lease: time to seal, wipe and have the receipt countersigned."""

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Appraisal:
    """Evidence that passed checks 1 and 3 to 12."""

    claims: Claims  # verified as far as their level goes
    evidence_sha256: bytes  # of the evidence message
    roots: Mapping[str, Appraised]  # what each kind of hardware evidence amounts to; empty at `software`
    collateral_sha256: bytes | None = None  # of the pack that was at hand for them
    tpm_activated: bool = False  # whether a TPM opened the challenge's credential


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What check 12 needs beside the evidence."""

    blobs: Mapping[str, bytes] = field(default_factory=dict)  # by kind, of the digests that the evidence names
    # Of the challenge: the keys of a TPM that were named in its request, and the secret in its credential.
    ak: bytes | None = None
    ek: bytes | None = None
    secret: bytes | None = None
    collateral: Pack = EMPTY
    collateral_sha256: bytes | None = None  # None where there is no pack
    # What the same evidence amounted to with the same pack.
    known: Mapping[str, Appraised] | None = None


NOTHING_SHOWN = Shown()


def check_2_known(found: Found | None) -> Found:
    """The nonce names a challenge of this broker: something was found under it.

    Raises:
        CheckFailedError: `nonce-unknown`.
    """
    if found is None:
        raise CheckFailedError("2", Code.NONCE_UNKNOWN, "a challenge that this broker never gave")
    return found


def check_2_unused(challenge: Challenge, *, used: bool, now_us: int) -> Challenge:
    """The challenge is unused and fresh; for evidence, to be asked after checks 1 and 4.

    Args:
        used: whether evidence that passed checks 1 and 4 named it before, in any process, ever.

    Raises:
        CheckFailedError: `nonce-replayed` or `nonce-expired`. A second use is a replay also when the
            challenge has expired since.
    """
    if used:
        raise CheckFailedError("2", Code.NONCE_REPLAYED, "a challenge that was answered before")
    if not challenge.issued_us <= now_us < challenge.expires_us:
        raise CheckFailedError(
            "2",
            Code.NONCE_EXPIRED,
            "a challenge that has expired",
            expected=f"before {challenge.expires_us} µs",
            actual=f"{now_us} µs",
        )
    return challenge


def appraise(
    signed: SignedEvidence,
    *,
    challenge: Challenge,
    record: DeploymentRecord,
    launch: LaunchRecord,
    broker_public: bytes,
    now_us: int,
    shown: Shown = NOTHING_SHOWN,
) -> Appraisal:
    """Run checks 4, 3 and 5 to 12, in the specification's order; the caller consumed the challenge.

    Args:
        signed: passed check 1.
        challenge, record, launch: as stored: what its nonce names, and what that was given for.
        shown: what its hardware evidence is appraised with.

    Raises:
        CheckFailedError: the first check that does not hold.
    """
    evidence, claims, policy = signed.evidence, signed.evidence.claims, record.policy
    if claims.nonce != challenge.nonce:
        raise CheckFailedError("2", Code.NONCE_UNKNOWN, "evidence for another challenge")
    # The caller had to check them before it consumed anything. Once more, for nothing below may rest on a caller.
    genuine.check_4_signatures(
        signed.envelope, evidence_public=claims.evidence_public, launch_public=launch.launch_public
    )
    check_3_token(
        claims.token,
        record=record,
        launch=launch,
        deployment=challenge.deployment,
        broker_public=broker_public,
        now_us=now_us,
    )
    acceptable.check_5_time(
        claims, challenge_issued_us=challenge.issued_us, now_us=now_us, skew_us=policy.clock_skew_us
    )
    acceptable.check_6_manifest(claims, manifest_sha256=record.manifest_sha256, package_id=record.package_id)
    acceptable.check_7_container(
        claims,
        container_id=launch.container_id,
        container_source=launch.container_source,
        run_id=launch.run_id,
        deployment=record.deployment,
    )
    acceptable.check_8_measurement(claims, policy.references)
    genuine.check_9_composite(evidence)
    acceptable.check_10_state(claims)
    acceptable.check_11_hardening(claims.hardening, least=policy.profile)
    acceptable.check_12_assurance(claims, least=policy.assurance)
    roots = check_12_hardware(
        evidence,
        shown.blobs,
        bound=bound_of(evidence, shown.blobs, ak=shown.ak, ek=shown.ek, secret=shown.secret),
        now_us=now_us,
        collateral=shown.collateral,
        policy=policy.hardware,
        known=shown.known,
    )
    return Appraisal(
        claims=claims,
        evidence_sha256=signed.sha256,
        roots=roots,
        collateral_sha256=shown.collateral_sha256 if roots else None,
        tpm_activated="tpm" in roots and shown.secret is not None,
    )


def check_13_budget(*, released_to: int, known: bool, policy: DeploymentPolicy, more: int = 1) -> None:
    """One more distinct pair of keys fits into the budget, or this one was released to before.

    Args:
        released_to: how many distinct attested HPKE keys of this deployment were given the key.
        known: whether this HPKE key is among them: a runtime that lost its answer.
        more: how many keys are released to together: one for each machine of a group.

    Raises:
        CheckFailedError: `release-budget-exhausted`.
    """
    if not known and released_to + more > policy.release_budget:
        raise CheckFailedError(
            "13",
            Code.RELEASE_BUDGET,
            "the deployment's release budget is used up",
            expected=f"at most {policy.release_budget}",
            actual=f"{released_to + more}",
        )


def build_release(
    appraisal: Appraisal,
    *,
    package_key: bytes,
    broker_key: SigningKey,
    challenge: Challenge,
    record: DeploymentRecord,
    now_us: int,
    line: LineStart | None = None,
) -> bytes:
    """Return the release message: an EAR, and the package key sealed to the attested HPKE key.

    The answer may be stored and sent again: only the attested runtime opens it.

    Args:
        line: the leg, with the holder of the one before; None for a run of no line.
    """
    if len(package_key) != PACKAGE_KEY_BYTES:
        raise ValueError("a package key is 32 bytes")
    claims, policy = appraisal.claims, record.policy
    issued_s, vector = now_us // 1_000_000, CHAINED_VECTOR if appraisal.roots else SOFTWARE_VECTOR
    ear = Ear(
        issued_s=issued_s,
        expires_s=issued_s + policy.max_duration_s + policy.lease_s + EAR_GRACE_S,
        nonce=challenge.nonce,
        evidence_public=claims.evidence_public,
        deployment=record.deployment,
        run_id=claims.run_id,
        manifest_sha256=record.manifest_sha256,
        floor_sha256=record.floor_sha256,
        policy_sha256=record.policy_sha256,
        evidence_sha256=appraisal.evidence_sha256,
        assurance=claims.assurance,
        profile=claims.hardening.profile,
        submodules=Submodule.all_of(
            {RUNTIME: vector} | {kind: root.vector for kind, root in appraisal.roots.items()}, record.policy_sha256
        ),
        collateral_sha256=appraisal.collateral_sha256,
        tpm_activated=appraisal.tpm_activated,
        lease_s=policy.lease_s,
        max_duration_s=policy.max_duration_s,
        line=line,
    ).issue(broker_key)
    info = release_info(
        challenge=challenge.encode(),
        evidence_sha256=appraisal.evidence_sha256,
        ear=ear,
        floor_sha256=record.floor_sha256,
        policy_sha256=record.policy_sha256,
        line=line,
    )
    sealed = hpke_seal(package_key, recipient=claims.hpke_public, info=info)
    return ReleaseMessage(ear=ear, sealed_key=sealed).encode()
