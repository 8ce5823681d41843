"""How one rank reaches another: through the network, or without it where both are on one machine.

Laws: an address is a place to try; the handshake on a connection proves which rank it leads to. Sockets without the
network lead to processes of the own user or of root alone, as the kernel attests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from glasshouse.errors import Code, CollectiveError

_SOCKET_BUFFER_BYTES = 1 << 20  # a chunk; more would lie in memory that the caches have forgotten when it is read
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group

_Answer = TypeVar("_Answer")


class Dialler(Protocol):
    """Reaches other ranks; `local` if those of this machine may do without it, and share memory."""

    local: bool

    def address(self, host: str, port: int) -> tuple[str, int]:
        """Return the address for the store of a listener at `host` and `port` of this machine."""

    def dial(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """Return a connection with the listener at that address of the store.

        Raises:
            OSError: there is none yet; it is tried again until the time is up.
        """


class Direct(Dialler):
    """Dials through the network; or without it, where a rank is on this machine and `local` is true."""

    def __init__(self, *, local: bool = True) -> None:
        self.local = local

    def address(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    def dial(self, host: str, port: int, timeout_s: float) -> socket.socket:
        until = time.monotonic() + timeout_s
        info = looked_up(host, port, timeout_s)
        with contextlib.ExitStack() as undone:
            connection = undone.enter_context(socket.socket(info[0], socket.SOCK_STREAM))
            enlarge(connection)
            connection.settimeout(max(until - time.monotonic(), 0.001))
            connection.connect(info[4])
            undone.pop_all()
        return connection


class HandedOver(Dialler):
    """Dials nothing: where a process may make no socket with a name, another one makes each connection and passes it.

    Args:
        listen: returns a socket on which connections come, and this rank's name for other ranks; raises `OSError`.
        call: returns a connection with the rank of a name, or raises `OSError`, within so many seconds.
    """

    def __init__(
        self, listen: Callable[[], tuple[socket.socket, str]], call: Callable[[str, float], socket.socket]
    ) -> None:
        self.local = True
        self.listen, self.call = listen, call

    def address(self, _host: str, _port: int) -> tuple[str, int]:
        return "handed-over", 1

    def dial(self, _host: str, _port: int, _timeout_s: float) -> socket.socket:
        raise ConnectionRefusedError("there is no network")


def handed_over(listener: socket.socket) -> socket.socket | None:
    """Return the next connection that came on the socket of `HandedOver.listen`; None when its other end is closed.

    Raises:
        OSError: none came, or this process has no room for it.
    """
    data, descriptors, flags, _ = socket.recv_fds(listener, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if descriptors:
        connection = socket.socket(fileno=descriptors[0])
        connection.set_inheritable(False)  # before Python 3.13 `recv_fds` takes no notice of its flags
        return connection
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if data:
        raise ConnectionAbortedError("a byte beside which nothing came")
    return None


def within(limit_s: float, call: Callable[[], _Answer]) -> _Answer:
    """Return the result of `call()`, run in a daemon thread, which stays where the call never returns.

    With a limit of 0 or less it is not called.

    Raises:
        TimeoutError: it did not return in time; whatever else `call` raises.
        CollectiveError: `collective-aborted`, this process can start no thread for it.
    """
    answers: list[_Answer] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # raised again where it is waited for
            failures.append(error)

    if limit_s > 0:
        thread = threading.Thread(target=run, name="glasshouse-within", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            raise CollectiveError(Code.COLLECTIVE_ABORTED, "this process can start no more threads") from None
        thread.join(limit_s)
    if failures:
        raise failures[0]
    if not answers:
        raise TimeoutError("no answer in time")
    return answers[0]


def looked_up(host: str, port: int, limit_s: float, *, kind: int = socket.SOCK_STREAM) -> tuple[Any, ...]:
    """Return the first result of `getaddrinfo`, which may ask servers that do not answer.

    Raises:
        OSError: nothing, or not in `limit_s`.
        UnicodeError: a name that no host can have.
    """
    found: list[tuple[Any, ...]] = within(limit_s, lambda: socket.getaddrinfo(host, port, type=kind))
    return found[0]


def check_own_limits(error: BaseException) -> None:
    """Refuse to go on for an error by this process's own limits, which another process did not cause.

    Raises:
        CollectiveError: `collective-aborted`, it is such an error.
    """
    if isinstance(error, OSError) and error.errno in _OWN_LIMITS:
        raise CollectiveError(
            Code.COLLECTIVE_ABORTED,
            "this process may open no more files, which connections are, or map no more memory",
            hint="raise the limits (ulimit -n, ulimit -v); a group takes four files for each other rank of its machine",
        ) from None


def local_address(name: str) -> bytes:
    """Return the abstract address of a rank's listener, in its network namespace and in no file system."""
    return b"\0glasshouse/" + name.encode("ascii")


def dial_local(name: str) -> socket.socket | None:
    """Return a connection with the rank that listens by that name on this machine, None if there is none."""
    with contextlib.ExitStack() as undone, contextlib.suppress(OSError):  # another machine, or an earlier run's name
        connection = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.setblocking(False)  # a listener with a full queue would keep us waiting
        connection.connect(local_address(name))
        if of_this_user(connection):
            undone.pop_all()
            return connection
    return None


def of_this_user(connection: socket.socket) -> bool:
    """Return whether a process of the own user or of root is at the other end: any other may be an attacker's."""
    return user_of(connection) in (os.geteuid(), 0)


def user_of(connection: socket.socket) -> int:
    """Return the user whose process is at the other end of a Unix socket, as the kernel attests."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user


def enlarge(connection: socket.socket) -> None:
    """Give a connection through the network, or a listener for such, the buffers that frames need."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
