"""What appraising the evidence of a root of trust takes, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from glasshouse.attestation.ar4si import EarStatus
from glasshouse.attestation.evidence import Blob
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.wire.canonical import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Appraised:
    """What the evidence of a root amounts to."""

    status: EarStatus  # its tier, that of the vector
    vector: Mapping[str, int]  # AR4SI trustworthiness claims
    claims: Mapping[str, Json] = field(default_factory=dict)  # what the root states about the machine


class Appraise(Protocol):
    """The pure half of a root of trust."""

    def __call__(
        self,
        blobs: tuple[Blob, ...],
        *,
        composite: bytes,
        nonce: bytes,
        now_us: int,
        collateral: Mapping[str, bytes],
        policy: DeploymentPolicy | None,
    ) -> Appraised:
        """Appraise the evidence.

        Args:
            composite: the 32 bytes that the blobs must be bound to.
            now_us: when certificates and collateral must be valid.
            collateral: certificates and revocation lists, by name.
            policy: what the deployment demands; None where a receipt is verified, which names its digest alone.

        Raises:
            CheckFailedError: `hardware-evidence-invalid`: not genuine, not complete, or bound to something else.
        """
