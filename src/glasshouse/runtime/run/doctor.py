"""What this machine offers a protected run, tried and not guessed, and what its host could still see.

Law: nothing here changes this process or the machine: what cannot be undone is tried in a child.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from glasshouse.attestation.claims import SecretMemoryKind
from glasshouse.runtime import gpus
from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import core_dumps, landlock, loopback, memory_limits, mounts, seccomp
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.run.findings import Finding, Standing, assurance, equipment, roots
from glasshouse.runtime.worker import named_directory, shown_paths
from glasshouse.wire.policy import Profile

_ALL_NAMESPACES = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
_NAMED = "directory"  # a workspace that cannot be mounted
_NAMESPACES = (
    ("mount", linux.CLONE_NEWNS, "no private root: a workspace by name, the package in memory, strict is out"),
    ("pid", linux.CLONE_NEWPID, "the worker sees other processes; its own are ended by their group"),
    ("network", linux.CLONE_NEWNET, "the network is closed by the system call filter alone"),
    ("ipc", linux.CLONE_NEWIPC, "others' memory and queues are closed by the system call filter alone"),
    ("uts", linux.CLONE_NEWUTS, "the machine's name is closed to changes by the filter alone"),
)
# What the worker's filter takes where any of them is missing.
_HALF_ISOLATED = (
    "scripts have no /dev/shm (DataLoader workers, pools), no Unix socket with a name, no session and no --machines"
)


def examine(
    kernel: Kernel = REAL, *, devices: Path = Path("/dev"), library: str = gpus.LIBRARY, place: Path = Path()
) -> list[Finding]:
    """Look at this machine, and at `place`, where packages and outputs would lie; takes some milliseconds."""
    workspace = _workspace(kernel)
    offered = [
        _system(kernel),
        _seccomp(kernel),
        _landlock(kernel),
        _secret_memory(kernel),
        *(_namespace(kernel, *one) for one in _NAMESPACES),
        _ranks(kernel),
        workspace,
        _locked_memory(kernel),
        _swap(kernel),
        _tracing(kernel),
        _core_dumps(kernel),
        _crashes(kernel),
        _processes(kernel),
        _shown_files(kernel, all_in_sight=workspace.value == _NAMED),
    ]
    hardware = roots(devices)
    return [
        *offered,
        _profile(offered),
        *hardware,
        *equipment(kernel, devices=devices, library=library, place=place),
        _memory_order(kernel),
        *assurance(hardware),
    ]


def _either(
    feature: str, works: bool, good: tuple[str, str], bad: tuple[str, str], *, worse: Standing = Standing.WEAKER
) -> Finding:
    """Return one of two findings, each a value and a consequence."""
    return Finding(feature, Standing.GOOD, *good) if works else Finding(feature, worse, *bad)


def _system(kernel: Kernel) -> Finding:
    value = f"{os.uname().sysname} {os.uname().release} {kernel.machine}"
    good, bad = "this architecture is supported", "no system call filter exists for this architecture"
    return _either("system", seccomp.supports(kernel.machine), (value, good), (value, bad), worse=Standing.MISSING)


def _seccomp(kernel: Kernel) -> Finding:
    return _either(
        "seccomp",
        _filters(kernel),
        ("filters", "the worker's network and debugging calls can be refused"),
        ("none", "neither profile can be reached: no run is possible here"),
        worse=Standing.MISSING,
    )


def _filters(kernel: Kernel) -> bool:
    def filtered() -> None:
        kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        kernel.seccomp(seccomp.worker(kernel.machine, isolated=False))

    return _works(filtered)


def _landlock(kernel: Kernel) -> Finding:
    def restricted() -> None:
        kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(kernel, read=["/usr"], write=[], devices=[], names=[])

    abi = kernel.landlock_abi()
    return _either(
        "landlock",
        abi > 0 and _works(restricted),
        (f"abi {abi}", "the worker's files can be limited by the kernel"),
        ("none", "strict is out of reach; the worker's files are limited by its private root alone"),
    )


def _secret_memory(kernel: Kernel) -> Finding:
    try:
        with closing(SecretMemory(1, kernel=kernel)) as memory:
            kind, refused = memory.kind, memory.is_refused_to_readers()
    except OSError:
        kind, refused = SecretMemoryKind.UNLOCKED, False
    return _either(
        "secret-memory",
        kind is SecretMemoryKind.MEMFD_SECRET and refused,
        (kind.value, "keys lie where neither other processes nor root read them through the kernel"),
        (kind.value, "strict is out of reach; keys lie in ordinary memory"),
    )


def _namespace(kernel: Kernel, name: str, flag: int, without: str) -> Finding:
    user = _user_namespace(kernel)
    return _either(
        f"{name}-namespace",
        _works(lambda: kernel.unshare(user | flag)),
        ("in a user namespace" if user else "as root", "the worker can have its own"),
        ("none", f"{without}; {_HALF_ISOLATED}"),
    )


def _ranks(kernel: Kernel) -> Finding:
    def connected() -> None:
        kernel.unshare(_ALL_NAMESPACES | _user_namespace(kernel))
        kernel.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        loopback.raise_up()

    if _works(connected):
        return Finding("ranks", Standing.GOOD, "loopback", "ranks (--ranks) can have a network that leads nowhere")
    value, consequence = "none", "a job in several ranks (--ranks) is refused here; others run"
    if _filters(kernel):
        value = "inherited"
        consequence = "ranks (--ranks) inherit connections; a job on several machines (--machines) is refused here"
    return Finding("ranks", Standing.WEAKER, value, consequence)


def _user_namespace(kernel: Kernel) -> int:
    """Return the flag that a process without CAP_SYS_ADMIN needs for any other namespace."""
    return 0 if kernel.capable(linux.CAP_SYS_ADMIN) else linux.CLONE_NEWUSER


def _workspace(kernel: Kernel) -> Finding:
    def mounted(options: str) -> Callable[[], None]:
        def step() -> None:
            kernel.unshare(linux.CLONE_NEWNS | _user_namespace(kernel))
            kernel.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
            kernel.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)  # noqa: S108

        return step

    if _works(mounted("size=1m,noswap")):
        return Finding("workspace", Standing.GOOD, "tmpfs-noswap", "the worker's files stay in memory, out of swap")
    if _works(mounted("size=1m")):
        return Finding("workspace", Standing.GOOD, "tmpfs", "the worker's files stay in memory, or in swap if there is")
    place = named_directory.largest()
    where = "no memory file system" if place is None else f"{place[0]} ({place[1] / 1e6:.0f} MB free)"
    consequence = f'the worker\'s files get a name in {where}; a job that takes more needs workspace = "disk"'
    return Finding("workspace", Standing.WEAKER, _NAMED, consequence)


def _locked_memory(kernel: Kernel) -> Finding:
    def locked() -> None:
        kernel.mlockall(linux.MCL_CURRENT | linux.MCL_FUTURE | linux.MCL_ONFAULT)

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    value = "unlimited" if limit == resource.RLIM_INFINITY else f"limit {limit >> 10} KiB"
    return _either(
        "locked-memory",
        kernel.may_lock(limit) and _works(locked),
        (value, "the agent's memory can be kept out of swap"),
        (value, "strict is out of reach: raise the limit on locked memory (ulimit -l)"),
    )


def _swap(kernel: Kernel) -> Finding:
    try:
        devices = memory_limits.swap_devices(kernel.read)
    except OSError:
        devices = 0
    return _either(
        "swap",
        devices <= 0,
        ("none", "nothing reaches a swap device of this system"),
        (f"{devices} devices", "plaintext may reach swap: strict needs a control group with memory.swap.max 0"),
    )


def _tracing(kernel: Kernel) -> Finding:
    try:
        scope = kernel.read("/proc/sys/kernel/yama/ptrace_scope").strip().decode()
    except OSError:
        scope = "not offered"
    by_dumpable = "attaching is limited by `dumpable` alone, and watched"
    consequence = {
        "not offered": by_dumpable,
        "0": by_dumpable,
        "1": "only parents may attach, and they are watched",
        "2": "only administrators may attach, and they are watched",
        "3": "no process may attach",
    }.get(scope, "unknown to this version")
    return Finding("ptrace-scope", Standing.NOTE, scope, consequence)


def _core_dumps(kernel: Kernel) -> Finding:
    def closed() -> None:
        core_dumps.limit()
        if not core_dumps.closed(kernel, resource.getrlimit(resource.RLIMIT_CORE)):
            raise OSError

    bad = (
        "a run is refused: kernel.core_pattern hands the memory of a script that crashes to a socket or program, "
        "whatever the limit, or cannot be read; set it to the name of a file, as core"
    )
    good = "a script that crashes leaves no dump of its memory"
    return _either("core-dumps", _works(closed), ("none", good), ("taken", bad), worse=Standing.MISSING)


def _crashes(kernel: Kernel) -> Finding:
    if core_dumps.crashes_are_logged(kernel):
        consequence = "a script can leave two lines a second in the kernel's log; debug.exception-trace = 0 ends it"
        return Finding("crash-log", Standing.NOTE, "on", consequence)
    return Finding("crash-log", Standing.NOTE, "off", "a script that crashes leaves nothing in the kernel's log")


def _processes(kernel: Kernel) -> Finding:
    def seen() -> None:
        """See a process of the same user's that is not dumpable, without capabilities, as the watchdog does."""
        kernel.drop_capabilities()
        kernel.prctl(linux.PR_SET_DUMPABLE, 0)
        child = os.fork()  # not dumpable either
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            kernel.status(child)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    if not _works(seen):
        consequence = "a run is refused: /proc hides its own processes; mount it with gid= a group of the agent's"
        return Finding("process-list", Standing.MISSING, "hidden", consequence)
    if mounts.processes_are_visible(kernel.read):
        consequence = "other users read command lines of a script's processes; /proc with hidepid=2,gid=AGENT's ends it"
        return Finding("process-list", Standing.NOTE, "open", consequence)
    consequence = "other users of this system read no command line of a script's; from outside of a container they may"
    return Finding("process-list", Standing.NOTE, "hidden", consequence)


def _shown_files(kernel: Kernel, *, all_in_sight: bool) -> Finding:
    try:
        table = mounts.MountTable.read(kernel.read)
        kinds = table.remote_at([*shown_paths.default_read_paths(), *shown_paths.default_devices()])
        uncommon = table.uncommon()
        if all_in_sight:  # without mounts a worker keeps the machine's root, and all that is mounted in it
            kinds |= {mount.kind for mount in uncommon if mount.remote}
        layered = any(mount.kind == mounts.OVERLAY for mount in uncommon)
    except (OSError, ValueError):
        kinds, layered = {mounts.UNKNOWN}, False
    if kinds:
        consequence = (
            "strict is out of reach: the file system's server sees each name that a script looks up there; put the "
            "interpreter, its environment and the model cache on a local disk"
        )
        if all_in_sight:
            consequence += "; without mounts nothing can be covered, and every share of this machine counts"
        return Finding("shown-files", Standing.WEAKER, ", ".join(sorted(kinds)), consequence)
    consequence = "names that a script looks up stay in this kernel"
    if layered:
        consequence += ", if the layers of its overlays are local too, which cannot be seen from here"
    return Finding("shown-files", Standing.GOOD, "overlay" if layered else "local", consequence)


def _profile(offered: list[Finding]) -> Finding:
    """Return which hardening profile is within reach."""
    lacking = {one.feature for one in offered if one.standing is not Standing.GOOD}
    # A worker's files are kept closed by Landlock, or by a root and a view of processes of its own.
    open_files = "landlock" in lacking and lacking & {"mount-namespace", "pid-namespace", "workspace"}
    if open_files or any(one.standing is Standing.MISSING for one in offered):
        return Finding("profile", Standing.MISSING, Profile.OFF.value, "a protected run is refused here")
    # Without these strict still holds: other means answer the same check, or a job of one process needs none.
    spare = {"ipc-namespace", "network-namespace", "pid-namespace", "ranks", "uts-namespace"}
    weaker = sorted({one.feature for one in offered if one.standing is Standing.WEAKER} - spare)
    return _either(
        "profile",
        not weaker,
        (Profile.STRICT.value, "both profiles should hold; each run observes anew"),
        (Profile.STANDARD.value, "strict is out of reach for want of: " + ", ".join(weaker)),
    )


def _memory_order(kernel: Kernel) -> Finding:
    """Try whether the worker can be the first that the kernel ends where memory runs out; no profile needs it."""

    def lowered() -> None:
        memory_limits.lower(kernel.read)
        if not memory_limits.is_low(kernel.read):
            raise OSError

    lost = "where memory runs out, the kernel may end the runtime too: no receipt, and a workspace with a name stays"
    if memory_limits.ends_together():
        consequence = f"{lost}; have memory.oom.group cleared (Kubernetes: singleProcessOOMKill)"
        return Finding("memory-order", Standing.WEAKER, "together", consequence)
    consequence = f"{lost}; give the container CAP_SYS_RESOURCE, or request as much memory as its limit (Guaranteed)"
    good = "worker first", "where memory runs out, a run ends in order"
    return _either("memory-order", _works(lowered), good, ("unordered", consequence))


def _works(step: Callable[[], None]) -> bool:
    """Try something that cannot be undone, in a child."""
    pid = os.fork()
    if pid == 0:
        try:
            step()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
