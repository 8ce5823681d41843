"""A deployment's policy: what the broker demands of one deployment, never less than the package's floor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from glasshouse.attestation.measurements.measured import References
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.wire.crypto import sha256
from glasshouse.wire.lines.line_start import MAX_LEGS
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.wire.record import LEFT_OUT, Record, items, text

MAX_RELEASES = 1000
MAX_LEASE_S = 24 * 3600
MAX_DURATION_S = 90 * 24 * 3600
MAX_SKEW_US = 600 * 1_000_000
MAX_POLICY_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentPolicy(Record, name="policy", max_bytes=MAX_POLICY_BYTES):
    """What must hold for a release; there is no default that accepts.

    Law: a policy with nothing to compare with, no release to give or hardening off does not exist.
    """

    assurance: Assurance  # at least
    profile: Profile  # at least
    egress: Annotated[tuple[str, ...], items(16, text())]  # peers of the worker, a subset of the floor's
    references: References  # of each part of a runtime measurement, the digests recorded on the owner's side
    release_budget: int  # how many distinct attested pairs of keys, HPKE and evidence, may be given the package key
    not_after_us: int  # no release after this time
    lease_s: int  # a runtime without broker contact for so long zeroizes
    max_duration_s: int  # a run longer than this zeroizes
    clock_skew_us: int = 60_000_000  # how far the runtime's clock may be from the broker's
    # Kinds of evidence; needed above `software`. What is in it has no hash, and its equals have the same.
    hardware: Annotated[HardwarePolicy | None, LEFT_OUT] = field(default=None, hash=False)
    max_legs: Annotated[int, LEFT_OUT] = 1  # legs of a line that are released without an order of the owner's

    def __post_init__(self) -> None:
        Floor(assurance=self.assurance, profile=self.profile, egress=self.egress)  # the same laws hold
        limits = (
            ("release_budget", self.release_budget, 1, MAX_RELEASES),
            ("not_after_us", self.not_after_us, 1, 2**53 - 1),
            ("lease_s", self.lease_s, 1, MAX_LEASE_S),
            ("max_duration_s", self.max_duration_s, 1, MAX_DURATION_S),
            ("clock_skew_us", self.clock_skew_us, 0, MAX_SKEW_US),
            ("max_legs", self.max_legs, 1, MAX_LEGS),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise FormatError(Code.POLICY_IMPOSSIBLE, f"policy.{name} must be from {low} to {high}, not {value}")

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the canonical form: the policy digest in token, EAR and receipt."""
        return sha256(self.encode())

    def tightens(self, floor: Floor) -> None:
        """Check that this policy demands nothing less than the floor that the owner signed.

        Raises:
            RefusedError: `policy-loosened`, naming what was loosened.
        """
        if not self.assurance.at_least(floor.assurance):
            loosened = f"assurance {self.assurance} below the package's {floor.assurance}"
        elif not self.profile.at_least(floor.profile):
            loosened = f"profile {self.profile} below the package's {floor.profile}"
        elif not set(self.egress) <= set(floor.egress):
            loosened = "egress to a peer that the package does not allow"
        else:
            return
        raise RefusedError(Code.POLICY_LOOSENED, f"the deployment policy loosens the package's floor: {loosened}")
