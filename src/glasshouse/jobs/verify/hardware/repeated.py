"""Appraises the hardware evidence of a bundle again, as the gate did when it released the key.

Law: nothing of it is taken on the gate's word but the activation of a TPM's key, whose secret is gone.
Source: spec/hardware-evidence.md, section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from glasshouse.attestation.ear import RUNTIME, Ear
from glasshouse.attestation.evidence import Evidence
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.collateral import EMPTY, Pack
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.attestation.roots.root_table import bound_of, check_12_apart, check_12_hardware
from glasshouse.errors import Code, FormatError, UsageError, VerificationError
from glasshouse.evidence.bundle import HardwareParts
from glasshouse.wire.policy import Assurance


def check_appraisal(parts: HardwareParts, evidence: Evidence, ear: Ear) -> None:
    """The appraisal, repeated as of when the result was issued, comes to the same.

    Args:
        parts: with a policy, and with a pack where the result names one; its blobs are those that the evidence names.

    Raises:
        VerificationError: `evidence-invalid`.
        UsageError: `hardware-verifier-missing`: this installation lacks what appraises a kind.
    """
    found = _appraised(parts, evidence, ear)
    stated = {name: dict(one.vector) for name, one in ear.submodules.items() if name != RUNTIME}
    if {kind: dict(one.vector) for kind, one in found.items()} != stated:
        raise VerificationError(
            Code.CHAIN_EVIDENCE, "hardware evidence that comes to another thing than the attestation result says"
        )
    # Only what the policy lists by its name needs no activation: the gate has to have seen every other.
    if ("tpm" in found and "ek_sha256" in found["tpm"].claims) is not ear.tpm_activated:
        raise VerificationError(
            Code.CHAIN_EVIDENCE, "a TPM's key whose activation the attestation result tells otherwise"
        )


def check_apart(machines: Iterable[tuple[HardwareParts, Evidence, Ear]]) -> None:
    """No device counts for two machines of a group, as the gate saw to when it released to them.

    Args:
        machines: of those whose appraisal was repeated.

    Raises:
        VerificationError: `evidence-invalid`.
    """
    try:
        check_12_apart([_appraised(*machine) for machine in machines])
    except CheckFailedError as error:
        raise VerificationError(Code.CHAIN_EVIDENCE, error.message) from None


def _appraised(parts: HardwareParts, evidence: Evidence, ear: Ear) -> Mapping[str, Appraised]:
    try:
        policy = DeploymentPolicy.from_json(parts.policy)
        pack = None if parts.collateral is None else Pack.parse(parts.collateral)
    except FormatError as error:
        raise VerificationError(Code.CHAIN_EVIDENCE, error.message) from None
    for what, found, named in (
        ("policy", policy.sha256, ear.policy_sha256),
        ("collateral", None if pack is None else pack.sha256, ear.collateral_sha256),
    ):
        if found != named:
            raise VerificationError(Code.CHAIN_EVIDENCE, f"{what} that the attestation result does not name")
    blobs = {named.kind: blob for named, blob in zip(evidence.hardware, parts.blobs, strict=True)}
    try:
        return check_12_hardware(
            evidence,
            blobs,
            bound=bound_of(evidence, blobs, ak=None, secret=None, is_repeated=True),
            now_us=ear.issued_s * 1_000_000,
            collateral=pack or EMPTY,
            policy=policy.hardware,
        )
    except CheckFailedError as error:
        if error.code is Code.HARDWARE_VERIFIER:
            raise UsageError(
                error.code,
                f"this installation lacks {error.expected}, which appraises the hardware evidence",
                hint="pip install 'glasshouse-train[hardware]'",
            ) from None
        why = f"hardware evidence that does not bear out the attestation result ({error.code}): {error.message}"
        raise VerificationError(Code.CHAIN_EVIDENCE, why) from None


def appraised_words(ear: Ear) -> str:
    """Return what was appraised again, and what of it is somebody's word, for people."""
    kinds = " and ".join(sorted(ear.submodules.keys() - {RUNTIME}))
    word = ""
    if "gcp" in ear.submodules:
        word = f"; all of it is {KINDS['gcp'].word}"
    elif ear.assurance is Assurance.TPM:
        word = f"; that its key lies in a TPM is the {'broker' if ear.tpm_activated else 'owner'}'s word"
    elif "azure" in ear.submodules:
        word = "; its TPM, and what runs beneath its image, are Microsoft's"
    return f"{kinds}, appraised again here{word}"
