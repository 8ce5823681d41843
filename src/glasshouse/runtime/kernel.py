"""Linux, behind one object: every system call that Python does not offer, and the reading of /proc.

Laws: a call either succeeds or raises `KernelError` with the errno; nothing here decides what a
missing feature means. Tests stand in for a kernel that lacks something by subclassing `Kernel`.
Imports are few on purpose: the launcher starts without compiled bytecode.
"""

from __future__ import annotations

# The C module beneath `signal`, which costs 40 ms to import without compiled bytecode.
import _signal  # type: ignore[import-not-found]
import ctypes
import errno
import mmap
import os
import resource
import time

from glasshouse.runtime import syscalls
from glasshouse.runtime.syscalls import KernelError

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47

CAP_DAC_OVERRIDE, CAP_IPC_LOCK, CAP_SYS_ADMIN = 1, 14, 21

MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4
MADV_DONTDUMP = 16
# Below this, a process whose every page is locked would run out of memory in the middle of its work.
_LEAST_LOCKABLE_BYTES = 1 << 30

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_SECCOMP_SET_MODE_FILTER = 1
# Without the second, kernels before 5.16 switch on a speculation mitigation that slows training and protects only
# code that runs untrusted code in its own process.
SECCOMP_TSYNC, SECCOMP_SPEC_ALLOW, NEW_LISTENER = 1, 4, 8
_LANDLOCK_CREATE_RULESET_VERSION = 1
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_PR_CAP_AMBIENT_CLEAR_ALL = 4
# Root's uid gives no capability on exec, and this cannot be taken back: NOROOT and its lock.
_SECUREBITS = 0b11


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class Kernel:
    """The kernel that this process runs on."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memmem = self._libc.memmem
        self._memmem.restype = ctypes.c_void_p
        self._memmem.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
        self.machine = os.uname().machine

    def call(self, name: str, *arguments: int | bytes | None) -> int:
        """Make a raw system call; raises `KernelError`: the call failed, or this architecture has no such call.

        Args:
            name: a name of `syscalls`.
            arguments: integers, pointers as integers, byte strings as pointers to them.
        """
        number = syscalls.number(name, self.machine)
        if number is None:
            raise KernelError(name, errno.ENOSYS)
        words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
        return self._checked(name, self._libc.syscall(ctypes.c_long(number), *words))

    def prctl(self, option: int, value: int = 0) -> int:
        """Make a prctl call; raises `KernelError`, as every method here."""
        words = [ctypes.c_ulong(word) for word in (value, 0, 0, 0)]
        return self._checked("prctl", self._libc.prctl(option, *words))

    def memfd_secret(self) -> int:
        """Return a descriptor for memory that the kernel itself does not map; closed on exec."""
        return self.call("memfd_secret", os.O_CLOEXEC)

    def mlockall(self, flags: int) -> None:
        """Lock the pages of this process in memory."""
        self._checked("mlockall", self._libc.mlockall(flags))

    def mlock(self, address: int, length: int) -> None:
        """Lock a range of addresses in memory."""
        self._checked("mlock", self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)))

    def madvise(self, address: int, length: int, advice: int) -> None:
        """Advise the kernel about a range of addresses."""
        self._checked("madvise", self._libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice))

    def mincore(self, address: int, length: int) -> bytes:
        """Return a byte for each page, 1 when it is in memory and else 0, as also for a page in swap."""
        pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        self._checked("mincore", self._libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages))
        return pages.raw

    def process_vm_readv(self, pid: int, remote: int, length: int, destination: int) -> int:
        """Copy memory of a process to the address `destination` here, and return how many bytes came."""
        there, here = _Iovec(remote, length), _Iovec(destination, length)
        words = (ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
        return self.call("process_vm_readv", pid, *words)

    def memmem(self, haystack: int, length: int, needle: int, needle_length: int) -> int | None:
        """Return the address of the first occurrence, or None. Not a system call; libc's search copies nothing."""
        return self._memmem(haystack, length, needle, needle_length)  # type: ignore[no-any-return]

    def seccomp(self, program: bytes, flags: int = SECCOMP_TSYNC | SECCOMP_SPEC_ALLOW) -> int:
        """Install a BPF filter (8 bytes an instruction), in every thread, for good; needs no_new_privs.

        With `NEW_LISTENER`, and without `SECCOMP_TSYNC`, return the descriptor by which waiting calls are answered.
        """
        description = _FilterProgram(len(program) // 8, program)
        return self.call("seccomp", _SECCOMP_SET_MODE_FILTER, flags, ctypes.addressof(description))

    def landlock_abi(self) -> int:
        """Return the version of Landlock that this kernel offers; 0 for none."""
        try:
            return self.call("landlock_create_ruleset", 0, 0, _LANDLOCK_CREATE_RULESET_VERSION)
        except KernelError:
            return 0

    def drop_capabilities(self, keep: tuple[int, ...] = ()) -> None:
        """Give up every capability but those of `keep`, also those that an exec as root would bring back."""
        kept = self._capabilities(b"CapPrm:") & sum(1 << capability for capability in keep)
        for capability in range(_LAST_CAPABILITY + 1):
            try:
                if self.prctl(PR_CAPBSET_READ, capability):
                    self.prctl(PR_CAPBSET_DROP, capability)
            except KernelError as error:
                # Past the last capability that this kernel has; or without CAP_SETPCAP, where the bounding set stays:
                # no_new_privs keeps it from mattering.
                if error.errno not in (errno.EINVAL, errno.EPERM):
                    raise
                break
        for step in ((PR_SET_SECUREBITS, _SECUREBITS), (PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)):
            try:
                self.prctl(*step)
            except KernelError as error:
                if error.errno not in (errno.EPERM, errno.EINVAL):
                    raise
        header = _CAPABILITY_VERSION_3.to_bytes(4, "little") + bytes(4)
        low, high = (kept & 0xFFFFFFFF).to_bytes(4, "little"), (kept >> 32).to_bytes(4, "little")
        self.call("capset", header, low + low + bytes(4) + high + high + bytes(4))

    def capable(self, capability: int) -> bool:
        """Return whether this process has a capability in effect."""
        return bool(self._capabilities(b"CapEff:") >> capability & 1)

    def may_lock(self, limit: int | None = None) -> bool:
        """Return whether this process may lock as much memory as it needs; by default within its soft limit."""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
        return limit == resource.RLIM_INFINITY or limit >= _LEAST_LOCKABLE_BYTES or self.capable(CAP_IPC_LOCK)

    def _capabilities(self, which: bytes) -> int:
        lines = self.read("/proc/self/status").splitlines()
        return next((int(line.split()[1], 16) for line in lines if line.startswith(which)), 0)

    def unshare(self, flags: int) -> None:
        """Enter new namespaces."""
        self.call("unshare", flags)

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        """Mount a file system, or bind or change one."""
        words = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
        result = self._libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
        self._checked(f"mount {target}", result)

    def mount_read_only(self, target: str, *, devices: bool = False) -> None:
        """Make a mount and all beneath it read-only and without set-uid files."""
        flags = _READ_ONLY & ~MOUNT_ATTR_NODEV if devices else _READ_ONLY
        attributes = flags.to_bytes(8, "little") + bytes(24)
        self.call("mount_setattr", _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, len(attributes))

    def read_only_view(self, path: str) -> int:
        """Open a file for reading, through a mount of its own that is read-only and has no name; raises `OSError`.

        No call on the descriptor changes anything of the file, not even its owner's; needs a mount namespace.
        """
        tree = self.call("open_tree", _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC)
        try:
            attributes = _READ_ONLY.to_bytes(8, "little") + bytes(24)
            self.call("mount_setattr", tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))
            return os.open(f"/proc/self/fd/{tree}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(tree)

    def umount(self, target: str) -> None:
        """Detach a mount."""
        self._checked(f"umount {target}", self._libc.umount2(os.fsencode(target), MNT_DETACH))

    def pivot_root(self, new: str, old: str) -> None:
        """Exchange the root of this mount namespace."""
        self.call("pivot_root", os.fsencode(new), os.fsencode(old))

    def read(self, path: str) -> bytes:
        """Return the whole of a file that the kernel makes up (/proc, /sys); raises `OSError`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pieces = []
            while piece := os.read(descriptor, 1 << 16):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(descriptor)

    def status(self, pid: int | str, thread: int | None = None) -> dict[str, str]:
        """Return /proc/PID/status, or that of one of its threads, as name → text; raises `OSError`."""
        path = f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status"
        lines = self.read(path).decode("utf-8", "replace").splitlines()
        return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}

    def threads(self, pid: int | str) -> list[int]:
        """Return the thread ids of a process; raises `OSError` when it is gone."""
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - pathlib is slow to import

    def _checked(self, operation: str, result: int) -> int:
        if result < 0:
            raise KernelError(operation, ctypes.get_errno())
        return int(result)


REAL = Kernel()


def close_all_but(keep: set[int]) -> None:
    """Close every other descriptor of this process, also one above a limit that was lowered after it was opened."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - pathlib is slow to import
        if descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:
                continue  # the one that listed them


def detach(keep: set[int]) -> None:
    """Ignore what a terminal sends to the whole group, read and write nowhere, and keep no other descriptor."""
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE):
        _signal.signal(number, _signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    close_all_but({0, 1, 2, *keep})


def end_child(pid: int, patience_s: float = 2.0) -> bool:
    """Kill and reap a child; return whether it is gone, as one is that was reaped or is another's.

    A tracer can keep it from being reaped, and nothing else; then it is left, without memory.
    """
    deadline_s = time.monotonic() + patience_s
    try:
        # Asked first: a number that is no child of this process's is never sent a signal.
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline_s:
                return False
            os.kill(pid, _signal.SIGKILL)
            time.sleep(0.001)
    except ChildProcessError:
        pass
    return True
