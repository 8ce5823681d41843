"""What may have stayed behind on the machine, looked for after everything was wiped.

Each probe answers `clean`, `found` or `unverifiable`, and never better than it knows. Details are short
words; they go into the event log and hold nothing of the owner's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from glasshouse.attestation.hardening import CheckResult, WorkspaceKind
from glasshouse.evidence.events import ProbeResult
from glasshouse.runtime.confine import private_root
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.keys import shared_files
from glasshouse.runtime.keys.memory_search import Finder, search_self
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.keys.shared_files import Before
from glasshouse.runtime.watchdog.session_record import Process, members
from glasshouse.runtime.worker.sandbox import Worker

__all__ = ["Probe", "probe_gpu", "probe_memory", "probe_shared_memory", "probe_swap", "probe_workspace", "scan_self"]

NEEDLES_AT_ONCE = 512
_NVML = "libnvidia-ml.so.1"
_NVML_PROCESSES = 64
_NVML_PROCESS_BYTES = 24  # struct nvmlProcessInfo_v2: pid, used memory, two instance ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One answer.

    Attributes:
        name: which probe.
        result: what it says.
        detail: why, in a few words.
    """

    name: str
    result: ProbeResult
    detail: str


def scan_self(
    needles: Iterable[memoryview],
    *,
    own: Sequence[SecretMemory],
    between: Callable[[], object] = lambda: None,
    kernel: Kernel = REAL,
) -> list[int]:
    """Return the indices of the needles that are in this process's memory now.

    Before anything was released this finds needles that are no secret: text that the runtime itself holds.

    Args:
        needles: what to search for.
        own: secret memory that holds them.
        between: called about once a second; a package of many files has tens of thousands of needles.
        kernel: the kernel.
    """
    views, found = list(needles), []
    for first in range(0, len(views), NEEDLES_AT_ONCE):
        search = search_self(views[first : first + NEEDLES_AT_ONCE], own=own, kernel=kernel)
        found += [first + index for index in sorted(search.found)]
        between()
    return found


def probe_memory(
    needles: Iterable[memoryview], *, wiped: Sequence[SecretMemory], needle_memory: SecretMemory,
    kernel: Kernel = REAL,
) -> Probe:  # fmt: skip
    """Search this process for needles.

    Args:
        needles: what to search for; none at all is `unverifiable`, not clean.
        wiped: secret memory that must be zero by now.
        needle_memory: where the needles are; wiped by the caller afterwards.
        kernel: the kernel.
    """
    name, views = "agent-memory", list(needles)
    if not all(secret.is_zero() for secret in wiped):
        return Probe(name=name, result=ProbeResult.FOUND, detail="secret-memory-not-wiped")
    try:
        search = search_self(views, own=[*wiped, needle_memory], kernel=kernel)
    except OSError:
        return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail="memory-not-readable")
    if search.found:
        return Probe(name=name, result=ProbeResult.FOUND, detail=f"needles-{len(search.found)}-of-{len(views)}")
    if search.unreadable:
        return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail=f"regions-unreadable-{search.unreadable}")
    if not views or not search.searched_bytes:
        return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail="nothing-to-search-for")
    detail = f"needles-{len(views)}-in-{search.searched_bytes >> 10}-KiB"
    return Probe(name=name, result=ProbeResult.CLEAN, detail=detail)


def probe_workspace(worker: Worker | None, *, kernel: Kernel = REAL) -> Probe:
    """Look whether anything is left of the worker's files and processes; call it after `Worker.end`."""
    name = "workspace"
    if worker is None or worker.report is None or worker.pid is None:
        return Probe(name=name, result=ProbeResult.CLEAN, detail="never-made")
    # A dead process that a tracer keeps from being reaped has neither memory nor mounts left.
    if worker.poll() is None and _is_alive(kernel, worker.pid):
        return Probe(name=name, result=ProbeResult.FOUND, detail="worker-still-there")
    if not worker.own_process_namespace and members(worker.pid):
        return Probe(name=name, result=ProbeResult.FOUND, detail="processes-left")
    if os.path.lexists(worker.named_path):
        return Probe(name=name, result=ProbeResult.FOUND, detail="files-left")
    if worker.report.workspace is WorkspaceKind.DIRECTORY:
        # It is gone by name; what a disk or a file system keeps of it cannot be seen from here.
        detail = "was-on-a-disk" if worker.on_disk else "was-a-directory"
        return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail=detail)
    if private_root.is_memory(kernel, worker.report.base) != (False, False):
        return Probe(name=name, result=ProbeResult.FOUND, detail="mount-left")
    if not worker.own_process_namespace:
        return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail="no-process-namespace")
    # The kernel reports the end of a namespace's first process only after it has ended all others.
    return Probe(name=name, result=ProbeResult.CLEAN, detail=f"{worker.report.workspace.value}-gone")


def probe_shared_memory(
    needles: Iterable[memoryview], *, before: Before, folder: str = shared_files.FOLDER, kernel: Kernel = REAL
) -> Probe:
    """Search the files in the machine's shared memory that this run may have written, for needles.

    Args:
        needles: what to search for; none at all is `unverifiable`, not clean.
        before: what was there before anything was released; empty where the worker could map what it did not make.
        folder: where shared memory is mounted.
        kernel: the kernel.
    """
    name = "shared-memory"
    with Finder(needles, kernel=kernel) as finder:
        try:
            unsearched = shared_files.search(finder, before, folder)
        except FileNotFoundError:
            return Probe(name=name, result=ProbeResult.CLEAN, detail="no-shared-memory")
        except OSError:
            unsearched = 1
        if finder.found:
            return Probe(name=name, result=ProbeResult.FOUND, detail="needle-in-file")
        if unsearched or not finder.needles:
            return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail=f"files-not-searched-{unsearched}")
        return Probe(name=name, result=ProbeResult.CLEAN, detail=f"searched-{finder.searched_bytes >> 10}-KiB")


def probe_swap(*, agent: CheckResult, worker: CheckResult, kernel: Kernel = REAL) -> Probe:
    """Say whether anything can have reached a swap device.

    Args:
        agent, worker: their `no-swap` checks, as they were while the run lasted.
        kernel: the kernel.
    """
    name = "swap"
    try:
        devices = len(kernel.read("/proc/swaps").splitlines()) - 1
    except FileNotFoundError:
        devices = 0
    except OSError:
        return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail="not-readable")
    if devices <= 0:
        return Probe(name=name, result=ProbeResult.CLEAN, detail="no-swap")
    if agent is CheckResult.PASSED and worker is CheckResult.PASSED:
        return Probe(name=name, result=ProbeResult.CLEAN, detail="kept-out-of-swap")
    return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail=f"swap-devices-{devices}")


def probe_gpu(
    worker_pid: int | None, *, devices: Sequence[str] | None = None, library: str = "libnvidia-ml.so.1"
) -> Probe:
    """Say whether the worker still holds memory of a GPU, as the driver sees it.

    What the memory held is cleared by the driver before another process gets it; that is not observable.
    """
    name = "gpu-memory"
    present = _gpu_nodes() if devices is None else devices
    if not present:
        return Probe(name=name, result=ProbeResult.CLEAN, detail="no-gpu")
    try:
        holders = _nvml_processes(library)
    except (OSError, AttributeError, ValueError):
        return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail="driver-not-asked")
    if worker_pid is not None and worker_pid in holders:
        return Probe(name=name, result=ProbeResult.FOUND, detail="worker-holds-memory")
    if holders:
        # In a container the driver's process numbers are the machine's: they cannot be told apart.
        return Probe(name=name, result=ProbeResult.UNVERIFIABLE, detail=f"other-processes-{len(holders)}")
    return Probe(name=name, result=ProbeResult.CLEAN, detail="no-process-holds-memory")


def _is_alive(kernel: Kernel, pid: int) -> bool:
    try:
        return Process.parse(kernel.read(f"/proc/{pid}/stat")).lives
    except OSError:
        return False


def _gpu_nodes() -> list[str]:
    names = os.listdir("/dev")  # noqa: PTH208
    return [name for name in names if name.startswith("nvidia") or name in ("kfd", "dxg")]


def _nvml_processes(library: str) -> set[int]:
    """Return the processes that hold memory of any GPU, as the driver numbers them."""
    nvml = ctypes.CDLL(library)
    if nvml.nvmlInit_v2() != 0:
        raise OSError("the driver does not answer")
    try:
        count = ctypes.c_uint()
        _asked(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        found: set[int] = set()
        for index in range(count.value):
            device = ctypes.c_void_p()
            _asked(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
            for question in (
                nvml.nvmlDeviceGetComputeRunningProcesses_v3,
                nvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
            ):
                size = ctypes.c_uint(_NVML_PROCESSES)
                answer = ctypes.create_string_buffer(_NVML_PROCESSES * _NVML_PROCESS_BYTES)
                _asked(question(device, ctypes.byref(size), answer))
                for position in range(size.value):
                    start = position * _NVML_PROCESS_BYTES
                    found.add(int.from_bytes(answer.raw[start : start + 4], "little"))
        return found
    finally:
        nvml.nvmlShutdown()


def _asked(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML answered {code}")
