"""The root of trust `software`: there is none.

What stands behind the evidence is the two signatures alone. A host with root can read the run's
memory and forge every measurement; see docs/security/threat-model.md.
"""

from __future__ import annotations

from glasshouse.attestation.evidence import HardwareEvidence
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.errors import Code

__all__ = ["verify"]


def verify(hardware: tuple[HardwareEvidence, ...], composite: bytes) -> None:
    """Accept exactly the absence of hardware evidence.

    Evidence that was not asked for means that one of the two sides is confused about the level.

    Raises:
        CheckFailedError: `hardware-evidence-invalid`.
    """
    del composite  # bound by the signatures; no hardware carries it
    if hardware:
        raise CheckFailedError(
            "12",
            Code.HARDWARE_EVIDENCE,
            "hardware evidence beside a claim of the level software",
            expected="none",
            actual=f"{len(hardware)} attached",
        )
