"""What may have stayed behind on the machine, looked for after everything was wiped.

Each probe answers `clean`, `found` or `unverifiable`, and never better than was observed. Details are short
words; they go into the event log and hold nothing of the owner's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial

from glasshouse.attestation.claims import CheckResult, WorkspaceKind
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.receipt import Probe
from glasshouse.runtime import gpus
from glasshouse.runtime.confine import memory_limits, mounts
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.keys import shared_files
from glasshouse.runtime.keys.memory_search import Finder, search_self
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.keys.shared_files import Before
from glasshouse.runtime.watchdog.session_record import Process, members
from glasshouse.runtime.worker.sandbox import Worker

NEEDLES_AT_ONCE = 512
_CLEAN = partial(Probe, result=ProbeResult.CLEAN)
_FOUND = partial(Probe, result=ProbeResult.FOUND)
_UNVERIFIABLE = partial(Probe, result=ProbeResult.UNVERIFIABLE)


def scan_self(
    needles: Iterable[memoryview],
    *,
    own: Sequence[SecretMemory],
    between: Callable[[], object] = lambda: None,
) -> list[int]:
    """Return the indices of the needles in this process's memory, beside the secret memory `own` that has them.

    Before anything was released this finds needles that are no secret: text that the runtime itself holds. A package of
    many files has tens of thousands of needles: `between` is called about once a second.
    """
    views, found = list(needles), []
    for first in range(0, len(views), NEEDLES_AT_ONCE):
        search = search_self(views[first : first + NEEDLES_AT_ONCE], own=own)
        found += [first + index for index in sorted(search.found)]
        between()
    return found


def probe_memory(
    needles: Iterable[memoryview],
    *,
    wiped: Sequence[SecretMemory],
    needle_memory: SecretMemory,
    kernel: Kernel = REAL,
) -> Probe:
    """Search this process for needles, which lie in `needle_memory`; none at all is `unverifiable`, not clean.

    The secret memory of `wiped` must be zero by now; the caller wipes the needles' afterwards.
    """
    name, views = "agent-memory", list(needles)
    if not all(secret.is_zero() for secret in wiped):
        return _FOUND(probe=name, detail="secret-memory-not-wiped")
    try:
        search = search_self(views, own=[*wiped, needle_memory], kernel=kernel)
    except OSError:
        return _UNVERIFIABLE(probe=name, detail="memory-not-readable")
    if search.found:
        return _FOUND(probe=name, detail=f"needles-{len(search.found)}-of-{len(views)}")
    if search.unreadable:
        return _UNVERIFIABLE(probe=name, detail=f"regions-unreadable-{search.unreadable}")
    if not views or not search.searched_bytes:
        return _UNVERIFIABLE(probe=name, detail="nothing-to-search-for")
    return _CLEAN(probe=name, detail=f"needles-{len(views)}-in-{search.searched_bytes >> 10}-KiB")


def probe_workspace(worker: Worker | None, *, kernel: Kernel = REAL) -> Probe:
    """Look for what is left of the worker's files and processes; to be called after `Worker.end`."""
    name = "workspace"
    if worker is None or worker.report is None or worker.pid is None:
        return _CLEAN(probe=name, detail="never-made")
    # A dead process that a tracer keeps from being reaped has neither memory nor mounts left.
    if worker.poll() is None and _is_alive(kernel, worker.pid):
        return _FOUND(probe=name, detail="worker-still-there")
    if not worker.own_process_namespace and members(worker.pid):
        return _FOUND(probe=name, detail="processes-left")
    if os.path.lexists(worker.named_path):
        return _FOUND(probe=name, detail="files-left")
    if worker.report.workspace is WorkspaceKind.DIRECTORY:
        # It is gone by name; what a disk or a file system keeps of it cannot be seen from here.
        return _UNVERIFIABLE(probe=name, detail="was-on-a-disk" if worker.on_disk else "was-a-directory")
    if mounts.is_memory(kernel.read, worker.report.base) != (False, False):
        return _FOUND(probe=name, detail="mount-left")
    if not worker.own_process_namespace:
        return _UNVERIFIABLE(probe=name, detail="no-process-namespace")
    # The kernel reports the end of a namespace's first process only after it has ended all others.
    return _CLEAN(probe=name, detail=f"{worker.report.workspace.value}-gone")


def probe_shared_memory(
    needles: Iterable[memoryview], *, before: Before, folder: str = shared_files.FOLDER, kernel: Kernel = REAL
) -> Probe:
    """Search the files in shared memory that this run may have written, for needles; none is `unverifiable`, not clean.

    Left out is what was there `before` anything was released: nothing where the worker could map what it did not make.
    """
    name = "shared-memory"
    with closing(Finder(needles, kernel=kernel)) as finder:
        try:
            unsearched = shared_files.search(finder, before, folder)
        except FileNotFoundError:
            return _CLEAN(probe=name, detail="no-shared-memory")
        except OSError:
            unsearched = 1
        if finder.found:
            return _FOUND(probe=name, detail="needle-in-file")
        if unsearched or not finder.needles:
            return _UNVERIFIABLE(probe=name, detail=f"files-not-searched-{unsearched}")
        return _CLEAN(probe=name, detail=f"searched-{finder.searched_bytes >> 10}-KiB")


def probe_swap(*, agent: CheckResult, worker: CheckResult, kernel: Kernel = REAL) -> Probe:
    """Judge whether anything can have reached a swap device, by the `no-swap` checks of both while the run lasted."""
    name = "swap"
    try:
        devices = memory_limits.swap_devices(kernel.read)
    except OSError:
        return _UNVERIFIABLE(probe=name, detail="not-readable")
    if devices <= 0:
        return _CLEAN(probe=name, detail="no-swap")
    if agent is CheckResult.PASSED and worker is CheckResult.PASSED:
        return _CLEAN(probe=name, detail="kept-out-of-swap")
    return _UNVERIFIABLE(probe=name, detail=f"swap-devices-{devices}")


def probe_gpu(worker_pid: int | None, *, devices: Sequence[str] | None = None, library: str = gpus.LIBRARY) -> Probe:
    """Judge whether the worker still holds memory of a GPU, as the driver sees it.

    What the memory held is cleared by the driver before another process gets it; that is not observable.
    """
    name = "gpu-memory"
    if devices is None:
        nodes = os.listdir("/dev")  # noqa: PTH208
        devices = [node for node in nodes if node.startswith("nvidia") or node in ("kfd", "dxg")]
    if not devices:
        return _CLEAN(probe=name, detail="no-gpu")
    try:
        holders = gpus.holders(library)
    except (OSError, AttributeError, ValueError):
        return _UNVERIFIABLE(probe=name, detail="driver-not-asked")
    if worker_pid is not None and worker_pid in holders:
        return _FOUND(probe=name, detail="worker-holds-memory")
    if holders:
        # In a container the driver's process numbers are the machine's: they cannot be distinguished.
        return _UNVERIFIABLE(probe=name, detail=f"other-processes-{len(holders)}")
    return _CLEAN(probe=name, detail="no-process-holds-memory")


def _is_alive(kernel: Kernel, pid: int) -> bool:
    try:
        return Process.parse(kernel.read(f"/proc/{pid}/stat")).lives
    except OSError:
        return False
