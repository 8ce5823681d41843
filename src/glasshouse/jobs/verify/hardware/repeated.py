"""Appraises the hardware evidence of a bundle again, as the gate did when it released the key.

Law: nothing of it is taken on the gate's word but the activation of a TPM's key, whose secret is gone.
Source: spec/hardware-evidence.md, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping

from glasshouse.attestation.evidence import Evidence
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised, Blob
from glasshouse.attestation.roots.collateral import EMPTY, Pack
from glasshouse.attestation.roots.root_table import bound_of, check_12_hardware
from glasshouse.errors import Code, FormatError, UsageError, VerificationError
from glasshouse.evidence.bundle import HardwareParts


def check_blobs(parts: HardwareParts | None, evidence: Evidence) -> None:
    """The bundle's blobs are those that the evidence names; raises `FormatError`, `hardware-digest`."""
    if parts is not None and [Blob.of(*one) for one in blobs_of(parts, evidence).items()] != list(evidence.hardware):
        raise FormatError(Code.HARDWARE_DIGEST, "hardware evidence that is not what the evidence names")


def blobs_of(parts: HardwareParts, evidence: Evidence) -> Mapping[str, bytes]:
    """Return the blobs by kind; raises `FormatError` where they are not as many as the evidence names."""
    if len(parts.blobs) != len(evidence.hardware):
        raise FormatError(Code.HARDWARE_DIGEST, "hardware evidence that is not what the evidence names")
    return {named.kind: blob for named, blob in zip(evidence.hardware, parts.blobs, strict=True)}


def appraised_again(
    parts: HardwareParts,
    evidence: Evidence,
    *,
    policy_sha256: bytes,
    collateral_sha256: bytes | None,
    at_us: int,
) -> dict[str, Appraised]:
    """Return what each kind amounts to.

    Args:
        parts: with a policy, and with a pack where one is named; its blobs are those that the evidence names.
        policy_sha256, collateral_sha256: that the attestation result names.
        at_us: when it was issued.

    Raises:
        VerificationError: `evidence-invalid`.
        UsageError: `hardware-verifier-missing`: this machine lacks what appraises a kind.
    """
    try:
        policy = DeploymentPolicy.from_json(parts.policy)
        pack = EMPTY if parts.collateral is None else Pack.parse(parts.collateral)
    except FormatError as error:
        raise VerificationError(Code.CHAIN_EVIDENCE, error.message) from None
    digest = None if parts.collateral is None else pack.sha256
    for what, holds in (("policy", policy.sha256 == policy_sha256), ("collateral", digest == collateral_sha256)):
        if not holds:
            raise VerificationError(Code.CHAIN_EVIDENCE, f"{what} that the attestation result does not name")
    blobs = blobs_of(parts, evidence)
    try:
        return check_12_hardware(
            evidence,
            blobs,
            bound=bound_of(evidence, blobs, ak=None, secret=None, is_repeated=True),
            now_us=at_us,
            collateral=pack,
            policy=policy.hardware,
        )
    except CheckFailedError as error:
        if error.code is Code.HARDWARE_VERIFIER:
            raise UsageError(
                error.code,
                f"this installation lacks {error.expected}, which appraises hardware evidence of the run",
                hint="pip install 'glasshouse-train[hardware]'",
            ) from None
        why = f"hardware evidence that does not bear out the attestation result ({error.code}): {error.message}"
        raise VerificationError(Code.CHAIN_EVIDENCE, why) from None
