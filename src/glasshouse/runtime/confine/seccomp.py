"""System call filters, assembled as data: classic BPF, 8 bytes an instruction (linux/filter.h).

Laws, for every filter here:
- a call of a foreign ABI (another architecture's, x32) answers ENOSYS: a process that a filter kills is named in the
  machine's audit log, by a name that a script may choose;
- a call newer than `syscalls.HIGHEST_KNOWN` answers ENOSYS;
- every decision looks at numbers and register arguments only, never at memory that may change.
A filter refuses what it lists and allows the rest: torch and scripts need too many calls for an allowlist.
"""

from __future__ import annotations

import errno
import struct

from glasshouse.runtime import syscalls
from glasshouse.runtime.syscalls import KernelError

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_LOAD, _JEQ, _JGE, _JGT, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06, 0x54
_RET_ERRNO = 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW = (_RET, 0, 0, 0x7FFF0000)

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
_PERSONALITY_QUERY, _PRIO_PROCESS, _PRIO_USER = 0xFFFFFFFF, 0, 2
_RLIMIT_DATA, _RLIMIT_CORE = 2, 4
_ACCESS_MODE, _O_RDONLY, _NO_ACCESS, _O_TRUNC = 3, 0, 3, 0o1000
_O_DIRECT = {"x86_64": 0o40000, "aarch64": 0o200000}
_O_TMPFILE = 0o20000000  # __O_TMPFILE: without O_DIRECTORY, which the C library adds
_F_SETFL, _LOCK_MAND = 4, 32
_FUTEX_COMMAND, _FUTEX_WAKE_OP, _FUTEX_OP_SHIFT = 0x7F, 5, 0x80000000

# Kinds of controls that are of no file system: NVIDIA's three, terminals and pipes, sockets.
_IOCTL_KINDS = (0x00, ord("F"), ord("m"), ord("T"), 0x89)
_IOCTL_KIND_MASK = 0xFF00
_ANSWERS = ord("!")  # to calls that wait
_FICLONE, _FICLONERANGE = 0x40049409, 0x4020940D
# F_SETLEASE; F_SET_RW_HINT and F_SET_FILE_RW_HINT, which stay with the file in the kernel's memory for others to read;
# F_GETDELEG and F_SETDELEG (Linux 6.19), which are leases on folders.
_FILE_NOTES = (1024, 1036, 1038, 1039, 1040)
# F_GETLK, F_SETLK, F_SETLKW and their F_OFD_ forms: every user of the machine reads in /proc/locks where such a lock
# begins and ends, which `hidepid` does not hide. SQLite and LMDB take this for no permission.
_RANGE_LOCKS = (5, 6, 7, 36, 37, 38)


def supports(machine: str) -> bool:
    """Return whether there are filters for a machine (`os.uname().machine`)."""
    return machine in _AUDIT_ARCH


def agent(machine: str, *, own_pid: int) -> bytes:
    """Return the agent's first filter: it may still build the worker's sandbox and reach the broker.

    Its probes search its own memory: `own_pid` is the only process whose memory it may read.
    """
    return _agent(machine, own_pid, syscalls.OTHERS_MEMORY + syscalls.KERNEL_SURFACE).program()


def sealed_agent(machine: str, *, own_pid: int) -> bytes:
    """Return the agent's second filter: once the worker runs, no namespaces, no mounts, no new programs."""
    refused = (*syscalls.OTHERS_MEMORY, *syscalls.KERNEL_SURFACE, *syscalls.NAMESPACES, "execve", "execveat")
    filter_ = _agent(machine, own_pid, refused)
    filter_.clone()
    filter_.only_value("prctl", 1, 0, when=_PR_SET_DUMPABLE)
    return filter_.program()


def _agent(machine: str, own_pid: int, refused: tuple[str, ...]) -> _Filter:
    filter_ = _Filter(machine)
    filter_.refuse(refused, errno.EPERM)
    filter_.families(_AF_UNIX, _AF_INET, _AF_INET6)
    filter_.only_value("process_vm_readv", 0, own_pid)
    return filter_


def worker(
    machine: str,
    *,
    isolated: bool,
    loopback: bool = False,
    init: int | None = None,
    gpus: bool = False,
    waits: bool = False,
    answers: bool = False,
) -> bytes:
    """Return the worker's filter, inherited by all that it starts.

    Args:
        isolated: whether it has every namespace and a private root. Where one is missing, no Unix socket has a name,
            which Landlock does not govern; no process leaves its group, by which they are ended; and times and modes
            of files, which the machine's own would keep, stay as they are: setting them is answered as done.
        loopback: whether there may be TCP and UDP sockets: only where it is isolated, and nothing but `lo` is up.
        init: the process above, whose priority and processors it does not change. Where it is not isolated it changes
            those of no other process.
        gpus: whether NVIDIA's library is to begin. It ends where it may not give a socket a name by which other
            processes ask it for memory: where that is refused, it is answered as done.
        waits: whether `listen` is then another filter's to answer (`silent_listener`).
        answers: whether this is the filter of what answers it.
    """
    if loopback and not isolated:
        raise ValueError("a loopback of the machine's own")
    filter_ = _Filter(machine)
    surface = syscalls.KERNEL_SURFACE + syscalls.NAMESPACES + syscalls.AUDITED + syscalls.LOGGED + syscalls.READ_BY_ALL
    filter_.refuse((*syscalls.OTHERS_MEMORY, "process_vm_readv", *surface), errno.EPERM)
    filter_.clone()
    filter_.futex()
    filter_.opens()
    # The kernel's log gets names of the caller's, once a boot each; for a list that is there and empty see
    # `sandbox_steps.use_up_log_lines`.
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
    filter_.only_low("personality", 0, (0, _PERSONALITY_QUERY))
    filter_.controls((*_IOCTL_KINDS, _ANSWERS) if answers else _IOCTL_KINDS)
    filter_.no_value("fcntl", 1, (*_FILE_NOTES, *_RANGE_LOCKS))
    # A kind of lock that Linux has no longer: the kernel logs the caller's name.
    filter_.no_bit("flock", 1, _LOCK_MAND, answer=errno.EINVAL)
    filter_.refuse(syscalls.XATTRS, errno.EOPNOTSUPP)
    # Not an error: databases and checkpoints end where that fails.
    filter_.refuse(syscalls.TO_DISK, 0)
    filter_.no_value("madvise", 2, (_MADV_COLLAPSE,), answer=errno.EINVAL)
    filter_.refuse((*syscalls.LASTING, *syscalls.HANDED_IN), errno.ENOSYS)
    filter_.limits()
    if isolated and init is not None:
        filter_.scheduling(init)
    if not isolated:
        filter_.own_scheduling()
        if gpus:
            filter_.refuse(("bind",) if waits else ("bind", "listen"), 0)
        filter_.refuse(("bind", "connect", "setpgid", "setsid", *syscalls.OWNERS_AND_SIZES), errno.EPERM)
        # With these the kernel gives a socket a name when it sends.
        filter_.no_value("setsockopt", 2, _NAMED_BY_SENDING)
        # Not an error: copying, unpacking and saving set times and modes, and end where that fails.
        filter_.refuse(syscalls.TIMES_AND_MODES, 0)
    return filter_.program()


class _Filter:
    """A filter being built. Each rule starts with the call's number in the accumulator and leaves it there."""

    def __init__(self, machine: str) -> None:
        if not supports(machine):
            raise KernelError(f"a filter for {machine}", errno.ENOSYS)
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
        tail = [_answer(errno.EAFNOSUPPORT), _ALLOW]
        if plain:
            # Raw, ping, SCTP and Multipath TCP sockets are kernel surface that no rank needs.
            kind = [
                *(_low(1), (_AND, 0, 0, _SOCKET_TYPE_MASK), (_JEQ, 1, 0, _SOCK_STREAM), (_JEQ, 0, 4, _SOCK_DGRAM)),
                *(_low(2), (_JEQ, 3, 0, _IPPROTO_ANY), (_JEQ, 2, 0, _IPPROTO_TCP), (_JEQ, 1, 0, _IPPROTO_UDP)),
            ]
            tail = [tail[0], *kind, *tail]
        families = [*allowed, *plain]
        checks = []
        for index, family in enumerate(families):
            # Past the first refusal to the check of the kind, or to the end.
            past = 1 if family in plain else len(tail) - 1
            checks.append((_JEQ, len(families) - 1 - index + past, 0, family))
        for name in ("socket", "socketpair"):
            self._rule(name, [_low(0), *checks, *tail])

    def connected_sockets(self) -> None:
        """Let no datagram socket be made: it is written to by any name, which no filter sees of `sendmsg`."""
        kinds = [(_JEQ, 2, 0, _SOCK_STREAM), (_JEQ, 1, 0, _SOCK_SEQPACKET), _answer(errno.ESOCKTNOSUPPORT)]
        for name in ("socket", "socketpair"):
            self._rule(name, [_low(1), (_AND, 0, 0, _SOCKET_TYPE_MASK), *kinds, (_LOAD, 0, 0, _NUMBER)])

    def futex(self) -> None:
        """Refuse the shifted operand, which no library uses: with one too large the kernel logs the caller's name."""
        shifted = [_low(5), (_JSET, 0, 1, _FUTEX_OP_SHIFT), _answer(errno.EINVAL), _ALLOW]
        self._rule("futex", [_low(1), (_AND, 0, 0, _FUTEX_COMMAND), (_JEQ, 0, 3, _FUTEX_WAKE_OP), *shifted])

    def only_value(self, name: str, argument: int, value: int, *, when: int | None = None) -> None:
        """Let `name` pass only with one value of an argument; `when` limits the rule to one first argument."""
        body = _only(argument, value)
        if when is not None:
            body = [_low(0), (_JEQ, 1, 0, when), _ALLOW, *body]
        self._rule(name, body)

    def worker_prctl(self) -> None:
        """Once not dumpable, always not dumpable; the end of the process above it ends the worker; no second filter."""
        # `torch.multiprocessing.spawn` asks for SIGINT in each rank, and ends where that fails: it and SIGTERM are
        # answered as done, and are not, as everything here ends with the init anyway.
        asked = [(_JEQ, 3, 0, _SIGINT), (_JEQ, 2, 0, _SIGTERM)]
        death = [_low(1), (_JEQ, 3, 0, _SIGKILL), *asked, _answer(errno.EPERM), _ALLOW, _answer(0)]
        body = [_low(0)]
        for option, block in (
            (_PR_SET_DUMPABLE, _only(1, 0)),
            (_PR_SET_PDEATHSIG, death),
            (_PR_SET_SECCOMP, [_answer(errno.EPERM)]),
        ):
            body += [(_JEQ, 0, len(block), option), *block]
        self._rule("prctl", [*body, _ALLOW])

    def no_value(self, name: str, argument: int, values: tuple[int, ...], *, answer: int = errno.EPERM) -> None:
        """Refuse `name` with one of some values of an argument."""
        self._rule(name, [_low(argument), *_any(values, past=1), _ALLOW, _answer(answer)])

    def no_bit(self, name: str, argument: int, bits: int, *, answer: int) -> None:
        """Refuse `name` with any of some bits of an argument."""
        self._rule(name, [_low(argument), (_JSET, 0, 1, bits), _answer(answer), _ALLOW])

    def controls(self, allowed: tuple[int, ...]) -> None:
        """Let pass the ioctls that are of no file system, but for those that type into a terminal or load a module."""
        # Every file system has controls of its own that leave something on a disk, or reach its server, by a descriptor
        # for reading. Landlock has no right for them, and a mount that is read-only asks the file system to refuse
        # them: ext4 has another number for a file's version, btrfs a new folder, FUSE whatever its server wants.
        typing = [
            *_any((_TIOCSTI, _TIOCLINUX, *_LOADING[:-1]), past=1),
            (_JEQ, 0, 1, _LOADING[-1]),
            _answer(errno.EPERM),
        ]
        # Copying tries these first, and pathlib (Python 3.14) does without on few answers.
        cloning = [(_JEQ, 1, 0, _FICLONE), (_JEQ, 0, 1, _FICLONERANGE), _answer(errno.EOPNOTSUPP)]
        kinds = _any(tuple(kind << 8 for kind in allowed), past=1)
        kind = [(_AND, 0, 0, _IOCTL_KIND_MASK), *kinds, _answer(errno.ENOTTY), _ALLOW]
        self._rule("ioctl", [_low(1), *typing, *cloning, *kind])

    def clone(self) -> None:
        """Let processes and threads be made, but no namespaces."""
        # clone3 keeps its flags in memory, where a filter cannot see them; libc falls back to clone.
        self.refuse(("clone3",), errno.ENOSYS)
        self._rule("clone", [_low(0), (_JSET, 1, 0, _NEW_NAMESPACES), _ALLOW, _answer(errno.EPERM)])

    def only_low(self, name: str, argument: int, values: tuple[int, ...]) -> None:
        """Let `name` pass only with some values of the low half of an argument."""
        self._rule(name, [_low(argument), *_any(values, past=1), _answer(errno.EPERM), _ALLOW])

    def opens(self) -> None:
        """Refuse reaching files that are opened without a right, reads past the cache, and files without a name."""
        # Truncating takes no right of Landlock's before its version 3; the access mode 3 takes none to open a file, and
        # leaves its ioctls. Reads past the cache first bring to a disk what others wrote, in the reader's order. A file
        # without a name is made before Landlock is asked: a disk notes its mode and its folder.
        direct = [(_JSET, 0, 1, _O_DIRECT[self._machine]), _answer(errno.EINVAL)]
        mode = [(_AND, 0, 0, _ACCESS_MODE), (_JEQ, 4, 0, _NO_ACCESS), (_JEQ, 0, 2, _O_RDONLY)]
        for name, argument in (("open", 1), ("openat", 2)):
            tail = [_low(argument), (_JSET, 1, 0, _O_TRUNC), _ALLOW, _answer(errno.EACCES)]
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
        self._rule(name, [*null, _answer(errno.EFAULT), _ALLOW])

    def limits(self) -> None:
        """Answer that the limit on core dumps was set, and leave it; refuse one on data, and any of another process."""
        # At 1 nothing is dumped; at 0 a program that the machine pipes dumps to still gets the whole memory (core(5)).
        # A limit on data that is reached is logged, with the caller's name.
        checks = [(_JEQ, 2, 0, _RLIMIT_CORE), (_JEQ, 2, 0, _RLIMIT_DATA), _ALLOW, _answer(0), _answer(errno.EPERM)]
        self._rule("setrlimit", [_low(0), *checks])
        read = [_low(2), (_JEQ, 0, 3, 0), _high(2), (_JEQ, 0, 1, 0), _ALLOW]
        # A limit on processor time or files that another process has passed kills it, or leaves it unable to clean up.
        # No filter has the numbers of the caller's children, and a process's own is another's once it has ended.
        own = [_low(0), (_JEQ, 1, 0, 0), _answer(errno.EPERM)]
        self._rule("prlimit64", [*read, *own, _low(1), *checks])

    def scheduling(self, init: int) -> None:
        """Leave priority and processors of the init as they are, also where all processes of its user are meant."""
        for name in syscalls.SCHEDULING:
            self.no_value(name, 0, (init,))
        checks = [_low(0), (_JEQ, 2, 0, _PRIO_USER), _low(1), (_JEQ, 0, 1, init), _answer(errno.EPERM), _ALLOW]
        self._rule("setpriority", checks)

    def own_scheduling(self) -> None:
        """Leave priority and processors of every other process as they are, by its number, group and user."""
        # A keeper that is left one processor, at the lowest priority and behind a crowd, does not run at all.
        for name in syscalls.SCHEDULING:
            self.only_low(name, 0, (0,))
        checks = [_low(0), (_JEQ, 0, 2, _PRIO_PROCESS), _low(1), (_JEQ, 1, 0, 0), _answer(errno.EPERM), _ALLOW]
        self._rule("setpriority", checks)

    def program(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *line) for line in [*self._code, _ALLOW])

    def _rule(self, name: str, body: list[tuple[int, int, int, int]]) -> None:
        number = syscalls.number(name, self._machine)
        if number is not None:
            self._code += [(_JEQ, 0, len(body), number), *body]


def _answer(number: int) -> tuple[int, int, int, int]:
    return _RET, 0, 0, _RET_ERRNO | number


def _any(values: tuple[int, ...], *, past: int) -> list[tuple[int, int, int, int]]:
    """Jump over the other checks and `past` more instructions where one of the values is met."""
    return [(_JEQ, len(values) - 1 - index + past, 0, value) for index, value in enumerate(values)]


def _only(argument: int, value: int) -> list[tuple[int, int, int, int]]:
    """Allow one value of all 64 bits of an argument."""
    return [_high(argument), (_JEQ, 0, 3, 0), _low(argument), (_JEQ, 0, 1, value), _ALLOW, _answer(errno.EPERM)]


def _low(argument: int) -> tuple[int, int, int, int]:
    """Load the low half of an argument; both architectures are little-endian."""
    return _LOAD, 0, 0, _ARGUMENTS + 8 * argument


def _high(argument: int) -> tuple[int, int, int, int]:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4
