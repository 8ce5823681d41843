"""What the launcher tries from inside the finished sandbox, as the worker could: all of it must fail.

A trial never asks what was set; it does the forbidden thing. Each returns the names of the trials that
*succeeded*, so that an empty list is the good one. Targets that would answer are the agent's own
listeners (`controls`), which it had reached itself a moment before.
"""

from __future__ import annotations

# The C modules beneath `signal` and `socket`, which cost 40 and 50 ms to import without compiled bytecode.
import _signal  # type: ignore[import-not-found]
import _socket
import ctypes
import errno
import os
import sys

from glasshouse.runtime.kernel import CLONE_NEWUSER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, Kernel
from glasshouse.runtime.syscalls import KernelError

_PTRACE_SEIZE = 0x4206
_AF_NETLINK, _AF_PACKET, _AF_VSOCK = 16, 17, 40
_RLIMIT_NOFILE = 7
_F_OFD_SETLK = 37
_TRIED_FILE, _AT_FDCWD = b"trial", -100  # in the workspace, which is where this process is
_TRIED_NAME = b"example.com"  # as text it would import the idna codec: 70 ms
_IPPROTO_SCTP, _IPPROTO_MPTCP = 132, 262
# On the loopback an answer takes microseconds; silence is not a refusal.
_LOOPBACK_PATIENCE_S = 1.0
# Addresses for documentation (RFC 5737, RFC 3849), the ones that clouds answer with a machine's secrets, and the
# neighbours of a link.
_ELSEWHERE = ("192.0.2.1", "169.254.169.254", "10.0.0.1", "224.0.0.1", "255.255.255.255")
_ELSEWHERE_6 = ("2001:db8::1", "fd00:ec2::254", "fe80::1", "ff02::1")


def egress(kernel: Kernel, targets: dict[str, int | str], *, isolated: bool, loopback: bool = False) -> list[str]:
    """Try to reach anything outside this process by a socket, a name or io_uring, and to be reached at a socket.

    Args:
        targets: `tcp` and `udp` (ports of the loopback), `abstract` and `named` (names of Unix sockets).
        isolated: whether no name of a socket of this process's is known outside of it, so that it may have one.
        loopback: whether TCP and UDP sockets are allowed, in a network namespace of this process's own: each is then
            tried to its end, and every way that leads further than `lo`.
    """
    tried: list[tuple[str, int, int, object]] = [
        ("raw", _socket.AF_INET, _socket.SOCK_RAW, None),
        ("netlink", _AF_NETLINK, _socket.SOCK_RAW, None),
        ("packet", _AF_PACKET, _socket.SOCK_RAW, None),
        ("vsock", _AF_VSOCK, _socket.SOCK_STREAM, None),
        ("abstract-socket", _socket.AF_UNIX, _socket.SOCK_STREAM, targets["abstract"]),
        ("named-socket", _socket.AF_UNIX, _socket.SOCK_STREAM, targets["named"]),
    ]
    if not loopback:
        tried += [
            ("tcp", _socket.AF_INET, _socket.SOCK_STREAM, ("127.0.0.1", targets["tcp"])),
            ("udp", _socket.AF_INET, _socket.SOCK_DGRAM, ("127.0.0.1", targets["udp"])),
            ("tcp6", _socket.AF_INET6, _socket.SOCK_STREAM, None),
            ("udp6", _socket.AF_INET6, _socket.SOCK_DGRAM, None),
        ]
    found = [name for name, family, kind, address in tried if _reaches(family, kind, address)]
    found += _past_loopback(kernel, targets) if loopback else []
    found += [] if isolated else _takes_names()
    if _finds(targets["named"]):
        found.append("named-datagram")
    try:
        _socket.getaddrinfo(_TRIED_NAME, 443)
        found.append("dns")
    except OSError:
        pass
    if _succeeds(kernel, "io_uring_setup", 1, bytes(120)):
        found.append("io-uring")
    return found


def _past_loopback(kernel: Kernel, targets: dict[str, int | str]) -> list[str]:
    """Where they lead to a loopback of this namespace, on which none of the agent's listeners is."""
    # Only here: ordinary runs do not compile it.
    from glasshouse.runtime.confine import loopback

    found = [] if _refused_at(_socket.SOCK_STREAM, targets["tcp"]) else ["tcp"]
    found += [] if _refused_at(_socket.SOCK_DGRAM, targets["udp"]) else ["udp"]
    for family, addresses in ((_socket.AF_INET, _ELSEWHERE), (_socket.AF_INET6, _ELSEWHERE_6)):
        for kind, name in ((_socket.SOCK_STREAM, "tcp"), (_socket.SOCK_DGRAM, "udp")):
            # A route would be enough: without one the kernel refuses before anything is sent.
            if any(_reaches(family, kind, (address, 9)) for address in addresses):
                found.append(f"{name}{'6' if family == _socket.AF_INET6 else ''}-route")
    for name, family, kind, protocol in (
        ("ping", _socket.AF_INET, _socket.SOCK_DGRAM, _socket.IPPROTO_ICMP),
        ("sctp", _socket.AF_INET, _socket.SOCK_STREAM, _IPPROTO_SCTP),
        ("mptcp", _socket.AF_INET6, _socket.SOCK_STREAM, _IPPROTO_MPTCP),
    ):
        try:
            _socket.socket(family, kind, protocol).close()
            found.append(name)
        except OSError:
            continue
    try:
        found += ["interface"] if loopback.strays(kernel) else []
    except OSError:
        found.append("interface")
    return [*found, *(["network-control"] if loopback.controllable() else [])]


def _refused_at(kind: int, port: object) -> bool:
    """Return whether the loopback itself answers that nothing listens at a port at which the agent does."""
    connection = _socket.socket(_socket.AF_INET, kind)
    try:
        connection.settimeout(_LOOPBACK_PATIENCE_S)
        connection.connect(("127.0.0.1", port))
        if kind == _socket.SOCK_DGRAM:
            connection.send(b"trial")
            connection.recv(16)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    finally:
        connection.close()
    return False


def system_calls(kernel: Kernel, *, isolated: bool) -> list[str]:
    """Try in a child the calls that the filter must refuse, with arguments that would otherwise do something.

    Those on other processes are left out where none is in sight of this one but its own (`isolated`).
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = _forbidden_in(kernel, isolated=isolated)
        os.write(writer, " ".join(found).encode() + b"\n")
        os._exit(0)
    os.close(writer)
    try:
        answer = os.read(reader, 4096)
    finally:
        os.close(reader)
        os.waitpid(child, 0)
    # A child that a call killed has answered nothing: that is no proof.
    return answer.decode().split() if answer else ["killed"]


def _reaches(family: int, kind: int, address: object) -> bool:
    try:
        connection = _socket.socket(family, kind)
    except OSError:
        return False
    try:
        if address is None:
            return True  # the socket alone is already more than the worker may have
        connection.setblocking(False)
        connection.connect(address)  # type: ignore[arg-type]
        if kind == _socket.SOCK_DGRAM:
            connection.send(b"trial")
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.close()
    return True


def _takes_names() -> list[str]:
    """Try to take names by which others could call a socket of this process's."""
    found = set()
    for kind in (_socket.SOCK_STREAM, _socket.SOCK_SEQPACKET, _socket.SOCK_DGRAM):
        # An empty one asks the kernel for an abstract name that is free.
        for name, address in (("abstract-listener", b""), ("named-listener", _TRIED_FILE)):
            try:
                listener = _socket.socket(_socket.AF_UNIX, kind)
            except OSError:
                continue
            try:
                listener.bind(address)
                if not listener.getsockname():
                    continue  # answered as done, and not done
            except OSError:
                continue
            finally:
                listener.close()
            found.add(name)
            if address:
                os.unlink(address)  # noqa: PTH108 - pathlib is slow to import
    return sorted(found)


def _finds(name: object) -> bool:
    """Return whether a datagram gets as far as a named socket, whatever kind that is of."""
    try:
        sender = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    except OSError:
        return False
    try:
        sender.sendto(b"trial", name)  # type: ignore[call-overload]
    except OSError as error:
        return error.errno in (errno.EPROTOTYPE, errno.ECONNREFUSED)
    finally:
        sender.close()
    return True


def _forbidden_in(kernel: Kernel, *, isolated: bool) -> list[str]:
    target = os.fork()
    if target == 0:
        _signal.pause()
        os._exit(0)
    try:
        found = ["prctl"] if _succeeds(kernel, "prctl", PR_SET_DUMPABLE, 1, 0, 0, 0) else []
        found += ["parent-death-signal"] if _succeeds(kernel, "prctl", PR_SET_PDEATHSIG, 0, 0, 0, 0) else []
        found += _opened(kernel)
        if not isolated:
            found += [name for name, arguments in _of_others(target) if _succeeds(kernel, name, *arguments)]
        return found + [name for name, arguments in _forbidden(target) if _succeeds(kernel, name, *arguments)]
    finally:
        os.kill(target, _signal.SIGKILL)
        os.waitpid(target, 0)


def _opened(kernel: Kernel) -> list[str]:
    """Try to empty a file of this process's own that is opened for reading, and to open it without any right."""
    found = []
    for mode in (os.O_RDONLY, os.O_ACCMODE):
        for name in ("open", "openat", "openat2"):
            descriptor = os.open(_TRIED_FILE, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, b"trial")
                flags = mode | os.O_TRUNC | os.O_CLOEXEC
                how = flags.to_bytes(8, sys.byteorder) + bytes(16)
                words: dict[str, tuple[int | bytes, ...]] = {
                    "open": (_TRIED_FILE, flags, 0),
                    "openat": (_AT_FDCWD, _TRIED_FILE, flags, 0),
                    "openat2": (_AT_FDCWD, _TRIED_FILE, how, len(how)),
                }
                os.close(kernel.call(name, *words[name]))
            except KernelError:
                continue
            finally:
                found += [] if os.fstat(descriptor).st_size else [f"truncate-{name}"]
                os.close(descriptor)
                os.unlink(_TRIED_FILE)  # noqa: PTH108 - pathlib is slow to import
    return sorted(set(found))


def _of_others(child: int) -> list[tuple[str, tuple[int | bytes | None, ...]]]:
    """Return calls that change priority or processors of another process, to what they are."""
    processors = sum(1 << number for number in os.sched_getaffinity(0)).to_bytes(128, sys.byteorder)
    return [
        ("sched_setaffinity", (child, len(processors), processors)),
        ("setpriority", (os.PRIO_PROCESS, child, os.getpriority(os.PRIO_PROCESS, 0))),
        ("setpriority", (os.PRIO_USER, 0, os.getpriority(os.PRIO_PROCESS, 0))),
    ]


def _forbidden(child: int) -> list[tuple[str, tuple[int | bytes | None, ...]]]:
    word = ctypes.create_string_buffer(8)
    vector = ctypes.addressof(word).to_bytes(8, sys.byteorder) + (8).to_bytes(8, sys.byteorder)
    return [
        ("ptrace", (_PTRACE_SEIZE, child, 0, 0)),
        ("process_vm_readv", (child, vector, 1, vector, 1, 0)),
        ("process_vm_writev", (child, vector, 1, vector, 1, 0)),
        ("kcmp", (os.getpid(), child, 0, 0, 0)),
        ("prlimit64", (child, _RLIMIT_NOFILE, bytes(16), None)),
        ("fcntl", (0, _F_OFD_SETLK, bytes(32))),
        ("sched_setattr", (0, bytes([48, *bytes(47)]), 0)),
        ("ioprio_set", (1, 0, 0)),
        ("bpf", (0, bytes(128), 128)),
        ("perf_event_open", (bytes([1, 0, 0, 0, 112]) + bytes(107), 0, -1, -1, 0)),
        ("userfaultfd", (1,)),
        ("io_uring_setup", (1, bytes(120))),
        ("keyctl", (0, -3, 1)),
        ("add_key", (b"user\0", b"trial\0", b"x", 1, -3)),
        ("unshare", (CLONE_NEWUSER,)),
        ("setns", (0, 0)),
        ("mount", (b"none\0", b"/tmp\0", b"tmpfs\0", 0, None)),
        ("fsopen", (b"tmpfs\0", 0)),
        ("chroot", (b"/\0",)),
        ("personality", (0x0040000,)),
        ("fanotify_init", (0, 0)),
        ("landlock_create_ruleset", (bytes(24), 0, 0)),
        ("seccomp", (1, 0, None)),
        ("shmget", (0, 0, 0o1600)),  # of no size: that is what is wrong, if it gets so far
        ("mq_open", (None, os.O_RDWR, 0, None)),
        ("name_to_handle_at", (-100, b"/\0", bytes(136), bytes(8), 0)),
    ]


def _succeeds(kernel: Kernel, name: str, *arguments: int | bytes | None) -> bool:
    try:
        result = kernel.call(name, *arguments)
    except KernelError as error:
        # EFAULT or EINVAL would mean that the call itself was reached and only its arguments were wrong.
        return error.errno in (errno.EFAULT, errno.EINVAL)
    if name in ("io_uring_setup", "userfaultfd", "perf_event_open", "bpf", "fsopen", "fanotify_init"):
        os.close(result)
    return True
