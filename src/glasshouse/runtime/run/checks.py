"""What is observed of the hardening of agent and worker.

Laws: an observation never asks what was set. It is read back from the kernel (/proc, prctl, limits), or the
forbidden thing is tried, by this process or by another. What the kernel does not offer is `unavailable`.
Every function here answers exactly the names of `attestation.claims.CHECKS`.
"""

from __future__ import annotations

import errno
import os
import resource
import sys

from glasshouse.attestation.claims import CheckResult, SecretMemoryKind, WorkspaceKind
from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import core_dumps, memory_limits, mounts, seccomp
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.spawn import DEBUGGING, foreign_libraries
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.watchdog.watchdog import Watchdog
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.runtime.worker.shown_paths import default_read_paths

_PASSED, _FAILED, _UNAVAILABLE = CheckResult.PASSED, CheckResult.FAILED, CheckResult.UNAVAILABLE
_NO_SUCH_KEYCTL = 9999
# What the loader and libraries saw when this process began; removing a variable later undoes nothing.
_STARTED_WITH = tuple(os.environ)
# What the worker's launcher tries from inside its sandbox.
_TRIED_INSIDE = ("debug-env-clean", "egress-closed", "landlock", "metadata-closed", "preload-clean", "seccomp-filter")
_MAX_DETAILS = 31  # and one that the lifecycle may add


def observe_agent(
    *, kernel: Kernel = REAL, watchdog: Watchdog | None, secret: SecretMemory | None
) -> dict[str, CheckResult]:
    """Observe this process, and try a reader on the secret memory in use; None fails `watched`, or `secret-memory`."""
    names = [*_STARTED_WITH, *os.environ]
    return {
        "core-limit-zero": _passed(core_dumps.closed(kernel, resource.getrlimit(resource.RLIMIT_CORE))),
        "debug-env-clean": _passed(set(DEBUGGING).isdisjoint(names) and _interpreter_is_plain()),
        "memory-locked": _memory_locked(kernel),
        "no-swap": _no_swap(kernel, os.getpid(), locked=_memory_locked(kernel)),
        "not-dumpable": _agent_not_dumpable(kernel, watchdog),
        "preload-clean": _passed(not foreign_libraries(kernel.read, names) and not _foreign_libraries(kernel)),
        "seccomp-filter": _agent_filter(kernel),
        "secret-memory": _secret(secret),
        "watched": _passed(watchdog is not None and watchdog.watching()),
        **_threads(kernel, os.getpid()),
    }


def observe_worker(
    worker: Worker, *, kernel: Kernel = REAL, watchdog: Watchdog | None, secret: SecretMemory | None
) -> dict[str, CheckResult]:
    """Observe the worker, and the init above it, once it is ready, and again before it is given anything.

    It is confirmed, and what its launcher tried is in its report; `secret` is of the kind that it will be given.
    """
    pid, report = worker.pid, worker.report
    if pid is None or report is None:
        raise ValueError("a worker that is not confirmed")
    tried = {name: report.observed.get(name, _UNAVAILABLE) for name in _TRIED_INSIDE}
    both = [pid] if worker.init_pid is None else [pid, worker.init_pid]
    if any(_over_threads(kernel, one, "Seccomp") != {"2"} for one in both):
        # Read back after the exec: what the launcher saw of itself must still hold.
        tried["seccomp-filter"] = _worse(tried["seccomp-filter"], _FAILED)
    observed = {
        **tried,
        "core-limit-zero": _passed(all(core_dumps.closed(kernel, _core_limit(one)) for one in both)),
        "no-swap": _no_swap(kernel, pid, locked=_UNAVAILABLE),
        "not-dumpable": _not_dumpable(kernel, pid, watchdog),
        "secret-memory": _secret(secret),
        "watched": _passed(watchdog is not None and watchdog.watching(pid)),
        "workspace-in-memory": _UNAVAILABLE if report.workspace is WorkspaceKind.DIRECTORY else _PASSED,
        **_threads(kernel, pid),
    }
    for one in both[1:]:
        above = {"not-dumpable": _not_dumpable(kernel, one, watchdog), **_threads(kernel, one)}
        observed |= {name: _worse(observed[name], result) for name, result in above.items()}
    return observed


def details(worker: Worker, kernel: Kernel = REAL) -> dict[str, str | int]:
    """Return small facts about the machine for `HardeningReport.details`."""
    found: dict[str, str | int] = {"kernel": os.uname().release[:64], "landlock-abi": kernel.landlock_abi()}
    if core_dumps.crashes_are_logged(kernel):
        found["crashes-logged"] = 1
    if mounts.processes_are_visible(kernel.read):
        found["processes-visible"] = 1
    notes = worker.report.notes if worker.report is not None else ()
    return found | {note: 1 for note in notes[: _MAX_DETAILS - len(found)] if not note.startswith("landlock-abi")}


def _passed(held: bool) -> CheckResult:
    return _PASSED if held else _FAILED


def _worse(one: CheckResult, other: CheckResult) -> CheckResult:
    return one if one is not _PASSED else other


def _threads(kernel: Kernel, pid: int) -> dict[str, CheckResult]:
    found = {}
    for check, field, value in (("no-new-privs", "NoNewPrivs", "1"), ("not-traced", "TracerPid", "0")):
        held = _over_threads(kernel, pid, field)
        found[check] = _UNAVAILABLE if None in held else _passed(held == {value})
    return found


def _over_threads(kernel: Kernel, pid: int, field: str) -> set[str | None]:
    """Return what a field of the status of all threads holds: None where it is not, nothing of a process that ended."""
    try:
        return {kernel.status(pid, thread).get(field) for thread in kernel.threads(pid)}
    except OSError:
        return set()


def _agent_filter(kernel: Kernel) -> CheckResult:
    modes = _over_threads(kernel, os.getpid(), "Seccomp")
    if modes == {None} or not seccomp.supports(kernel.machine):
        return _UNAVAILABLE
    if modes != {"2"}:
        return _FAILED
    # Without a filter the first of these fails as there is no such command, and the second succeeds or not.
    for name, arguments in (("keyctl", (_NO_SUCH_KEYCTL,)), ("io_uring_setup", (1, bytes(120)))):
        try:
            kernel.call(name, *arguments)
        except KernelError as error:
            if error.errno == errno.EPERM:
                continue
        return _FAILED
    return _PASSED


def _agent_not_dumpable(kernel: Kernel, watchdog: Watchdog | None) -> CheckResult:
    try:
        if kernel.prctl(linux.PR_GET_DUMPABLE) != 0:
            return _FAILED
    except KernelError:
        return _UNAVAILABLE
    return _not_dumpable(kernel, os.getpid(), watchdog)


def _not_dumpable(kernel: Kernel, pid: int, watchdog: Watchdog | None) -> CheckResult:
    """Observe from outside that a process is not dumpable.

    For a user other than root the kernel itself shows it: the files of /proc/PID belong to root. For root they
    always do; there the watchdog, root without a capability, tries to open one and must be refused. The worker
    has no more capabilities than the watchdog, so that nothing but the flag refuses it. The agent may have more,
    which would refuse it too: `_agent_not_dumpable` therefore reads its own flag first. Root with
    CAP_SYS_PTRACE is refused by neither, nor is the same user where the worker is in a user namespace.
    """
    try:
        user = int(kernel.status(pid)["Uid"].split()[1])
        if user != 0:
            return _passed(os.stat(f"/proc/{pid}/environ").st_uid != user)  # noqa: PTH116
    except (OSError, KeyError):
        return _FAILED
    refused = None if watchdog is None else watchdog.refuses_readers(pid)
    return _UNAVAILABLE if refused is None else _passed(refused)


def _core_limit(pid: int) -> tuple[int, int]:
    """Return soft and hard limit of a process; -1 where it is not limited, or cannot be read."""
    try:
        return resource.prlimit(pid, resource.RLIMIT_CORE)
    except OSError:
        return -1, -1


def _memory_locked(kernel: Kernel) -> CheckResult:
    """Return whether every writable page of this process is locked (`lo` among the flags of its mapping)."""
    try:
        text = kernel.read("/proc/self/smaps")
    except OSError:
        return _UNAVAILABLE
    private = False
    for line in text.splitlines():
        if line.startswith(b"VmFlags:"):
            if private and b" lo" not in line:
                return _FAILED if kernel.may_lock() else _UNAVAILABLE
        elif b"-" in line.split(b" ", 1)[0]:
            # Shared mappings are secret memory, which is locked by its nature, or hold no secret.
            private = b" rw-p " in line
    return _PASSED


def _no_swap(kernel: Kernel, pid: int, *, locked: CheckResult) -> CheckResult:
    """Return whether memory of a process stays off swap devices: there is none, its group may not, or all is locked."""
    try:
        if memory_limits.swap_devices(kernel.read) <= 0:
            return _PASSED
    except OSError:
        return _UNAVAILABLE
    if locked is _PASSED:
        return _PASSED
    try:
        for line in kernel.read(f"/proc/{pid}/cgroup").decode().splitlines():
            if line.startswith("0::"):
                limit = kernel.read(f"/sys/fs/cgroup{line[3:].rstrip('/')}/memory.swap.max")
                return _passed(limit.strip() == b"0")
    except OSError:
        pass
    return _FAILED


def _secret(secret: SecretMemory | None) -> CheckResult:
    if secret is None:
        return _FAILED
    if secret.kind is not SecretMemoryKind.MEMFD_SECRET:
        return _UNAVAILABLE
    return _passed(secret.is_refused_to_readers())


def _interpreter_is_plain() -> bool:
    """Return whether this interpreter ignores the environment and no Python code in it is traced."""
    watched = sys.gettrace() is not None or sys.getprofile() is not None
    debuggers = {"bdb", "debugpy", "pydevd"} & sys.modules.keys()
    return bool(sys.flags.isolated) and bool(sys.flags.dont_write_bytecode) and not watched and not debuggers


def _foreign_libraries(kernel: Kernel) -> bool:
    """Return whether an executable mapping is of a file that is neither the interpreter's nor the system's."""
    prefixes = tuple(path.rstrip("/") + "/" for path in default_read_paths())
    mappings = [line.split(None, 5) for line in kernel.read("/proc/self/maps").decode().splitlines()]
    files = [fields[5] for fields in mappings if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/")]
    return not all(path.startswith(prefixes) for path in files)
