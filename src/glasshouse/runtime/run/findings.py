"""What `doctor` reports of a machine: the record of one finding, and the findings about its equipment."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from glasshouse.attestation.roots.kinds import KINDS, Kind
from glasshouse.attestation.roots.levels import LEVELS
from glasshouse.errors import PlatformError
from glasshouse.runtime import gpus
from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.roots.collectors import collector_of
from glasshouse.wire.canonical import Json
from glasshouse.wire.policy import Assurance

_ROOT = "root-"
_LEAST_FREE_BYTES = 2_000_000_000
# Up to which level.
_EXPOSED = (
    ("memory", Assurance.TPM, "the host reads the run's memory, keys and plaintext among it, and leaves no trace"),
    (
        "measurements",
        Assurance.SOFTWARE,
        "the host can run a changed runtime that reports the right measurement: only software measures",
    ),
    ("gpu", Assurance.CPU_TEE, "what is on the GPU and on its bus is in the clear for the host"),
    ("traffic", Assurance.GPU_TEE, "sizes, times and the hardening report; not names, keys or content"),
)


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
    return [_gpus(devices), _driver(devices, library), _torch(), _memory(kernel), _disk(place)]


def roots(devices: Path) -> list[Finding]:
    """Look at the roots of trust whose devices are in sight: `good` is what gives evidence to this user."""
    return [_root(row, node) for row in KINDS.values() if (node := _node(row, devices)) is not None]


def assurance(found: list[Finding]) -> list[Finding]:
    """Return the highest level that the roots among findings complete, and what a host sees at it all the same."""
    offered = {one.feature.removeprefix(_ROOT) for one in found if one.standing is Standing.GOOD}
    level = [
        name
        for name, wants in LEVELS.items()
        if wants.beside <= offered and (not wants.one_of or wants.one_of & offered)
    ][-1]
    return [
        Finding("assurance", Standing.NOTE, level.value, "the most that a run here can have attested"),
        *(
            Finding(f"host-sees-{name}", Standing.NOTE, level.value, text)
            for name, most, text in _EXPOSED
            if most.at_least(level)
        ),
    ]


def _node(row: Kind, devices: Path) -> Path | None:
    """Return the first of what shows that a machine has a root; None where there is none of it."""
    for pattern in row.offered_by:
        path = devices / pattern.removeprefix("/dev/") if pattern.startswith("/dev/") else Path(pattern)
        for found in sorted(path.parent.glob(path.name)):
            return found
    return None


def _root(row: Kind, node: Path) -> Finding:
    try:
        lacks = collector_of(row.kind).look()
    except PlatformError as error:
        lacks = error.message
    if lacks:
        return Finding(f"{_ROOT}{row.kind}", Standing.NOTE, str(node), f"gives no evidence here: {lacks}")
    level = next(level for level, wants in LEVELS.items() if row.kind in wants.one_of | wants.beside)
    named = f" whose chain is {' or '.join(row.chains)}" if row.chains else ""
    consequence = (
        f"can stand behind {level}, with a hardware policy{named}" + (row.word and f"; it is {row.word}") + row.unseen
    )
    return Finding(f"{_ROOT}{row.kind}", Standing.GOOD, str(node), consequence)


def _gpus(devices: Path) -> Finding:
    count = len(list(devices.glob("nvidia[0-9]*")))
    consequence = "training can use them" if count else "training uses the CPU"
    return Finding("gpus", Standing.NOTE, str(count), consequence)


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
