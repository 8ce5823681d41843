"""What a library gets that insists on listening, where no socket may have a name: a socket at which nothing arrives.

NVIDIA's ends where it cannot listen. Told that it does, on a socket that does not, its thread found that one hung up
at each look, for ever, and took a processor. So `listen` waits for a process of this sandbox's, which puts one end of a
pair in the socket's place (seccomp_unotify(2)). Laws: that process has no right that the worker lacks but to answer,
and is not relied on: whatever steers it could at most let the call go on, which the kernel refuses for a socket without
a name. It reads nothing of another process but the number of the descriptor.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import os
import struct

from glasshouse.runtime import kernel as linux
from glasshouse.runtime import syscalls
from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.syscalls import KernelError

# linux/seccomp.h; the first argument of the call lies behind id, pid, flags, number, architecture and address.
_RECEIVE, _SEND, _ADD = 0xC0502100, 0xC0182101, 0x40182103
_ID_BYTES, _DESCRIPTOR, _NOTICE_BYTES = 8, 32, 256
_AT_NUMBER = 1
# Of the filter: BPF, and answers (linux/filter.h, linux/seccomp.h).
_LOAD, _JEQ, _RET, _WAIT, _ALLOW = 0x20, 0x15, 0x06, 0x7FC00000, 0x7FFF0000


def notices(kernel: Kernel) -> int | None:
    """Have each `listen` of this process and its children wait for an answer; None where the kernel has no such thing.

    The descriptor is what it is answered by; where nothing holds it any more, the call fails.
    """
    number = syscalls.number("listen", kernel.machine)
    # A foreign ABI's call of that number is refused by the worker's filter, and a refusal comes first.
    lines = ((_LOAD, 0, 0, 0), (_JEQ, 0, 1, number), (_RET, 0, 0, _WAIT), (_RET, 0, 0, _ALLOW))
    program = b"".join(struct.pack("=HBBI", *line) for line in lines)
    try:
        return kernel.seccomp(program, linux.SECCOMP_SPEC_ALLOW | linux.NEW_LISTENER)
    except OSError:
        return None  # before Linux 5.0, or what started the container waits for calls itself


def start(kernel: Kernel, descriptor: int, program: bytes) -> None:
    """Answer in an orphan of this process's group, under the filter `program`; the descriptor is closed here.

    The orphan is confined before it begins, and that before this returns: a script that found it open would steer it.
    """
    child = os.fork()
    if child == 0:
        try:
            ends = [end.detach() for end in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)]
            linux.close_all_but({descriptor, *ends})
            kernel.prctl(linux.PR_SET_DUMPABLE, 0)
            kernel.seccomp(program)
            if os.fork() == 0:
                _answer(kernel, descriptor, ends[0])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(descriptor)


def _answer(kernel: Kernel, descriptor: int, silent: int) -> None:
    while True:
        notice = ctypes.create_string_buffer(_NOTICE_BYTES)
        try:
            kernel.call("ioctl", descriptor, _RECEIVE, ctypes.addressof(notice))
            number, place = notice.raw[:_ID_BYTES], notice.raw[_DESCRIPTOR : _DESCRIPTOR + 4]
            flags = _AT_NUMBER.to_bytes(4, "little") + silent.to_bytes(4, "little")
            put = number + flags + place + os.O_CLOEXEC.to_bytes(4, "little")
            try:
                kernel.call("ioctl", descriptor, _ADD, put)
            except KernelError as error:
                # Before Linux 5.9, or no descriptor's number: it stays as it is.
                if error.errno == errno.ENOENT:
                    raise
            kernel.call("ioctl", descriptor, _SEND, number + bytes(16))
        except KernelError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):  # the caller has ended, or was called away
                return
