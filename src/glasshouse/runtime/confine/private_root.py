"""The worker's file system: a private root in memory that shows it only what it may read.

```
/usr /lib … and the listed paths     bound, read-only
/proc                                its own processes, and nothing of the kernel's memory
/dev                                 null, zero, full, random, urandom, GPUs
/etc                                 made here: it names no machine and no user
/run/glasshouse/work                 the workspace; tmp and shm beside it are /tmp and /dev/shm
/run/glasshouse/probe                readable by mode, covered by no rule: shows that Landlock works
```
The mount belongs to the worker's own mount namespace: it has no name outside, and dies with it.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH102, PTH103, PTH108, PTH112, PTH114, PTH115, PTH120, PTH211
from __future__ import annotations

import mmap
import os
import resource
import stat
from collections.abc import Callable

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import mounts
from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.syscalls import KernelError

BASE = "/run/glasshouse"
WORK, TEMPORARY, SHARED, PROBE = "work", "tmp", "shm", "probe"

# Of /proc: the kernel's memory, addresses and keys, and the words it was started with. Root may open them; empty here.
HIDDEN = (
    "cmdline", "iomem", "ioports", "kallsyms", "kcore", "key-users", "keys", "kmsg", "kpagecgroup", "kpagecount",
    "kpageflags", "latency_stats", "pagetypeinfo", "sched_debug", "slabinfo", "sysrq-trigger", "timer_list",
    "vmallocinfo", "vmcore",
)  # fmt: skip

# Of /proc what changes the machine and is root's: containers are shown it read-only.
_SETTINGS = ("acpi", "bus", "fs", "irq", "scsi", "sys", "sysrq-trigger")

# The note where something was covered: nothing is seen of it.
_COVERED = "covered-remote"
# Where the new root is put together; any directory does, and none outside this namespace is touched.
_SITES = ("/tmp", "/mnt", "/run")  # noqa: S108
_ROOT_BYTES = 4 << 20
_NO_SUID_OR_DEVICE = linux.MS_NOSUID | linux.MS_NODEV
_ETC = {
    "group": "worker:x:{gid}:\n",
    "hosts": "127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "passwd": "worker:x:{uid}:{gid}::" + BASE + "/" + WORK + ":/bin/sh\n",
}
_LINKS = (
    ("dev/fd", "/proc/self/fd"),
    ("dev/stderr", "/proc/self/fd/2"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
)


def build(
    kernel: Kernel,
    *,
    read: list[str],
    devices: list[str],
    workspace_bytes: int,
    process_files: bool = False,
    ranks: bool = False,
) -> None:
    """Put the private root together and move this process into it; the caller has its own mount namespace.

    Paths that do not exist are left out; workspace, /tmp and /dev/shm may hold `workspace_bytes` together. Of /proc
    nothing can be written but, where `process_files` says so, the files of the worker's processes; where others' are in
    sight, those of the threads of this one alone, and where there are ranks, which have no name yet, all of them.

    Raises:
        OSError: it cannot be done here; this process has the root and the working folder that it had.
        RuntimeError: a mount could not be taken back, or the old root not be let go of: this process can only end.
    """
    kernel.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    paths, sources = list[str](), dict[str, int]()
    for path in sorted(set(read)):  # without those that lie inside another
        if not any(mounts.beneath(path, parent) for parent in paths):
            paths.append(path)
    paths += devices
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # A project that is installed where it stands shows each module of its own: that may be many.
        wanted = min(limits[0] + len(paths), limits[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
        # Opened before anything is covered: the site of the new root may hide some of them.
        for path in paths:
            try:
                sources[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
        _assemble(kernel, sources, devices, workspace_bytes, process_files=process_files, ranks=ranks)
    finally:
        for descriptor in sources.values():
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    _umount(kernel, ".")  # the old root, which pivot_root left on top of the new one
    os.chdir("/")


def _assemble(
    kernel: Kernel,
    sources: dict[str, int],
    devices: list[str],
    workspace_bytes: int,
    *,
    process_files: bool,
    ranks: bool,
) -> None:
    site = next(path for path in _SITES if os.path.isdir(path))
    kernel.mount("tmpfs", site, "tmpfs", _NO_SUID_OR_DEVICE, f"mode=755,size={_ROOT_BYTES}")
    try:
        # First what can be written: a path to be shown may lie in /tmp.
        _workspace(kernel, site, workspace_bytes)
        for path, descriptor in sources.items():
            _show(kernel, path, descriptor, site + path, device=path in devices)
        _proc(kernel, site, process_files, ranks)
        _furnish(site)
        kernel.mount("none", site, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | _NO_SUID_OR_DEVICE)
        here = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            os.chdir(site)
            kernel.pivot_root(".", ".")
        except OSError:
            os.chdir(here)
            raise
        finally:
            os.close(here)
    except OSError:
        _umount(kernel, site)
        raise


def cover(kernel: Kernel, folder: str) -> None:
    """Mount an empty folder over one that can be passed through but not looked into; raises `OSError`."""
    kernel.mount("tmpfs", folder, "tmpfs", linux.MS_RDONLY | _NO_SUID_OR_DEVICE | linux.MS_NOEXEC, "mode=555,size=4k")


def cover_remote(
    kernel: Kernel, shown: list[str], *, cover: Callable[[str], None] | None
) -> tuple[list[str], list[str]]:
    """Cover remote file systems that are mounted beneath what a worker is shown, but for what holds `shown` itself.

    `cover` puts something empty over a folder; None where nothing can be mounted. Return notes about what is left, as
    ``shown-remote-nfs4``, none where all is local; and the folders that were covered.
    """
    covered: list[str] = []
    try:
        needed = [os.path.realpath(path) for path in shown]
        for mount in mounts.MountTable.read(kernel.read).uncommon() if cover is not None else ():
            if cover is None or not mount.remote or any(mounts.beneath(path, mount.place) for path in needed):
                continue
            try:
                cover(mount.place)
            except OSError:
                continue  # a single file, or not allowed: it is counted below
            covered.append(mount.place)
        table = mounts.MountTable.read(kernel.read)
    except (OSError, ValueError):
        return [f"shown-remote-{mounts.UNKNOWN}"], covered
    left = table.uncommon()
    notes = {f"shown-remote-{mount.kind}" for mount in left if mount.remote}
    if table.at("/") is None:
        notes.add(f"shown-remote-{mounts.UNKNOWN}")  # an agent in a `chroot`: what its root lies on is in no table
    if any(mount.kind == mounts.OVERLAY for mount in left):
        notes.add("shown-overlay")  # what its layers lie on is not to be seen from here
    return sorted(notes | ({_COVERED} if covered else set())), covered


def _umount(kernel: Kernel, target: str) -> None:
    try:
        kernel.umount(target)
    except OSError as error:
        # Not an OSError: who takes that for a machine without mounts would go on between two roots.
        raise RuntimeError(f"the private root is left half made: {error}") from error


def _show(kernel: Kernel, path: str, descriptor: int, target: str, *, device: bool) -> None:
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path) and path.count("/") == 1:
        os.symlink(os.readlink(path), target)
        return
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    kernel.mount(f"/proc/self/fd/{descriptor}", target, None, linux.MS_BIND | linux.MS_REC)
    # Of a device node this keeps mode, owner and times; it is written to all the same.
    kernel.mount_read_only(target, devices=device)


def processes_alone_are_open() -> bool:
    """Return whether this process could write nothing in /proc but the files of processes; no file is opened."""
    if os.geteuid() != 0:
        return True  # the rest is root's
    closed = [f"/proc/{name}" for name in _SETTINGS if os.path.lexists(f"/proc/{name}")]
    return all(os.statvfs(path).f_flag & os.ST_RDONLY for path in closed)


def _proc(kernel: Kernel, site: str, process_files: bool, ranks: bool) -> None:
    target = site + "/proc"
    os.makedirs(target, mode=0o755, exist_ok=True)
    options = _NO_SUID_OR_DEVICE | linux.MS_NOEXEC
    alone = os.getppid() == 1  # nothing in sight but this sandbox's processes
    try:
        kernel.mount("proc", target, "proc", options | (0 if process_files else linux.MS_RDONLY))
    except KernelError:
        # A container that hides parts of /proc forbids a fresh one; the machine's own then shows more processes.
        kernel.mount("/proc", target, None, linux.MS_BIND | linux.MS_REC)
        alone = False
    if process_files and (alone or ranks):
        # The init's, and all that is there but the folders of processes, beneath which the links lead.
        others = [f"{target}/{name}" for name in os.listdir(target) if name == "1" or not name.isdecimal()]  # noqa: PTH208
        for path in [path for path in others if not os.path.islink(path)]:
            kernel.mount(path, path, None, linux.MS_BIND | linux.MS_REC)
            kernel.mount_read_only(path)
    else:
        kernel.mount_read_only(target)
    if process_files and not (alone or ranks):
        # The keepers' are there too: of the worker's own process alone, as those that it starts have no name yet.
        own = f"{target}/self/task"
        kernel.mount(own, own, None, linux.MS_BIND)
        kernel.mount("none", own, None, linux.MS_REMOUNT | linux.MS_BIND | options)
    nothing = site + "/nothing"
    os.close(os.open(nothing, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    for name in HIDDEN:
        if os.path.lexists(f"{target}/{name}"):
            kernel.mount(nothing, f"{target}/{name}", None, linux.MS_BIND)
            kernel.mount_read_only(f"{target}/{name}")
    os.unlink(nothing)


def _workspace(kernel: Kernel, site: str, workspace_bytes: int) -> None:
    base = site + BASE
    os.makedirs(base, mode=0o755, exist_ok=True)
    # As many names as pages: a file that holds anything takes one. Each name takes memory of the kernel's too.
    options = f"mode=700,size={workspace_bytes},nr_inodes={workspace_bytes // mmap.PAGESIZE}"
    try:
        kernel.mount("tmpfs", base, "tmpfs", _NO_SUID_OR_DEVICE, options + ",noswap")
    except KernelError:  # before Linux 6.4, or in a user namespace
        kernel.mount("tmpfs", base, "tmpfs", _NO_SUID_OR_DEVICE, options)
    lay_out(base)
    for name, place in ((TEMPORARY, "/tmp"), (TEMPORARY, "/var/tmp"), (SHARED, "/dev/shm")):  # noqa: S108
        os.makedirs(site + place, mode=0o755, exist_ok=True)
        kernel.mount(f"{base}/{name}", site + place, None, linux.MS_BIND)


def lay_out(base: str) -> None:
    """Make the directories of a workspace, and the file that Landlock must keep closed."""
    for name in (WORK, TEMPORARY, SHARED):
        os.mkdir(base + "/" + name, 0o700)
    os.close(os.open(base + "/" + PROBE, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _furnish(site: str) -> None:
    for directory in ("/dev", "/etc"):
        os.makedirs(site + directory, mode=0o755, exist_ok=True)
    for name, text in _ETC.items():
        descriptor = os.open(f"{site}/etc/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        os.write(descriptor, text.format(uid=os.getuid(), gid=os.getgid()).encode())
        os.close(descriptor)
    for name, target in _LINKS:
        os.symlink(target, f"{site}/{name}")
