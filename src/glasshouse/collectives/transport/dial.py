"""How one rank reaches another: through the network, or without it where both are on one machine.

Laws: nothing here believes the store; whom a connection leads to is shown by the handshake on it. Sockets without the
network lead to processes of the own user or of root alone, whom the kernel names.
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

__all__ = [
    "Dialler",
    "Direct",
    "HandedOver",
    "check_own_limits",
    "dial_local",
    "enlarge",
    "handed_over",
    "local_address",
    "looked_up",
    "of_this_user",
    "within",
]

_SOCKET_BUFFER_BYTES = 1 << 20
"""A chunk; more would lie in memory that the caches have forgotten when it is read."""
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group


Answer = TypeVar("Answer")


class Dialler(Protocol):
    """How connections reach other ranks where they do not simply go through the network.

    `local` says whether ranks of this machine may meet without it, and go on through shared memory.
    """

    local: bool

    def address(self, host: str, port: int) -> tuple[str, int]:
        """Return what to leave in the store for a listener at `host` and `port` of this machine."""

    def dial(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """Return a connection with the listener that is known by `host` and `port` in the store.

        Raises:
            OSError: there is none yet; it is tried again until the time is up.
        """


class Direct:
    """Through the network; or not, where a rank is on this machine.

    Args:
        local: False for the network in any case.
    """

    def __init__(self, *, local: bool = True) -> None:
        self.local = local

    def address(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    def dial(self, host: str, port: int, timeout_s: float) -> socket.socket:
        until = time.monotonic() + timeout_s
        info = looked_up(host, port, timeout_s)
        connection = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            enlarge(connection)
            connection.settimeout(max(until - time.monotonic(), 0.001))
            connection.connect(info[4])
        except BaseException:
            connection.close()
            raise
        return connection


class HandedOver:
    """Not at all: where a process may make no socket with a name, another one makes each connection and hands it over.

    Args:
        listen: returns a socket on which connections come, and the name by which other ranks call it; raises `OSError`.
        call: returns a connection with the rank that is called by a name, or raises `OSError`, within so many seconds.
    """

    local = True

    def __init__(
        self, listen: Callable[[], tuple[socket.socket, str]], call: Callable[[str, float], socket.socket]
    ) -> None:
        self.listen, self.call = listen, call

    def address(self, _host: str, _port: int) -> tuple[str, int]:
        return "handed-over", 1

    def dial(self, _host: str, _port: int, _timeout_s: float) -> socket.socket:
        raise ConnectionRefusedError("there is no network")


def handed_over(listener: socket.socket) -> socket.socket | None:
    """Return the next connection that came on what `HandedOver.listen` returned; None when nothing comes any more.

    Raises:
        OSError: none came, or this process has no room for it.
    """
    said, descriptors, flags, _ = socket.recv_fds(listener, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if descriptors:
        connection = socket.socket(fileno=descriptors[0])
        connection.set_inheritable(False)  # before Python 3.13 `recv_fds` takes no notice of its flags
        return connection
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if said:
        raise ConnectionAbortedError("a byte beside which nothing came")
    return None


def within(limit_s: float, call: Callable[[], Answer]) -> Answer:
    """Return what `call()` returns, if it returns in time; a call that never returns keeps a daemon thread.

    Args:
        limit_s: how long to wait for it; with 0 or less it is not called.
        call: runs in a thread of its own.

    Raises:
        TimeoutError: it did not; whatever else `call` raises.
        CollectiveError: `collective-aborted`, this process can start no thread for it.
    """
    answers: list[Answer] = []
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
    """Return the first of what `getaddrinfo` finds; it may ask servers that do not answer.

    Raises:
        OSError: nothing, or not in `limit_s`.
        UnicodeError: a name that no host can have.
    """
    found: list[tuple[Any, ...]] = within(limit_s, lambda: socket.getaddrinfo(host, port, type=kind))
    return found[0]


def check_own_limits(error: BaseException) -> None:
    """Let no other be blamed for an error that says what this process may not have.

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
    """Return the abstract address of a rank's listener: known to its network namespace, and to no file system."""
    return b"\0glasshouse/" + name.encode("ascii")


def dial_local(name: str) -> socket.socket | None:
    """Return a connection with a rank that listens by that name on this machine, None if there is none."""
    with contextlib.ExitStack() as undone, contextlib.suppress(OSError):  # another machine, or an earlier run's name
        connection = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.setblocking(False)  # one whose queue is full would keep us waiting
        connection.connect(local_address(name))
        if of_this_user(connection):
            undone.pop_all()
            return connection
    return None


def of_this_user(connection: socket.socket) -> bool:
    """Return whether a process of the own user or of root is at the other end: any other may be anything."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] in (os.geteuid(), 0)


def enlarge(connection: socket.socket) -> None:
    """Give a connection through the network, or a listener for such, the buffers that frames need."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
