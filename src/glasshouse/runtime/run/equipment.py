"""What this machine has to train with: roots of trust, GPUs and their driver, PyTorch, memory, disk."""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
from pathlib import Path

from glasshouse.attestation.roots.root_table import LEVELS
from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.run.findings import Finding, Standing, finding
from glasshouse.runtime.worker import gpus

__all__ = ["NVML", "found"]

NVML = "libnvidia-ml.so.1"
_LEAST_FREE_BYTES = 2_000_000_000


def found(kernel: Kernel, *, devices: Path, library: str, place: Path) -> list[Finding]:
    """Look at the equipment; the arguments are those of `doctor.examine`."""
    return [*_hardware(devices), _driver(devices, library), _torch(), _memory(kernel), _disk(place)]


def _hardware(devices: Path) -> list[Finding]:
    findings = []
    for level, root in ((level, root) for level, row in LEVELS.items() for root in row.roots):
        present = [str(node) for pattern in root.devices for node in sorted(devices.glob(pattern))]
        if present:
            consequence = f"could stand behind {level} once this version supports it; it does not yet"
            if root.kind == "nvidia-cc" and (state := _confidential_gpu()):
                present = [state]
                consequence = consequence if state == "on" else "the GPU's memory is open to the host"
            findings.append(finding(f"root-{root.kind}", Standing.NOTE, present[0], consequence))
    nodes_of_gpus = list(devices.glob("nvidia[0-9]*"))
    findings.append(
        finding(
            "gpus",
            Standing.NOTE,
            str(len(nodes_of_gpus)),
            "training can use them" if nodes_of_gpus else "training uses the CPU",
        )
    )
    return findings


def _driver(devices: Path, library: str) -> Finding:
    seen = gpus.in_sight(library=library, folder=str(devices))
    if seen:
        named = ", ".join(f"{gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB)" for gpu in seen)
        return finding("gpu-driver", Standing.GOOD, seen[0].driver, f"GPUs that it lists: {named}")
    if any(devices.glob("nvidia[0-9]*")):
        return finding("gpu-driver", Standing.WEAKER, "no answer", "a GPU is there, and its driver does not answer")
    return finding("gpu-driver", Standing.NOTE, "none", "training uses the CPU")


def _torch() -> Finding:
    # Read from what is installed: importing it takes seconds, and it has no place in this process.
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return finding("torch", Standing.WEAKER, "none", "no built-in workload can train here: it is not installed")
    build = version.partition("+")[2]
    consequence = "built for the CPU alone" if build == "cpu" else "what the workloads train with"
    return finding("torch", Standing.GOOD, version, consequence)


def _memory(kernel: Kernel) -> Finding:
    try:
        lines = (line.split() for line in kernel.read("/proc/meminfo").decode().splitlines())
        facts = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
        free, whole = facts["MemAvailable"], facts["MemTotal"]
    except (OSError, KeyError, ValueError):
        return finding("memory", Standing.NOTE, "unknown", "the kernel does not report how much memory is free")
    value = f"{free / 1e9:.1f} of {whole / 1e9:.1f} GB free"
    if free < _LEAST_FREE_BYTES:
        return finding("memory", Standing.WEAKER, value, "too little for most trainings, whose files lie in it too")
    return finding("memory", Standing.GOOD, value, "inputs and the worker's files lie in it, beside the training")


def _disk(place: Path) -> Finding:
    try:
        room = shutil.disk_usage(place)
    except OSError:
        return finding(
            "disk", Standing.NOTE, "unknown", "the file system of this folder does not report its free space"
        )
    value = f"{room.free / 1e9:.1f} of {room.total / 1e9:.1f} GB free"
    if room.free < _LEAST_FREE_BYTES:
        return finding("disk", Standing.WEAKER, value, "too little for most packages and their sealed outputs")
    return finding("disk", Standing.GOOD, value, "the sealed package and the sealed outputs lie on it")


def _confidential_gpu() -> str:
    """Read the driver's confidential-computing state."""
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2() != 0:
            return "unknown"
        try:
            state = (ctypes.c_uint * 3)()  # environment, feature, developer tools
            return ("on" if state[1] else "off") if nvml.nvmlSystemGetConfComputeState(state) == 0 else "off"
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return "unknown"
