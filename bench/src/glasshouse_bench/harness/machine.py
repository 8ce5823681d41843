"""What the machine is, and what it does meanwhile: stolen time, throttling, frequency; looked at from outside.

Law: what cannot be looked at is None, and never zero or "fine". Nothing here names the host, a user or a path.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from glasshouse_bench.artifact import Clock, Sample
from glasshouse_bench.design import Gpu, Machine
from glasshouse_bench.documents import plain

__all__ = ["Card", "MemoryPeak", "Sampler", "clock", "descendants", "describe", "pin", "processor_ns", "speculation"]

_STEAL_FIELD = 7  # man 5 proc, /proc/stat: user nice system idle iowait irq softirq steal
_CPUCLOCK_SCHED = 2
_EVERY_S = 1.0
_SPARE_BYTES = 2 << 30  # allocators, kernels that are compiled, and whatever shows the desktop
_SYSTEM = Path("/sys/devices/system/cpu")


def clock() -> Clock:
    """Return this moment."""
    monotonic, boot = time.clock_gettime_ns(time.CLOCK_MONOTONIC), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return Clock(monotonic_ns=monotonic, boot_ns=boot - monotonic, real_us=time.time_ns() // 1000)


class Card:
    """One NVIDIA GPU by its driver's library."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def first(cls) -> Card | None:
        """Return the first GPU; None where there is none, or nothing to ask it by."""
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            return cls(library, library.nvmlDeviceGetHandleByIndex(0))
        except Exception:
            return None

    def describe(self) -> Gpu | None:
        name = _plain(self._ask("nvmlDeviceGetName", self._handle))
        driver, mig = self._ask("nvmlSystemGetDriverVersion"), self._ask("nvmlDeviceGetMigMode", self._handle)
        if name is None:
            return None
        return Gpu(name=name, driver=_plain(driver), mig=None if mig is None else bool(mig[0]))

    def shared(self) -> bool | None:
        """Return whether two processes may use it at once, each by itself; None where the driver does not say."""
        mode = self._ask("nvmlDeviceGetComputeMode", self._handle)
        if mode is None:
            return None
        return int(mode) == 0 and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ

    def free_bytes(self) -> int | None:
        """Return how much of its memory is free; None where the driver does not say."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        return None if memory is None else int(memory.free)

    def look(self) -> tuple[bool | None, int | None]:
        """Return whether heat or power holds its clock down, and the clock in kHz; takes about a millisecond."""
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle)
        mhz = self._ask("nvmlDeviceGetClockInfo", self._handle, getattr(self._library, "NVML_CLOCK_SM", 1))
        held = None
        if reasons is not None:
            names = ("SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
            held = any(int(reasons) & int(getattr(self._library, f"nvmlClocksThrottleReason{one}", 0)) for one in names)
        return held, None if mhz is None else int(mhz) * 1000

    def _ask(self, question: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, question)(*arguments)
        except Exception:
            return None  # a virtual card has no such sensor: not asked is not zero


class MemoryPeak:
    """How much of a GPU's memory one arm takes while it runs alone; nothing where there is no card."""

    def __init__(self, card: Card | None) -> None:
        self._card = card
        self._free = None if card is None else card.free_bytes()
        self.taken_bytes = 0

    def look(self) -> None:
        free = None if self._card is None else self._card.free_bytes()
        if free is not None and self._free is not None:
            self.taken_bytes = max(self.taken_bytes, self._free - free)

    @property
    def fits_twice(self) -> bool | None:
        """Whether both arms fit at once, with room to spare; None where nothing was seen."""
        if self._free is None or not self.taken_bytes:
            return None
        return 2 * self.taken_bytes + _SPARE_BYTES <= self._free


class Sampler:
    """Looks at the machine about once a second until its block is left; one look takes about a millisecond.

    Args:
        began_ns: of CLOCK_MONOTONIC, from which samples count.
        card: the GPU, if there is one.
    """

    def __init__(self, began_ns: int, card: Card | None = None) -> None:
        self.samples: list[Sample] = []
        self._began_ns, self._card = began_ns, card
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        ticks, throttled = _ticks(), _throttled()
        while not self._over.wait(_EVERY_S):
            ticks, throttled = self._look(ticks, throttled)
        self._look(ticks, throttled)

    def _look(self, ticks: tuple[int, int] | None, throttled: int | None) -> tuple[tuple[int, int] | None, int | None]:
        now_ticks, now_throttled, frequency = _ticks(), _throttled(), _together(min, "cpufreq/scaling_cur_freq")
        more = None if throttled is None or now_throttled is None else max(0, now_throttled - throttled)
        if self._card is not None:
            held, khz = self._card.look()
            more = more if held is None else (more or 0) + int(held)
            frequency = frequency if khz is None else khz
        at_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - self._began_ns
        self.samples.append(
            Sample(at_ns=at_ns, steal_ppm=_stolen(ticks, now_ticks), throttled=more, frequency_khz=frequency)
        )
        return now_ticks, now_throttled


def describe(card: Card | None) -> Machine:
    """Return what a reader has to know of this machine."""
    model, virtual = _processor()
    return Machine(
        cpu=_plain(model),
        cpus=os.cpu_count(),
        glasshouse=_version("glasshouse-train"),
        gpu=None if card is None else card.describe(),
        kernel=_plain(f"{platform.system()} {platform.release()} {platform.machine()}"),
        memory_bytes=_memory_bytes(),
        python=_plain(platform.python_version()),
        speculation=_vulnerabilities(),
        torch=_version("torch"),
        virtualised=virtual,
    )


def speculation(pid: int) -> tuple[str, ...] | None:
    """Return a process's own lines on mitigations; None where it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found = (_plain(line.replace(":", "")) for line in lines if line.startswith("Speculation"))
        return tuple(line for line in found if line is not None)
    return None


def processor_ns(pid: int) -> int | None:
    """Return a process's processor time in nanoseconds, all threads together, or None when it is gone.

    The clock of another process is ``(~pid << 3) | CPUCLOCK_SCHED``: clock_getcpuclockid(3), linux/posix-timers.h.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return None


def descendants(pid: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in " ".join(lists).split():
        yield int(child)
        yield from descendants(int(child))


def pin(pid: int, cpus: tuple[int, ...]) -> None:
    """Let all threads of a process, and what they start from now on, run on some processors only."""
    with contextlib.suppress(OSError):  # gone meanwhile: its end is seen elsewhere
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cpus)


def _ticks() -> tuple[int, int] | None:
    """Return the time of all processors and what of it was stolen, in ticks."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0].split()
        ticks = [int(word) for word in line[1:9]]  # guest time is a part of user time
    except (OSError, ValueError, IndexError):
        return None
    return (sum(ticks), ticks[_STEAL_FIELD]) if len(ticks) > _STEAL_FIELD else None


def _stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> int | None:
    if before is None or after is None or after[0] <= before[0]:
        return None
    return min(1_000_000, max(0, after[1] - before[1]) * 1_000_000 // (after[0] - before[0]))


def _throttled() -> int | None:
    """Return how often processors were throttled since the machine began."""
    return _together(sum, "thermal_throttle/*_throttle_count")


def _together(how: Callable[[list[int]], int], files: str) -> int | None:
    """Return what the numbers of all processors in the kernel's files come to."""
    values = []
    for path in _SYSTEM.glob(f"cpu[0-9]*/{files}"):
        with contextlib.suppress(OSError, ValueError):
            values.append(int(path.read_text()))
    return how(values) if values else None


def _vulnerabilities() -> tuple[str, ...] | None:
    lines = []
    for path in sorted((_SYSTEM / "vulnerabilities").glob("*")):
        with contextlib.suppress(OSError):
            line = _plain(f"{path.name} {path.read_text().strip()}")
            lines += [] if line is None else [line]
    return tuple(lines[:64]) or None


def _processor() -> tuple[str | None, bool | None]:
    """Return the processor's model, and whether it names a hypervisor above it."""
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


def _version(name: str) -> str | None:
    try:
        return plain(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(value: object) -> str | None:
    """Return a text, or what a library gave for one, as `plain` has it."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return None if text is None else plain(str(text))
