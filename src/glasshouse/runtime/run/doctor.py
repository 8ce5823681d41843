"""What this machine offers a protected run, tried and not guessed, and what its host could still see.

Law: a finding is what was tried or read, and what follows for a run; nothing here changes this process
or the machine: whatever cannot be undone is tried in a child.
"""

from __future__ import annotations

from pathlib import Path

from glasshouse.attestation.roots.root_table import REACHABLE
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.run import equipment, isolation
from glasshouse.runtime.run.findings import Finding, Standing, finding

__all__ = ["examine"]

_EXPOSED = (
    ("memory", "the host reads the run's memory, keys and plaintext among it, and leaves no trace"),
    (
        "measurements",
        "the host can run a changed runtime that reports the right measurement: only software measures it",
    ),
    ("gpu", "what is on the GPU and on its bus is in the clear for the host"),
    ("traffic", "sizes, times and the hardening report; not names, keys or content"),
)


def examine(
    kernel: Kernel = REAL, *, devices: Path = Path("/dev"), library: str = equipment.NVML, place: Path = Path()
) -> list[Finding]:
    """Look at this machine; takes some milliseconds.

    Args:
        kernel: the kernel.
        devices: where device nodes are.
        library: NVIDIA's management library.
        place: where packages and outputs would lie; the working folder.
    """
    offered = isolation.offered(kernel)
    return [
        *offered,
        isolation.profile(offered),
        *equipment.found(kernel, devices=devices, library=library, place=place),
        isolation.memory_order(kernel),
        *_assurance(),
    ]


def _assurance() -> list[Finding]:
    level = REACHABLE[-1].value
    reach = finding("assurance", Standing.NOTE, level, "the most that this version can attest on any machine")
    return [reach, *(finding(f"host-sees-{name}", Standing.NOTE, level, text) for name, text in _EXPOSED)]
