"""What isolation this machine offers a protected run, tried and not guessed.

Law: nothing here changes this process or the machine: what cannot be undone is tried in a child.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable

from glasshouse.attestation.hardening import SecretMemoryKind
from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import core_dumps, landlock, loopback, memory_limits, mounts, seccomp
from glasshouse.runtime.kernel import Kernel, KernelError
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.run.findings import Finding, Standing, finding
from glasshouse.runtime.worker import named_directory, shown_paths
from glasshouse.wire.policy import Profile

__all__ = ["memory_order", "offered", "profile"]

_LEAST_LOCKED_BYTES = 1 << 30
_ALL_NAMESPACES = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
# A workspace that cannot be mounted.
_NAMED = "directory"
# What the worker's filter takes where any of them is missing.
_HALF_ISOLATED = (
    "scripts have no /dev/shm (DataLoader workers, pools), no Unix socket with a name, no session and no --machines"
)


def offered(kernel: Kernel) -> list[Finding]:
    """Try what isolates a run; `profile` derives what it is enough for."""
    workspace = _workspace(kernel)
    return [
        _system(kernel),
        _seccomp(kernel),
        _landlock(kernel),
        _secret_memory(kernel),
        *_namespaces(kernel),
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


def _system(kernel: Kernel) -> Finding:
    known = seccomp.supports(kernel.machine)
    consequence = "this architecture is supported" if known else "no system call filter exists for this architecture"
    value = f"{os.uname().sysname} {os.uname().release} {kernel.machine}"
    return finding("system", Standing.GOOD if known else Standing.MISSING, value, consequence)


def _seccomp(kernel: Kernel) -> Finding:
    if seccomp.supports(kernel.machine) and _works(lambda: _install_filter(kernel)):
        return finding("seccomp", Standing.GOOD, "filters", "the worker's network and debugging calls can be refused")
    return finding("seccomp", Standing.MISSING, "none", "neither profile can be reached: no run is possible here")


def _install_filter(kernel: Kernel) -> None:
    kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(kernel, seccomp.worker(kernel.machine, isolated=False))


def _landlock(kernel: Kernel) -> Finding:
    abi = kernel.landlock_abi()
    works = abi > 0 and _works(lambda: _restricted(kernel))
    if works:
        return finding("landlock", Standing.GOOD, f"abi {abi}", "the worker's files can be limited by the kernel")
    consequence = "strict is out of reach; the worker's files are limited by its private root alone"
    return finding("landlock", Standing.WEAKER, "none", consequence)


def _restricted(kernel: Kernel) -> None:
    kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict(kernel, read=["/usr"], write=[], devices=[], names=[])


def _secret_memory(kernel: Kernel) -> Finding:
    try:
        with SecretMemory(1, kernel=kernel) as memory:
            kind, refused = memory.kind, memory.is_refused_to_readers()
    except OSError:
        kind, refused = SecretMemoryKind.UNLOCKED, False
    if kind is SecretMemoryKind.MEMFD_SECRET and refused:
        consequence = "keys lie where neither other processes nor root read them through the kernel"
        return finding("secret-memory", Standing.GOOD, kind.value, consequence)
    consequence = "strict is out of reach; keys lie in ordinary memory"
    return finding("secret-memory", Standing.WEAKER, kind.value, consequence)


def _namespaces(kernel: Kernel) -> list[Finding]:
    user = _user_namespace(kernel)
    found = []
    for name, flag, without in (
        (
            "mount-namespace",
            linux.CLONE_NEWNS,
            "no private root: a workspace by name, the package in memory, strict is out",
        ),
        ("pid-namespace", linux.CLONE_NEWPID, "the worker sees other processes; its own are ended by their group"),
        ("network-namespace", linux.CLONE_NEWNET, "the network is closed by the system call filter alone"),
        ("ipc-namespace", linux.CLONE_NEWIPC, "others' memory and queues are closed by the system call filter alone"),
        ("uts-namespace", linux.CLONE_NEWUTS, "the machine's name is closed to changes by the filter alone"),
    ):

        def entered(flag: int = flag) -> None:
            kernel.unshare(user | flag)

        works = _works(entered)
        value = "none" if not works else "in a user namespace" if user else "as root"
        consequence = "the worker can have its own" if works else f"{without}; {_HALF_ISOLATED}"
        found.append(finding(name, Standing.GOOD if works else Standing.WEAKER, value, consequence))
    return found


def _ranks(kernel: Kernel) -> Finding:
    def connected() -> None:
        kernel.unshare(_ALL_NAMESPACES | _user_namespace(kernel))
        kernel.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        loopback.raise_up()

    if _works(connected):
        return finding("ranks", Standing.GOOD, "loopback", "ranks (--ranks) can have a network that leads nowhere")
    if seccomp.supports(kernel.machine) and _works(lambda: _install_filter(kernel)):
        consequence = (
            "ranks (--ranks) inherit their connections; a job on several machines (--machines) is refused here"
        )
        return finding("ranks", Standing.WEAKER, "inherited", consequence)
    return finding("ranks", Standing.WEAKER, "none", "a job in several ranks (--ranks) is refused here; others run")


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
        return finding("workspace", Standing.GOOD, "tmpfs-noswap", "the worker's files stay in memory, out of swap")
    if _works(mounted("size=1m")):
        return finding("workspace", Standing.GOOD, "tmpfs", "the worker's files stay in memory, or in swap if there is")
    place = named_directory.largest()
    where = "no memory file system" if place is None else f"{place[0]} ({place[1] / 1e6:.0f} MB free)"
    consequence = f'the worker\'s files get a name in {where}; a job that takes more needs workspace = "disk"'
    return finding("workspace", Standing.WEAKER, _NAMED, consequence)


def _locked_memory(kernel: Kernel) -> Finding:
    def locked() -> None:
        kernel.mlockall(linux.MCL_CURRENT | linux.MCL_FUTURE | linux.MCL_ONFAULT)

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    value = "unlimited" if limit == resource.RLIM_INFINITY else f"limit {limit >> 10} KiB"
    enough = kernel.capable(linux.CAP_IPC_LOCK) or limit == resource.RLIM_INFINITY or limit >= _LEAST_LOCKED_BYTES
    if enough and _works(locked):
        return finding("locked-memory", Standing.GOOD, value, "the agent's memory can be kept out of swap")
    consequence = "strict is out of reach: raise the limit on locked memory (ulimit -l)"
    return finding("locked-memory", Standing.WEAKER, value, consequence)


def _swap(kernel: Kernel) -> Finding:
    try:
        devices = len(kernel.read("/proc/swaps").splitlines()) - 1
    except OSError:
        devices = 0
    if devices <= 0:
        return finding("swap", Standing.GOOD, "none", "nothing reaches a swap device of this system")
    consequence = "plaintext may reach swap: strict needs a control group with memory.swap.max 0"
    return finding("swap", Standing.WEAKER, f"{devices} devices", consequence)


def _tracing(kernel: Kernel) -> Finding:
    try:
        scope = kernel.read("/proc/sys/kernel/yama/ptrace_scope").strip().decode()
    except OSError:
        scope = ""
    consequence = {
        "": "attaching is limited by `dumpable` alone, and watched",
        "0": "attaching is limited by `dumpable` alone, and watched",
        "1": "only parents may attach, and they are watched",
        "2": "only administrators may attach, and they are watched",
        "3": "no process may attach",
    }.get(scope, "unknown to this version")
    return finding("ptrace-scope", Standing.NOTE, scope or "not offered", consequence)


def _core_dumps(kernel: Kernel) -> Finding:
    def closed() -> None:
        core_dumps.limit()
        if not core_dumps.closed(kernel, resource.getrlimit(resource.RLIMIT_CORE)):
            raise OSError

    if _works(closed):
        return finding("core-dumps", Standing.GOOD, "none", "a script that crashes leaves no dump of its memory")
    consequence = (
        "a run is refused: kernel.core_pattern hands the memory of a script that crashes to a socket or program, "
        "whatever the limit, or cannot be read; set it to the name of a file, as core"
    )
    return finding("core-dumps", Standing.MISSING, "taken", consequence)


def _crashes(kernel: Kernel) -> Finding:
    if core_dumps.crashes_are_logged(kernel):
        consequence = "a script can leave two lines a second in the kernel's log; debug.exception-trace = 0 ends it"
        return finding("crash-log", Standing.NOTE, "on", consequence)
    return finding("crash-log", Standing.NOTE, "off", "a script that crashes leaves nothing in the kernel's log")


def _processes(kernel: Kernel) -> Finding:
    if not _works(lambda: _seen(kernel)):
        consequence = (
            "a run is refused: /proc hides its own processes from it; mount it with gid= a group of the agent's"
        )
        return finding("process-list", Standing.MISSING, "hidden", consequence)
    if mounts.processes_are_visible(kernel):
        consequence = "other users read command lines of a script's processes; /proc with hidepid=2,gid=AGENT's ends it"
        return finding("process-list", Standing.NOTE, "open", consequence)
    consequence = "other users of this system read no command line of a script's; from outside of a container they may"
    return finding("process-list", Standing.NOTE, "hidden", consequence)


def _seen(kernel: Kernel) -> None:
    """See a process of the same user's that is not dumpable, without capabilities, as the sentinel does."""
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


def _shown_files(kernel: Kernel, *, all_in_sight: bool) -> Finding:
    try:
        table = mounts.Table.read(kernel)
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
        return finding("shown-files", Standing.WEAKER, ", ".join(sorted(kinds)), consequence)
    consequence = "names that a script looks up stay in this kernel"
    if layered:
        consequence += ", if the layers of its overlays are local too, which cannot be seen from here"
    return finding("shown-files", Standing.GOOD, "overlay" if layered else "local", consequence)


def profile(offered: list[Finding]) -> Finding:
    """Return which hardening profile is within reach, from what `offered` returned."""
    standings = {one.standing for one in offered}
    lacking = {one.feature for one in offered if one.standing is not Standing.GOOD}
    # A worker's files are kept closed by Landlock, or by a root and a view of processes of its own.
    open_files = "landlock" in lacking and lacking & {"mount-namespace", "pid-namespace", "workspace"}
    if Standing.MISSING in standings or open_files:
        return finding("profile", Standing.MISSING, Profile.OFF.value, "a protected run is refused here")
    # Without these strict still holds: other means answer the same check, or a job of one process needs none.
    spare = {"ipc-namespace", "network-namespace", "pid-namespace", "ranks", "uts-namespace"}
    weaker = sorted(
        found.feature for found in offered if found.standing is Standing.WEAKER and found.feature not in spare
    )
    if weaker:
        consequence = "strict is out of reach for want of: " + ", ".join(weaker)
        return finding("profile", Standing.WEAKER, Profile.STANDARD.value, consequence)
    return finding("profile", Standing.GOOD, Profile.STRICT.value, "both profiles should hold; each run observes anew")


def memory_order(kernel: Kernel) -> Finding:
    """Try whether the worker can be the first that the kernel ends where memory runs out; no profile needs it."""

    def lowered() -> None:
        memory_limits.lower(kernel)
        if not memory_limits.is_low(kernel):
            raise OSError

    lost = "where memory runs out, the kernel may end the runtime too: no receipt, and a workspace with a name stays"
    if memory_limits.ends_together():
        consequence = f"{lost}; have memory.oom.group cleared (Kubernetes: singleProcessOOMKill)"
        return finding("memory-order", Standing.WEAKER, "together", consequence)
    if _works(lowered):
        return finding("memory-order", Standing.GOOD, "worker first", "where memory runs out, a run ends in order")
    consequence = f"{lost}; give the container CAP_SYS_RESOURCE, or request as much memory as its limit (Guaranteed)"
    return finding("memory-order", Standing.WEAKER, "unordered", consequence)


def _works(step: Callable[[], None]) -> bool:
    """Try something that cannot be undone, in a child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            step()
            code = 0
        except (KernelError, OSError):
            code = 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
