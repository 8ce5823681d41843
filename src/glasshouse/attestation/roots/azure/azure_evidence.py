"""Appraise a confidential VM of Azure: the processor's report names the vTPM's key, and that key quotes the image.

Source: spec/hardware-evidence.md, section 7.4, in the order of its checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey, RSAPublicNumbers

from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.azure.azure_blob import AzureBlob
from glasshouse.attestation.roots.azure.azure_policy import AzurePolicy
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.foreign_json import read_foreign
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.refusing import refusal, refused, require
from glasshouse.attestation.roots.sev_snp.amd_keys import PINNED, Product
from glasshouse.attestation.roots.sev_snp.sev_snp_evidence import appraise_report
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS
from glasshouse.attestation.roots.tpm.tpm_quote import appraise_quote
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json, b64decode
from glasshouse.wire.crypto import sha256

_KEY = "HCLAkPub"


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise the blob of kind `azure`; see `root_table.Appraise`."""
    if policy.azure is None:
        raise refusal(Code.CHAIN_MISSING, "the policy names no azure")
    with refused(Code.HARDWARE_MALFORMED, "the evidence of Azure"):
        evidence = AzureBlob.parse(blob)
    return appraise_machine(
        evidence, extra_data=bound.composite, now_us=now_us, collateral=collateral, policy=policy.azure
    )


def appraise_machine(
    evidence: AzureBlob,
    *,
    extra_data: bytes,
    now_us: int,
    collateral: Pack,
    policy: AzurePolicy,
    roots: Sequence[Product] = PINNED,
    registers: Sequence[int] = QUOTED_PCRS,
) -> Appraised:
    """Appraise what the blob holds.

    Args:
        extra_data: what the quote has to carry.
        registers: that it has to select.

    Raises:
        CheckFailedError: of the checks of 7.4 from the second on.
    """
    machine = appraise_report(
        evidence.report,
        evidence.certificate,
        report_data=sha256(evidence.runtime) + bytes(32),
        unbound=Code.AZURE_KEY,
        now_us=now_us,
        collateral=collateral,
        policy=policy.sev_snp,
        roots=roots,
    )
    with refused(Code.AZURE_KEY, "the runtime data"):
        key, configured = _read_runtime(evidence.runtime)
    appraise_quote(
        evidence.quote,
        evidence.signature,
        key=key,
        values=evidence.pcrs,
        log=b"",
        accepted=policy.pcrs,
        extra_data=extra_data,
        registers=registers,
    )
    paravisor = "Microsoft's, whose guest_svn and measurement these are"
    claims = {**machine.claims, "paravisor": paravisor, "vm": configured}
    return Appraised(vector=machine.vector, not_after_us=machine.not_after_us, claims=claims)


def _read_runtime(data: bytes) -> tuple[RSAPublicKey, dict[str, Json]]:
    """Return the vTPM's attestation key, and what is on in the machine; raises `FormatError`."""
    try:
        found = read_foreign(data)
        (key,) = (one for one in found["keys"] if one["kid"] == _KEY)
        modulus = b64decode(key["n"]) if (key["kty"], key["e"]) == ("RSA", "AQAB") else b""
        facts: dict[str, Json] = {
            name: value for name, value in found["vm-configuration"].items() if isinstance(value, bool)
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise FormatError(Code.SCHEMA, f"no JSON with one key {_KEY} and a configuration") from None
    is_whole = len(modulus) == 256 and modulus[0] >= 0x80
    require(is_whole, f"a key {_KEY} of another kind than RSA-2048 with the exponent 65537")
    return RSAPublicNumbers(65537, int.from_bytes(modulus, "big")).public_key(), facts
