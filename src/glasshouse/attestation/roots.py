"""The roots of trust: one module each, behind one function.

A level that no module stands behind cannot be reached: claiming it is `hardware-evidence-invalid`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from glasshouse.attestation import software
from glasshouse.attestation.evidence import HardwareEvidence
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.errors import Code
from glasshouse.wire.policy import Assurance

__all__ = ["ROOTS", "Root", "verify_hardware"]

Root: TypeAlias = Callable[[tuple[HardwareEvidence, ...], bytes], None]
"""Takes the hardware evidence and the composite that it must carry as user data.

Returns when the evidence is genuine, complete for the level and bound to the composite; raises
`CheckFailedError` (`hardware-evidence-invalid`) in every other case.
"""

ROOTS: Mapping[Assurance, Root] = MappingProxyType({Assurance.SOFTWARE: software.verify})


def verify_hardware(assurance: Assurance, hardware: tuple[HardwareEvidence, ...], composite: bytes) -> None:
    """Check that `hardware` proves the claimed level for exactly these claims (check 12).

    Raises:
        CheckFailedError: `hardware-evidence-invalid`.
    """
    root = ROOTS.get(assurance)
    if root is None:
        raise CheckFailedError(
            "12",
            Code.HARDWARE_EVIDENCE,
            f"no module verifies evidence for the level {assurance}",
            expected=", ".join(ROOTS),
            actual=assurance.value,
        )
    root(hardware, composite)
