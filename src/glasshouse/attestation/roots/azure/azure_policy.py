"""What a deployment demands of a confidential VM of Azure: its paravisor by the report, its image by the vTPM.

Source: spec/hardware-evidence.md, sections 4 and 7.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.roots.sev_snp.sev_snp_policy import SevSnpPolicy
from glasshouse.attestation.roots.tpm.tpm_policy import Registers, check_image
from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, Member, Record, choice


@dataclass(frozen=True, kw_only=True, slots=True)
class AzurePolicy(Record, name="policy.hardware.azure"):
    """The object `azure` of a policy."""

    chain: Annotated[str, choice(("image",)), LEFT_OUT] = ""
    pcrs: Registers
    sev_snp: Annotated[SevSnpPolicy, Member("sev-snp")]  # of the report, which is about firmware and paravisor

    def __post_init__(self) -> None:
        check_image("policy.hardware.azure", self.chain, self.pcrs)
        if self.sev_snp.vmpl:
            raise FormatError(Code.POLICY_IMPOSSIBLE, "policy.hardware.azure has a vmpl: the paravisor reports at 0")

    @property
    def needed(self) -> tuple[str, ...]:
        """The items of a collateral pack that its appraisal reads."""
        return self.sev_snp.needed
