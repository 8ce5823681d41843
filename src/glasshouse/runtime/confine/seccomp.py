"""System call filters, assembled as data: classic BPF, 8 bytes an instruction (linux/filter.h).

Laws, for every filter here:
- a call of a foreign ABI (another architecture's, x32) answers ENOSYS: a process that a filter kills is named in the
  machine's audit log, by a name that a script may choose;
- a call newer than `syscalls.HIGHEST_KNOWN` answers ENOSYS;
- every decision looks at numbers and register arguments only, never at memory that may change.
A filter refuses what it lists and allows the rest: torch and a user's script need too many calls for an
allowlist that stays true from one version to the next.
"""

from __future__ import annotations

import errno
import struct

from glasshouse.runtime import syscalls
from glasshouse.runtime.kernel import Kernel

__all__ = ["FLAG_SPEC_ALLOW", "FLAG_TSYNC", "agent", "install", "sealed_agent", "supports", "worker"]

FLAG_TSYNC = 1
# Without it, kernels before 5.16 switch on a speculation mitigation that slows training and protects only
# code that runs untrusted code in its own process.
FLAG_SPEC_ALLOW = 4

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_RET_ERRNO = 0x00050000
_RET_ALLOW = 0x7FFF0000

_LOAD, _JEQ, _JGE, _JGT, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06, 0x54
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_NAMED_BY_SENDING = (16, 76)  # SO_PASSCRED, SO_PASSPIDFD
_SOCKET_TYPE_MASK = 0xF  # beside it are SOCK_NONBLOCK and SOCK_CLOEXEC
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_SEQPACKET = 1, 2, 5
_IPPROTO_ANY, _IPPROTO_TCP, _IPPROTO_UDP = 0, 6, 17
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWCGROUP, UTS, IPC, USER, PID, NET and NS
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_SIGINT, _SIGKILL, _SIGTERM = 2, 9, 15
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# SIOCGIFBR, SIOCSIFBR, SIOCGIFVLAN, SIOCSIFVLAN, SIOCBRADDBR to SIOCBRDELIF: the kernel loads a module for them, which
# stays when the worker is gone, before it asks for a capability.
_LOADING = (0x8940, 0x8941, 0x8982, 0x8983, 0x89A0, 0x89A1, 0x89A2, 0x89A3)
# TCP_MD5SIG and its kin (TCP_MD5SIG_EXT, TCP_AO_*): a segment that is not signed so is logged, with its addresses.
_SIGNED_SEGMENTS = (14, 32, 38, 39, 40)
# It first has written what others wrote to the file (Linux 6.1, where files may have huge pages).
_MADV_COLLAPSE = 25
_PERSONALITY_QUERY = 0xFFFFFFFF
_PRIO_PROCESS, _PRIO_USER = 0, 2
_RLIMIT_DATA, _RLIMIT_CORE = 2, 4
_ACCESS_MODE, _O_RDONLY, _NO_ACCESS, _O_TRUNC = 3, 0, 3, 0o1000
_O_DIRECT = {"x86_64": 0o40000, "aarch64": 0o200000}
_O_TMPFILE = 0o20000000  # __O_TMPFILE: without O_DIRECTORY, which the C library adds
_F_SETFL = 4
_FUTEX_COMMAND, _FUTEX_WAKE_OP, _FUTEX_OP_SHIFT = 0x7F, 5, 0x80000000

# Kinds of controls that are of no file system: NVIDIA's three, terminals and pipes, sockets.
_IOCTL_KINDS = (0x00, ord("F"), ord("m"), ord("T"), 0x89)
_IOCTL_KIND_MASK = 0xFF00
_FICLONE, _FICLONERANGE = 0x40049409, 0x4020940D
_LOCK_MAND = 32
# F_SETLEASE; F_SET_RW_HINT and F_SET_FILE_RW_HINT, which stay with the file in the kernel's memory for others to read;
# F_GETDELEG and F_SETDELEG (Linux 6.19), which are leases on folders.
_FILE_NOTES = (1024, 1036, 1038, 1039, 1040)
# F_GETLK, F_SETLK, F_SETLKW and their F_OFD_ forms: every user of the machine reads in /proc/locks where such a lock
# begins and ends, which `hidepid` does not hide. SQLite and LMDB take this for no permission.
_RANGE_LOCKS = (5, 6, 7, 36, 37, 38)

# Ways to read or steer another process.
_OTHERS_MEMORY = (
    "kcmp", "migrate_pages", "move_pages", "pidfd_getfd", "process_madvise", "process_vm_writev", "ptrace",
)  # fmt: skip
# Large kernel interfaces that neither training nor the agent uses, and ways around the filter itself.
_KERNEL_SURFACE = (
    "_sysctl", "acct", "add_key", "adjtimex", "bpf", "clock_adjtime", "clock_settime", "create_module",
    "delete_module", "fanotify_init", "fanotify_mark", "finit_module", "get_kernel_syms", "init_module",
    "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kexec_file_load", "kexec_load",
    "keyctl", "lookup_dcookie", "lsm_set_self_attr", "modify_ldt", "name_to_handle_at", "nfsservctl",
    "open_by_handle_at", "perf_event_open", "query_module", "quotactl", "quotactl_fd", "reboot", "request_key",
    "setdomainname", "settimeofday", "swapoff", "swapon", "sysfs", "syslog", "uselib", "userfaultfd", "ustat",
    "vhangup",
)  # fmt: skip
# What builds a sandbox also takes one apart.
_NAMESPACES = (
    "chroot", "fsconfig", "fsmount", "fsopen", "fspick", "listmount", "mount", "mount_setattr", "move_mount",
    "open_tree", "pivot_root", "sethostname", "setns", "statmount", "umount2", "unshare",
)  # fmt: skip
# Kept by a file system for later readers; copying a file (shutil.copy2, cp) does without where there are none.
_XATTRS = ("fremovexattr", "fsetxattr", "lremovexattr", "lsetxattr", "removexattr", "setxattr")
# Times and modes of files by their names: Landlock governs neither.
_TIMES_AND_MODES = ("chmod", "fchmod", "fchmodat", "fchmodat2", "futimesat", "utime", "utimensat", "utimes")
_OWNERS_AND_SIZES = ("chown", "fchown", "fchownat", "lchown", "truncate")
# By a descriptor for reading they commit what others wrote on its file system, beneath a read-only mount too: of a disk
# all users count commits, flushes and writes, which would follow a script. Its own files are memory.
_TO_DISK = ("fadvise64", "fdatasync", "fsync", "sync", "sync_file_range", "syncfs")
# The same for requests that are handed in; how many there may be, which a script chooses, everybody reads (aio-nr).
_HANDED_IN = ("io_setup", "io_submit")
# Restrictions of one's own: what they refuse is written to the machine's audit log, with names that a script chooses.
_AUDITED = ("landlock_create_ruleset", "landlock_restrict_self", "seccomp")
# A process by its number, as first argument.
_SCHEDULING = ("sched_setaffinity", "sched_setparam", "sched_setscheduler")
# Calls that nothing needs here, of which the kernel's log gets the caller's name: old forms, and a capability's.
_LOGGED = ("capget", "capset", "remap_file_pages")
# They take many bits for each thread, which every user of the machine reads by the thread's number, `hidepid` or not.
_READ_BY_ALL = ("ioprio_set", "sched_setattr")
# What stays in the kernel's memory when its last process has ended. It counts against no limit of the workspace and
# outlives a worker that the kernel killed for want of memory: a keeper is then killed in its place. Others' are near,
# by number. POSIX memory and semaphores, which libraries use, lie in /dev/shm.
_LASTING = (
    "mq_open", "mq_unlink", "msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop", "shmat",
    "shmctl", "shmget",
)  # fmt: skip


def supports(machine: str) -> bool:
    """Return whether there are filters for a machine (`os.uname().machine`)."""
    return machine in _AUDIT_ARCH


def install(kernel: Kernel, program: bytes) -> None:
    """Install a filter in every thread of this process; needs no_new_privs.

    Raises:
        KernelError: the kernel does not filter, or refuses.
    """
    kernel.seccomp(program, FLAG_TSYNC | FLAG_SPEC_ALLOW)


def agent(machine: str, *, own_pid: int) -> bytes:
    """Return the agent's first filter: it may still build the worker's sandbox and reach the broker.

    Args:
        machine: a name of `syscalls.ARCHITECTURES`.
        own_pid: the only process whose memory it may read: the probes search its own.
    """
    filter_ = _Filter(machine)
    filter_.refuse(_OTHERS_MEMORY + _KERNEL_SURFACE, errno.EPERM)
    filter_.families(_AF_UNIX, _AF_INET, _AF_INET6)
    filter_.only_value("process_vm_readv", 0, own_pid)
    return filter_.program()


def sealed_agent(machine: str, *, own_pid: int) -> bytes:
    """Return the agent's second filter: once the worker runs, no namespaces, no mounts, no new programs."""
    filter_ = _Filter(machine)
    filter_.refuse((*_OTHERS_MEMORY, *_KERNEL_SURFACE, *_NAMESPACES, "execve", "execveat"), errno.EPERM)
    filter_.clone()
    filter_.families(_AF_UNIX, _AF_INET, _AF_INET6)
    filter_.only_value("process_vm_readv", 0, own_pid)
    filter_.only_value("prctl", 1, 0, when=_PR_SET_DUMPABLE)
    return filter_.program()


def worker(machine: str, *, isolated: bool, loopback: bool = False, init: int | None = None) -> bytes:
    """Return the worker's filter, inherited by all that it starts.

    Args:
        machine: a name of `syscalls.ARCHITECTURES`.
        isolated: whether it has every namespace and a private root. Where one of them is missing, whichever it is, no
            Unix socket is bound, called or written to by name, which Landlock does not govern; no process leaves its
            group, by which they are ended; and times and modes of files stay as they are: the machine's own files would
            keep them. A script that sets them is answered that it was done.
        loopback: whether there may be TCP and UDP sockets: only where it is isolated, and nothing but the loopback of
            its network is up, over which ranks talk.
        init: the process above, whose priority and processors it does not change; None for no such process. Where it is
            not isolated it changes those of no other process.
    """
    if loopback and not isolated:
        raise ValueError("a loopback of the machine's own")
    filter_ = _Filter(machine)
    filter_.refuse(
        (*_OTHERS_MEMORY, "process_vm_readv", *_KERNEL_SURFACE, *_NAMESPACES, *_AUDITED, *_LOGGED, *_READ_BY_ALL),
        errno.EPERM,
    )
    filter_.clone()
    filter_.futex()
    filter_.opens()
    # The kernel's log gets names of the caller's, once a boot each; a list that is there and empty is `logged_once`'s.
    for name, argument in (("execve", 1), ("execveat", 2), ("setitimer", 1)):
        filter_.not_null(name, argument)
    if not isolated:
        filter_.connected_sockets()
    if loopback:
        filter_.families(_AF_UNIX, plain=(_AF_INET, _AF_INET6))
        filter_.no_value("setsockopt", 2, _SIGNED_SEGMENTS)
    else:
        filter_.families(_AF_UNIX)
    filter_.worker_prctl()
    filter_.personality()
    filter_.controls()
    filter_.no_value("fcntl", 1, (*_FILE_NOTES, *_RANGE_LOCKS))
    filter_.lock()
    filter_.refuse(_XATTRS, errno.EOPNOTSUPP)
    # Not an error: databases and checkpoints end where that fails.
    filter_.refuse(_TO_DISK, 0)
    filter_.no_value("madvise", 2, (_MADV_COLLAPSE,), answer=errno.EINVAL)
    filter_.refuse((*_LASTING, *_HANDED_IN), errno.ENOSYS)
    filter_.limits()
    if isolated and init is not None:
        filter_.scheduling(init)
    if not isolated:
        filter_.own_scheduling()
        filter_.refuse(("bind", "connect", "setpgid", "setsid", *_OWNERS_AND_SIZES), errno.EPERM)
        # With these the kernel gives a socket a name when it sends.
        filter_.no_value("setsockopt", 2, _NAMED_BY_SENDING)
        # Not an error: copying, unpacking and saving set times and modes, and end where that fails.
        filter_.refuse(_TIMES_AND_MODES, 0)
    return filter_.program()


class _Filter:
    """A filter being built. Each rule starts with the call's number in the accumulator and leaves it there."""

    def __init__(self, machine: str) -> None:
        if not supports(machine):
            raise ValueError(f"no filter for {machine}")
        self._machine = machine
        self._code: list[tuple[int, int, int, int]] = [
            (_LOAD, 0, 0, _ARCH),
            (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
            _answer(errno.ENOSYS),
            (_LOAD, 0, 0, _NUMBER),
        ]
        if machine == "x86_64":
            self._code += [(_JGE, 0, 1, _X32_BIT), _answer(errno.ENOSYS)]
        self._code += [(_JGT, 0, 1, syscalls.HIGHEST_KNOWN), _answer(errno.ENOSYS)]

    def refuse(self, names: tuple[str, ...], answer: int) -> None:
        for number in syscalls.numbers(names, self._machine):
            self._code += [(_JEQ, 0, 1, number), _answer(answer)]

    def families(self, *allowed: int, plain: tuple[int, ...] = ()) -> None:
        """Let sockets be made of these address families only; of those in `plain`, only of TCP and UDP."""
        # EAFNOSUPPORT: libraries take it for a machine without that network, and go on.
        refused = _answer(errno.EAFNOSUPPORT)
        kind: list[tuple[int, int, int, int]] = []
        if plain:
            # Raw, ping, SCTP and Multipath TCP sockets are kernel surface that no rank needs.
            kind = [
                *(_low(1), (_AND, 0, 0, _SOCKET_TYPE_MASK), (_JEQ, 1, 0, _SOCK_STREAM), (_JEQ, 0, 4, _SOCK_DGRAM)),
                *(_low(2), (_JEQ, 3, 0, _IPPROTO_ANY), (_JEQ, 2, 0, _IPPROTO_TCP), (_JEQ, 1, 0, _IPPROTO_UDP)),
            ]
        families = [*allowed, *plain]
        checks = []
        for index, family in enumerate(families):
            left = len(families) - index - 1
            # To the check of the kind, or past it and the refusal to the end.
            checks.append((_JEQ, left + 1 + (len(kind) + 1 if kind and family not in plain else 0), 0, family))
        for name in ("socket", "socketpair"):
            tail = [refused, *kind, refused, _allow()] if kind else [refused, _allow()]
            self._rule(name, [_low(0), *checks, *tail])

    def connected_sockets(self) -> None:
        """Let no datagram socket be made: it is written to by any name, of which `sendmsg` tells no filter."""
        kinds = [(_JEQ, 2, 0, _SOCK_STREAM), (_JEQ, 1, 0, _SOCK_SEQPACKET), _answer(errno.ESOCKTNOSUPPORT)]
        for name in ("socket", "socketpair"):
            self._rule(name, [_low(1), (_AND, 0, 0, _SOCKET_TYPE_MASK), *kinds, (_LOAD, 0, 0, _NUMBER)])

    def futex(self) -> None:
        """Refuse the shifted operand, which no library uses: with one too large the kernel logs the caller's name."""
        shifted = [_low(5), (_JSET, 0, 1, _FUTEX_OP_SHIFT), _answer(errno.EINVAL), _allow()]
        self._rule("futex", [_low(1), (_AND, 0, 0, _FUTEX_COMMAND), (_JEQ, 0, 3, _FUTEX_WAKE_OP), *shifted])

    def only_value(self, name: str, argument: int, value: int, *, when: int | None = None) -> None:
        """Let `name` pass only with one value of an argument; `when` limits the rule to one first argument."""
        body = [_high(argument), (_JEQ, 0, 3, 0), _low(argument), (_JEQ, 0, 1, value), _allow(), _answer(errno.EPERM)]
        if when is not None:
            body = [_low(0), (_JEQ, 1, 0, when), _allow(), *body]
        self._rule(name, body)

    def worker_prctl(self) -> None:
        """Once not dumpable, always not dumpable; the end of the process above it ends the worker; no second filter."""
        not_dumpable = [_high(1), (_JEQ, 0, 3, 0), _low(1), (_JEQ, 0, 1, 0), _allow(), _answer(errno.EPERM)]
        # `torch.multiprocessing.spawn` asks for SIGINT in each rank, and ends where that fails: it and SIGTERM are
        # answered as done, and are not, as everything here ends with the init anyway.
        asked = [(_JEQ, 3, 0, _SIGINT), (_JEQ, 2, 0, _SIGTERM)]
        death = [_low(1), (_JEQ, 3, 0, _SIGKILL), *asked, _answer(errno.EPERM), _allow(), _answer(0)]
        body = [_low(0)]
        blocks = [
            (_PR_SET_DUMPABLE, not_dumpable),
            (_PR_SET_PDEATHSIG, death),
            (_PR_SET_SECCOMP, [_answer(errno.EPERM)]),
        ]
        for option, block in blocks:
            body += [(_JEQ, 0, len(block), option), *block]
        self._rule("prctl", [*body, _allow()])

    def no_value(self, name: str, argument: int, values: tuple[int, ...], *, answer: int = errno.EPERM) -> None:
        checks = [(_JEQ, len(values) - index, 0, value) for index, value in enumerate(values)]
        self._rule(name, [_low(argument), *checks, _allow(), _answer(answer)])

    def controls(self) -> None:
        """Let pass the ioctls that are of no file system, but for those that type into a terminal or load a module."""
        # Every file system has controls of its own that leave something on a disk, or reach its server, by a descriptor
        # for reading. Landlock hears nothing of them, and a mount that is read-only asks the file system to refuse
        # them: ext4 has another number for a file's version, btrfs a new folder, FUSE whatever its server wants.
        refused = (_TIOCSTI, _TIOCLINUX, *_LOADING)
        typing = [(_JEQ, len(refused) - 1 - index, 0, value) for index, value in enumerate(refused[:-1])]
        typing += [(_JEQ, 0, 1, refused[-1]), _answer(errno.EPERM)]
        # Copying tries these first, and pathlib (Python 3.14) does without on few answers.
        cloning = [(_JEQ, 1, 0, _FICLONE), (_JEQ, 0, 1, _FICLONERANGE), _answer(errno.EOPNOTSUPP)]
        checks = [(_JEQ, len(_IOCTL_KINDS) - index, 0, kind << 8) for index, kind in enumerate(_IOCTL_KINDS)]
        kind = [(_AND, 0, 0, _IOCTL_KIND_MASK), *checks, _answer(errno.ENOTTY), _allow()]
        self._rule("ioctl", [_low(1), *typing, *cloning, *kind])

    def lock(self) -> None:
        """Refuse a kind of lock that Linux has no longer: the kernel logs the caller's name."""
        self._rule("flock", [_low(1), (_JSET, 0, 1, _LOCK_MAND), _answer(errno.EINVAL), _allow()])

    def clone(self) -> None:
        """Let processes and threads be made, but no namespaces."""
        # clone3 keeps its flags in memory, where a filter cannot see them; libc falls back to clone.
        self.refuse(("clone3",), errno.ENOSYS)
        self._rule("clone", [_low(0), (_JSET, 1, 0, _NEW_NAMESPACES), _allow(), _answer(errno.EPERM)])

    def personality(self) -> None:
        """Let the personality be asked for, or set to the plain one."""
        checks = [_low(0), (_JEQ, 2, 0, 0), (_JEQ, 1, 0, _PERSONALITY_QUERY)]
        self._rule("personality", [*checks, _answer(errno.EPERM), _allow()])

    def opens(self) -> None:
        """Refuse what changes or reaches a file opened for neither reading nor writing, reads past the cache, no names.

        Reads past the cache first bring to a disk what others wrote, in the reader's order, which stays in where the
        pages lie. A file without a name is made before Landlock is asked: a disk notes its mode and its folder, and an
        overlay copies the folder.
        """
        # Truncating takes no right of Landlock's before its version 3; the access mode 3 takes none to open a file at
        # all, and leaves its ioctls.
        direct = [(_JSET, 0, 1, _O_DIRECT[self._machine]), _answer(errno.EINVAL)]
        mode = [(_AND, 0, 0, _ACCESS_MODE), (_JEQ, 4, 0, _NO_ACCESS), (_JEQ, 0, 2, _O_RDONLY)]
        for name, argument in (("open", 1), ("openat", 2)):
            tail = [_low(argument), (_JSET, 1, 0, _O_TRUNC), _allow(), _answer(errno.EACCES)]
            unnamed = [(_JSET, 0, 1, _O_TMPFILE), _answer(errno.EOPNOTSUPP)]
            self._rule(name, [_low(argument), *unnamed, *direct, *mode, *tail])
        # Goes on with the number of the call: what else is refused of it comes next.
        flags = [_low(1), (_JEQ, 0, len(direct) + 1, _F_SETFL), _low(2), *direct, (_LOAD, 0, 0, _NUMBER)]
        self._rule("fcntl", flags)
        # Its flags are in memory; libraries fall back to openat.
        self.refuse(("openat2",), errno.ENOSYS)

    def not_null(self, name: str, argument: int) -> None:
        """Refuse a null pointer."""
        null = [_high(argument), (_JEQ, 0, 3, 0), _low(argument), (_JEQ, 0, 1, 0)]
        self._rule(name, [*null, _answer(errno.EFAULT), _allow()])

    def limits(self) -> None:
        """Answer that the limit on core dumps was set, and leave it; refuse one on data, and any of another process."""
        # At 1 nothing is dumped; at 0 a program that the machine pipes dumps to still gets the whole memory (core(5)).
        # A limit on data that is reached is logged, with the caller's name.
        checks = [(_JEQ, 2, 0, _RLIMIT_CORE), (_JEQ, 2, 0, _RLIMIT_DATA), _allow(), _answer(0), _answer(errno.EPERM)]
        self._rule("setrlimit", [_low(0), *checks])
        read = [_low(2), (_JEQ, 0, 3, 0), _high(2), (_JEQ, 0, 1, 0), _allow()]
        # A limit on processor time or files that another process has passed kills it, or leaves it unable to clean up.
        # No filter has the numbers of the caller's children, and a process's own is another's once it has ended.
        own = [_low(0), (_JEQ, 1, 0, 0), _answer(errno.EPERM)]
        self._rule("prlimit64", [*read, *own, _low(1), *checks])

    def scheduling(self, init: int) -> None:
        """Leave priority and processors of the init as they are, also where all processes of its user are meant."""
        for name in _SCHEDULING:
            self.no_value(name, 0, (init,))
        checks = [_low(0), (_JEQ, 2, 0, _PRIO_USER), _low(1), (_JEQ, 0, 1, init), _answer(errno.EPERM), _allow()]
        self._rule("setpriority", checks)

    def own_scheduling(self) -> None:
        """Leave priority and processors of every other process as they are, by its number, group and user."""
        # A keeper that is left one processor, at the lowest priority and behind a crowd, does not run at all.
        for name in _SCHEDULING:
            self._rule(name, [_low(0), (_JEQ, 1, 0, 0), _answer(errno.EPERM), _allow()])
        checks = [_low(0), (_JEQ, 0, 2, _PRIO_PROCESS), _low(1), (_JEQ, 1, 0, 0), _answer(errno.EPERM), _allow()]
        self._rule("setpriority", checks)

    def program(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *line) for line in [*self._code, _allow()])

    def _rule(self, name: str, body: list[tuple[int, int, int, int]]) -> None:
        number = syscalls.number(name, self._machine)
        if number is not None:
            self._code += [(_JEQ, 0, len(body), number), *body]


def _answer(number: int) -> tuple[int, int, int, int]:
    return _RET, 0, 0, _RET_ERRNO | number


def _allow() -> tuple[int, int, int, int]:
    return _RET, 0, 0, _RET_ALLOW


def _low(argument: int) -> tuple[int, int, int, int]:
    """Load the low half of an argument; both architectures are little-endian."""
    return _LOAD, 0, 0, _ARGUMENTS + 8 * argument


def _high(argument: int) -> tuple[int, int, int, int]:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4
