"""What `doctor` reports of a machine: the record of one finding, and the findings about its equipment."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from glasshouse.attestation.roots.kinds import KINDS, NVIDIA
from glasshouse.attestation.roots.levels import LEVELS
from glasshouse.runtime import gpus
from glasshouse.runtime.kernel import Kernel
from glasshouse.wire.canonical import Json

_LEAST_FREE_BYTES = 2_000_000_000


class Standing(StrEnum):
    """What a finding means for a protected run."""

    GOOD = "good"
    WEAKER = "weaker"
    MISSING = "missing"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this machine."""

    feature: str  # what was looked at; a fixed word
    standing: Standing  # what it means
    value: str  # what was found
    consequence: str  # one sentence for a person

    def to_json(self) -> dict[str, Json]:
        """Return the finding as it is sent and printed."""
        return asdict(self)


def equipment(kernel: Kernel, *, devices: Path, library: str, place: Path) -> list[Finding]:
    """Look at what there is to train with; the arguments are those of `doctor.examine`."""
    return [*_hardware(devices), _driver(devices, library), _torch(), _memory(kernel), _disk(place)]


def _hardware(devices: Path) -> list[Finding]:
    findings = []
    for kind, row in KINDS.items():
        level = next(level for level, wants in LEVELS.items() if kind in wants.one_of | wants.beside)
        nodes = [path.removeprefix("/dev/") for path in row.offered_by if path.startswith("/dev/")]
        present = [str(node) for pattern in nodes for node in sorted(devices.glob(pattern))]
        if present:
            consequence = f"could stand behind {level} once this version supports it; it does not yet"
            if kind == NVIDIA and (state := gpus.confidential_state()):
                present = [state]
                consequence = consequence if state == "on" else "the GPU's memory is open to the host"
            findings.append(Finding(f"root-{kind}", Standing.NOTE, present[0], consequence))
    count = len(list(devices.glob("nvidia[0-9]*")))
    consequence = "training can use them" if count else "training uses the CPU"
    return [*findings, Finding("gpus", Standing.NOTE, str(count), consequence)]


def _driver(devices: Path, library: str) -> Finding:
    seen = gpus.in_sight(library=library, folder=str(devices))
    if seen:
        named = ", ".join(f"{gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB)" for gpu in seen)
        return Finding("gpu-driver", Standing.GOOD, seen[0].driver, f"GPUs that it lists: {named}")
    if any(devices.glob("nvidia[0-9]*")):
        return Finding("gpu-driver", Standing.WEAKER, "no answer", "a GPU is there, and its driver does not answer")
    return Finding("gpu-driver", Standing.NOTE, "none", "training uses the CPU")


def _torch() -> Finding:
    # Read from what is installed: importing it takes seconds, and it has no place in this process.
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", Standing.WEAKER, "none", "no built-in workload can train here: it is not installed")
    build = version.partition("+")[2]
    consequence = "built for the CPU alone" if build == "cpu" else "what the workloads train with"
    return Finding("torch", Standing.GOOD, version, consequence)


def _memory(kernel: Kernel) -> Finding:
    try:
        lines = (line.split() for line in kernel.read("/proc/meminfo").decode().splitlines())
        facts = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
        free, whole = facts["MemAvailable"], facts["MemTotal"]
    except (OSError, KeyError, ValueError):
        return Finding("memory", Standing.NOTE, "unknown", "the kernel does not report how much memory is free")
    value = f"{free / 1e9:.1f} of {whole / 1e9:.1f} GB free"
    if free < _LEAST_FREE_BYTES:
        return Finding("memory", Standing.WEAKER, value, "too little for most trainings, whose files lie in it too")
    return Finding("memory", Standing.GOOD, value, "inputs and the worker's files lie in it, beside the training")


def _disk(place: Path) -> Finding:
    try:
        room = shutil.disk_usage(place)
    except OSError:
        consequence = "the file system of this folder does not report its free space"
        return Finding("disk", Standing.NOTE, "unknown", consequence)
    value = f"{room.free / 1e9:.1f} of {room.total / 1e9:.1f} GB free"
    if room.free < _LEAST_FREE_BYTES:
        return Finding("disk", Standing.WEAKER, value, "too little for most packages and their sealed outputs")
    return Finding("disk", Standing.GOOD, value, "the sealed package and the sealed outputs lie on it")
