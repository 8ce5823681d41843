"""Public evidence of Azure's confidential VMs: files of the blob's members; `bound` is the quote's `extraData`.

Those who published it quote all 24 registers with the bare RSA signature. `pcrs` has their values, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from glasshouse.attestation.roots.azure.azure_blob import AzureBlob
from glasshouse.attestation.roots.azure.azure_evidence import appraise_machine
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.refusing import refused
from glasshouse.errors import Code
from glasshouse.runtime.roots.tpm_device import sized
from tools.hardware_cases import HardwareCase

_RSASSA_SHA256 = bytes.fromhex("0014000b")


def appraise_public(case: HardwareCase, files: Mapping[str, bytes], pack: Pack) -> object:
    """Appraise a machine; raises `CheckFailedError`."""
    pcrs = files["pcrs"]
    blob = AzureBlob(
        certificate=files["certificate"],
        pcrs=tuple(pcrs[at : at + 32] for at in range(0, len(pcrs), 32)),
        quote=files["quote"],
        report=files["report"],
        runtime=files["runtime"],
        signature=_RSASSA_SHA256 + sized(files["signature"]),
    ).encode()
    with refused(Code.HARDWARE_MALFORMED, "the evidence of Azure"):
        evidence = AzureBlob.parse(blob)
    assert case.policy.azure is not None
    return appraise_machine(
        evidence,
        extra_data=case.bound or b"",
        now_us=case.now_us,
        collateral=pack,
        policy=case.policy.azure,
        registers=range(24),
    )
