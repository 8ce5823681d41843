"""What the machine did meanwhile, and what it is: stolen time, the GPU's state, a description without names.

Law: what cannot be looked at is None, and never zero or "fine". Nothing here names the host, a user or a path.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from glasshouse.bench.overhead.facts import plain
from glasshouse.bench.overhead.slices import Throttle
from glasshouse.wire.canonical import Json

__all__ = ["Gpu", "GpuState", "Seen", "describe", "look", "stolen_ppm"]

_THERMAL = ("nvmlClocksThrottleReasonSwThermalSlowdown", "nvmlClocksThrottleReasonHwThermalSlowdown")
_POWER_BRAKE = ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown",)
_STEAL_FIELD = 7  # man 5 proc, /proc/stat: user nice system idle iowait irq softirq steal


@dataclass(frozen=True, slots=True)
class GpuState:
    """What the driver says of one GPU now; None for what it does not say.

    Args:
        throttle: why its clocks are held down, of the reasons that exclude a block.
        ecc_errors: uncorrected memory errors since the driver was loaded.
        processes: those that compute on it.
        energy_mj: used since the driver was loaded.
        memory_bytes: in use.
    """

    _: KW_ONLY
    throttle: tuple[Throttle, ...] | None
    ecc_errors: int | None
    processes: tuple[int, ...] | None
    energy_mj: int | None
    memory_bytes: int | None


class Gpu:
    """One NVIDIA GPU by its driver's library."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def first(cls) -> Gpu | None:
        """Return the first GPU, or None where there is none or nobody can ask."""
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            return cls(library, library.nvmlDeviceGetHandleByIndex(0))
        except Exception:
            return None  # no library, no driver, no device: nobody looked

    @property
    def name(self) -> str | None:
        return _text(self._ask("nvmlDeviceGetName"))

    @property
    def driver(self) -> str | None:
        try:
            return _text(self._library.nvmlSystemGetDriverVersion())
        except Exception:
            return None

    def state(self) -> GpuState:
        """Look once; takes about a millisecond."""
        library = self._library
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        ecc = self._ask(
            "nvmlDeviceGetTotalEccErrors",
            getattr(library, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
            getattr(library, "NVML_VOLATILE_ECC", 0),
        )
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses")
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return GpuState(
            throttle=None if reasons is None else self._throttle(int(reasons)),
            ecc_errors=None if ecc is None else int(ecc),
            processes=None if processes is None else tuple(int(one.pid) for one in processes),
            energy_mj=_integer(self._ask("nvmlDeviceGetTotalEnergyConsumption")),
            memory_bytes=None if memory is None else int(memory.used),
        )

    def _throttle(self, reasons: int) -> tuple[Throttle, ...]:
        found = []
        for reason, names in ((Throttle.THERMAL, _THERMAL), (Throttle.POWER_BRAKE, _POWER_BRAKE)):
            if any(reasons & int(getattr(self._library, name, 0)) for name in names):
                found.append(reason)
        return tuple(found)

    def _ask(self, question: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, question)(self._handle, *arguments)
        except Exception:
            return None  # a consumer card has no ECC, a virtual one no energy counter: not asked is not zero


@dataclass(frozen=True, slots=True)
class Seen:
    """The machine at one moment.

    Args:
        cpu: time of all CPUs and what of it was stolen, in ticks; None where the kernel does not say.
        gpu: None without one.
    """

    _: KW_ONLY
    cpu: tuple[int, int] | None
    gpu: GpuState | None

    def until(self, after: Seen, ours: Collection[int]) -> Mapping[str, Any]:
        """Return what a slice says of the time between two looks.

        Args:
            after: the later look.
            ours: the processes of both arms.
        """
        values: dict[str, Any] = {"steal_ppm": stolen_ppm(self.cpu, after.cpu)}
        if self.gpu is None or after.gpu is None:
            return values
        throttles = (self.gpu.throttle, after.gpu.throttle)
        if None not in throttles:
            values["throttle"] = tuple(one for one in Throttle if any(one in (seen or ()) for seen in throttles))
        if self.gpu.ecc_errors is not None and after.gpu.ecc_errors is not None:
            values["ecc_errors"] = max(0, after.gpu.ecc_errors - self.gpu.ecc_errors)
        values["foreign_processes"] = _foreign(after.gpu.processes, ours)
        return values


def look(gpu: Gpu | None) -> Seen:
    """Look at the machine now."""
    return Seen(cpu=_cpu_ticks(), gpu=None if gpu is None else gpu.state())


def stolen_ppm(before: tuple[int, int] | None, after: tuple[int, int] | None) -> int | None:
    """Return which part of the CPUs' time the hypervisor took between two looks, in millionths."""
    if before is None or after is None:
        return None
    passed, stolen = after[0] - before[0], after[1] - before[1]
    return min(1_000_000, max(0, stolen) * 1_000_000 // passed) if passed > 0 else None


def describe(gpu: Gpu | None) -> dict[str, Json]:
    """Return what a reader has to know of this machine, in the form of `Facts.system`."""
    cpu, virtual = _cpu()
    card = None if gpu is None else _plain(gpu.name)
    return {
        "cpu": _plain(cpu),
        "glasshouse": _version("glasshouse-train"),
        "gpu": None if gpu is None or card is None else {"driver": _plain(gpu.driver), "name": card},
        "kernel": _plain(f"{platform.system()} {platform.release()} {platform.machine()}"),
        "logical_cpus": _logical_cpus(),
        "memory_bytes": _memory_bytes(),
        "python": _plain(platform.python_version()),
        "torch": _version("torch"),
        "virtualised": virtual,
    }


def _plain(text: str | None) -> str | None:
    return None if text is None else plain(text)


def _foreign(processes: tuple[int, ...] | None, ours: Collection[int]) -> int | None:
    """Count processes that are neither arm's; None where the driver shows none of ours.

    In a container the driver may name processes as the host does, or none at all: then nobody can tell.
    """
    if processes is None or not set(processes) & set(ours):
        return None
    return len(set(processes) - set(ours))


def _cpu_ticks() -> tuple[int, int] | None:
    try:
        line = Path("/proc/stat").read_text().splitlines()[0].split()
        ticks = [int(word) for word in line[1:9]]  # guest time is a part of user time
    except (OSError, ValueError, IndexError):
        return None
    return (sum(ticks), ticks[_STEAL_FIELD]) if len(ticks) > _STEAL_FIELD else None


def _cpu() -> tuple[str | None, bool | None]:
    """Return the CPU's model, and whether it says that a hypervisor is above it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None, None
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags")
    return facts.get("model name") or None, None if flags is None else "hypervisor" in flags.split()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _logical_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return plain(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if value is None else str(value)


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)
