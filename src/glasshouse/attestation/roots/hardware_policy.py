"""What a deployment demands of hardware evidence: an object for each accepted kind, and the age of collateral.

Source: spec/hardware-evidence.md, sections 4 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from glasshouse.attestation.roots.azure.azure_policy import AzurePolicy
from glasshouse.attestation.roots.dstack.dstack_policy import DstackPolicy
from glasshouse.attestation.roots.gcp.gcp_policy import GcpPolicy
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.attestation.roots.levels import LEVELS
from glasshouse.attestation.roots.nvidia.nvidia_policy import NvidiaPolicy
from glasshouse.attestation.roots.sev_snp.sev_snp_policy import SevSnpPolicy
from glasshouse.attestation.roots.tdx.tdx_policy import TdxPolicy
from glasshouse.attestation.roots.tpm.tpm_policy import TpmPolicy
from glasshouse.errors import Code, RefusedError
from glasshouse.wire.policy import Assurance
from glasshouse.wire.record import LEFT_OUT, Member, Record, integer

_DAY_S = 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxAges(Record, name="policy.hardware.collateral"):
    """The greatest ages of collateral, in seconds since the date that its maker signed."""

    crl: Annotated[int, integer(60, 400 * _DAY_S), LEFT_OUT] = 30 * _DAY_S
    ocsp: Annotated[int, integer(60, 400 * _DAY_S), LEFT_OUT] = _DAY_S
    tcb: Annotated[int, integer(60, 400 * _DAY_S), LEFT_OUT] = 30 * _DAY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwarePolicy(Record, name="policy.hardware"):
    """The kinds that are accepted, each by its own object (`attestation.roots.KIND`)."""

    azure: Annotated[AzurePolicy | None, LEFT_OUT] = None
    collateral: Annotated[MaxAges, LEFT_OUT] = MaxAges()
    dstack: Annotated[DstackPolicy | None, LEFT_OUT] = None
    gcp: Annotated[GcpPolicy | None, LEFT_OUT] = None
    nvidia: Annotated[NvidiaPolicy | None, LEFT_OUT] = None
    sev_snp: Annotated[SevSnpPolicy | None, Member("sev-snp"), LEFT_OUT] = None
    tdx: Annotated[TdxPolicy | None, LEFT_OUT] = None
    tpm: Annotated[TpmPolicy | None, LEFT_OUT] = None

    def __hash__(self) -> int:
        # Tables of reference values have no hash; a gate remembers what follows from a policy by its value.
        return hash(self.encode())

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that are named."""
        names = {field.name.replace("_", "-") for field in fields(self) if getattr(self, field.name) is not None}
        return frozenset(names & KINDS.keys())

    @property
    def needed(self) -> tuple[str, ...]:
        """The items of a collateral pack by which these kinds are appraised, sorted, as far as a policy can name them.

        A kind's object that needs some has a property `needed` too. Beside them are OCSP responses, whose names follow
        from certificates.
        """
        objects = (getattr(self, field.name) for field in fields(self))
        return tuple(sorted({name for one in objects for name in getattr(one, "needed", ())}))

    @property
    def tcb_evaluation(self) -> int:
        """Intel's number of the oldest lists that count for every kind that is named; 0 where none asks for one."""
        return max((terms.tcb_evaluation for terms in (self.dstack, self.tdx) if terms is not None), default=0)

    def wanted(self, assurance: Assurance) -> tuple[str, ...]:
        """Return the kinds that a runtime at this level has to collect, sorted.

        Raises:
            RefusedError: `chain-missing` where the policy names none of those that the level takes, or more than one.
        """
        level = LEVELS[assurance]
        wanted = sorted((self.kinds & level.one_of) | level.beside)
        if not level.complete(wanted) or not level.beside <= self.kinds:
            raise RefusedError(
                Code.CHAIN_MISSING,
                f"the hardware policy names {', '.join(sorted(self.kinds)) or 'no kind'}: the level {assurance} takes "
                f"exactly one of {', '.join(sorted(level.one_of))}"
                + (f", and {', '.join(sorted(level.beside))}" if level.beside else ""),
            )
        return tuple(wanted)
