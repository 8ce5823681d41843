"""A debugger in a few lines: attaches to a process or thread, holds it or lets it run on, as gdb or strace do."""

from __future__ import annotations

import ctypes
import os
import signal

_CONTINUE, _SEIZE, _ATTACH = 7, 0x4206, 16
_WALL = 0x40000000
_FOLLOW_FORKS = 2  # PTRACE_O_TRACEFORK

_libc = ctypes.CDLL(None, use_errno=True)


class Tracer:
    """A process that is attached to another until that ends.

    Args:
        pid: process or thread.
        stopping: stop it and hold it, as a debugger does; otherwise let it run, as strace does.
        follow: trace what it forks too, as strace -f does.

    Raises:
        PermissionError: the kernel refused.
    """

    def __init__(self, pid: int, *, stopping: bool, follow: bool = False) -> None:
        reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _trace(pid, stopping, follow, writer)
            finally:
                os._exit(0)
        os.close(writer)
        answer = os.read(reader, 2)
        os.close(reader)
        if answer != b"ok":
            self.close()
            raise PermissionError("the kernel refused the debugger")

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _trace(pid: int, stopping: bool, follow: bool, writer: int) -> None:
    options = ctypes.c_long(_FOLLOW_FORKS if follow else 0)
    if _libc.ptrace(_ATTACH if stopping else _SEIZE, ctypes.c_long(pid), None, options) != 0:
        os.write(writer, b"no")
        return
    if stopping:
        os.waitpid(pid, _WALL)
    os.write(writer, b"ok")
    while True:
        found, status = os.waitpid(-1 if follow else pid, _WALL)
        if not os.WIFSTOPPED(status):
            if follow:
                continue
            return
        received = os.WSTOPSIG(status)
        _libc.ptrace(
            _CONTINUE, ctypes.c_long(found), None, ctypes.c_long(0 if received == signal.SIGTRAP else received)
        )
