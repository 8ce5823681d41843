"""The table of assurance levels and of the roots of trust behind them, from which lists and texts elsewhere follow.

Law: a level without a root that appraises cannot be reached; claiming it is `hardware-evidence-invalid`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from glasshouse.attestation.evidence import Evidence
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots import software
from glasshouse.attestation.roots.appraised import Appraised, Blob
from glasshouse.errors import Code
from glasshouse.wire.policy import Assurance


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """A root of trust."""

    kind: str  # as blobs name it; its modules in `attestation.roots` and `runtime.roots` have `_` for each `-`
    devices: tuple[str, ...] = ()  # the nodes in /dev, one of which a machine that has it shows; globs
    appraise: Appraise | None = None  # None for one that this version does not have


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A level of assurance."""

    assurance: Assurance  # its name
    stands: str  # what stands behind the evidence, and what a host can still do
    proves: str = ""  # what a verified receipt shows to whom; empty for a level that cannot be reached
    roots: tuple[Root, ...]  # any of them reaches it


LEVELS = {
    level.assurance: level
    for level in (
        Level(
            assurance=Assurance.SOFTWARE,
            stands="measurements signed in the runtime; a host with root could read the run's memory and forge them",
            proves="To its owner it shows what the runtime said, unchanged since the broker countersigned it; to "
            "others it is the owner's word: at this level an owner can sign a run that never happened.",
            roots=(Root(kind="software", appraise=software.appraise),),
        ),
        Level(
            assurance=Assurance.TPM,
            stands="a TPM quote over boot chain and runtime; a host with root could read the run's memory",
            roots=(Root(kind="tpm", devices=("tpmrm0", "tpm0")),),
        ),
        Level(
            assurance=Assurance.CPU_TEE,
            stands="a CPU report binds the runtime; what crosses to the GPU is visible to the host",
            roots=(Root(kind="sev-snp", devices=("sev-guest",)), Root(kind="tdx", devices=("tdx_guest",))),
        ),
        Level(
            assurance=Assurance.GPU_TEE,
            stands="CPU and GPU reports bind the runtime; physical attacks remain",
            roots=(Root(kind="nvidia-cc", devices=("nvidia[0-9]*",)),),
        ),
    )
}

REACHABLE = tuple(level for level, row in LEVELS.items() if any(root.appraise for root in row.roots))
"""The levels that this version can prove, weakest first."""


def check_12_hardware(evidence: Evidence, *, now_us: int, policy: DeploymentPolicy | None) -> Appraised:
    """The hardware evidence proves the claimed level and carries the composite; see `Appraise`.

    Raises:
        CheckFailedError: `hardware-evidence-invalid`.
    """
    level = evidence.claims.assurance
    for root in LEVELS[level].roots:
        if root.appraise is not None:
            return root.appraise(
                evidence.hardware,
                composite=evidence.composite,
                nonce=evidence.claims.nonce,
                now_us=now_us,
                collateral={},
                policy=policy,
            )
    raise CheckFailedError(
        "12",
        Code.HARDWARE_EVIDENCE,
        f"no module verifies evidence for the level {level}",
        expected=", ".join(REACHABLE),
        actual=level.value,
    )
