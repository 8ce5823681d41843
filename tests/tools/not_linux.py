"""Runs a Python program as on a system that is not Linux: what Linux alone has is missing, or fails.

It takes the arguments of an interpreter: ``not_linux.py [-I] [-B] [-X OPTION] (-m MODULE | -c CODE) ARGUMENTS``.
NOT_LINUX_PYTHON names a program that runs this file: processes that the program starts are under it too.
"""

# What has to be missing when the standard library is imported is taken away before.
# ruff: noqa: E402
from __future__ import annotations

import _signal
import _socket
import errno
import os
import select
import sys
import time
from typing import Any

sys.platform = "darwin"
# Where the interpreter looks up how it was built goes by the platform.
os.environ["_PYTHON_SYSCONFIGDATA_NAME"] = "_sysconfigdata__linux_x86_64-linux-gnu"

_MISSING = {
    select: ("epoll", *(name for name in dir(select) if name.startswith("EPOLL"))),
    _socket: (
        "SO_PEERCRED", "SO_PASSCRED", "SO_PASSSEC", "SO_PEERSEC", "SCM_CREDENTIALS", "SOCK_CLOEXEC", "SOCK_NONBLOCK",
        "MSG_CMSG_CLOEXEC",
        "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "SO_DOMAIN", "SO_PROTOCOL", "SO_BINDTODEVICE", "SO_MARK",
    ),
    _signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
    os: (
        "memfd_create", "pidfd_open", "eventfd", "splice", "pipe2", "waitid", "P_PIDFD", "O_PATH", "O_TMPFILE",
        "O_NOATIME", "O_DIRECT", "sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "getrandom",
        "copy_file_range", "posix_fadvise", "posix_fallocate", "setns", "unshare", "getresuid", "getresgid",
        "setresuid", "setresgid", "listxattr", "getxattr", "setxattr", "removexattr", "fdatasync",
    ),
}  # fmt: skip
for module, names in _MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

import ctypes
import fcntl
import resource
import socket

for name in [
    name
    for name in dir(fcntl)
    if name.startswith(("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL", "F_SETPIPE", "F_GETPIPE", "F_OFD"))
]:
    delattr(fcntl, name)
del resource.prlimit

_HIDDEN = ("/proc", "/sys", "/dev/shm")
_OF_LINUX = ("prctl", "unshare", "mount", "memfd_secret", "mlockall", "setns", "pidfd_open", "syscall", "capset")
_NAME_BYTES = 104


def _refuse_hidden(path: Any) -> None:
    if isinstance(path, (str, bytes, os.PathLike)) and f"{os.fsdecode(path)}/".startswith(
        tuple(f"{one}/" for one in _HIDDEN)
    ):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and arguments:
        _refuse_hidden(arguments[0])


def _looking(name: str) -> None:
    real = getattr(os, name)

    def look(path: Any, *arguments: Any, **options: Any) -> Any:
        _refuse_hidden(path)
        return real(path, *arguments, **options)

    setattr(os, name, look)


def _sendfile(*_arguments: Any) -> int:
    raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))


def _named(name: str) -> None:
    real = getattr(socket.socket, name)

    def call(self: socket.socket, address: Any) -> Any:
        if self.family == socket.AF_UNIX:
            where = os.fsencode(address)
            if where[:1] == b"\0" or len(where) >= _NAME_BYTES:
                raise OSError(errno.EINVAL, "AF_UNIX path too long, or no path")
        return real(self, address)

    setattr(socket.socket, name, call)


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in _OF_LINUX:
            raise AttributeError(name)
        return super().__getattr__(name)


def _pretend() -> None:
    real = os.uname()
    os.uname = lambda: os.uname_result(("Darwin", real.nodename, "24.0.0", "Darwin Kernel", real.machine))  # type: ignore[assignment]
    os.sendfile = _sendfile
    for name in ("stat", "lstat", "readlink", "access", "statvfs"):
        _looking(name)
    for name in ("bind", "connect"):
        _named(name)
    ctypes.CDLL = _Library  # type: ignore[misc]
    sys.addaudithook(_heard)


def main(arguments: list[str]) -> None:
    left = list(arguments)
    while left and left[0] in ("-I", "-B", "-X", "-u"):
        if left.pop(0) == "-X":
            left.pop(0)
    kind, what = left.pop(0), left.pop(0)
    sys.argv = [what, *left]
    sys.executable = os.environ["NOT_LINUX_PYTHON"]
    del sys.path[0]  # this file's folder
    _pretend()
    import runpy

    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(sys.argv[1:])
