"""Between the machines of one group: a process that makes connections, and cannot read what goes over them.

It is forked by the agent at the start, before there is a secret, and given by the agent which machine this is; then it
listens at that machine's address, and calls the others when the worker asks. Each connection is handed to the
worker as a descriptor (SCM_RIGHTS); the worker authenticates and seals it (`workloads.relay`). Laws: it holds no
key and no descriptor of the agent's; strangers cost it one descriptor for a moment; it does not outlive the
agent; the worker has its other end only with the grant, and only in a job whose owner allows the traffic.

```
worker → relay   1, machine, number       call that machine
relay → worker   1, machine, number       it is called: with the descriptor
relay → worker   2, machine, number       it cannot be
relay → worker   3, 0, 0                  a call came in: with the descriptor
```
Each is one message of `MESSAGE` over a SOCK_SEQPACKET socket.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import signal
import socket
import struct
import time

from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.confine import seccomp
from glasshouse.runtime.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, REAL, detach, end_child
from glasshouse.runtime.loop import interrupted
from glasshouse.runtime.syscalls import KernelError

MESSAGE = struct.Struct(">BBI")
CALL, FAILED, CALLED = 1, 2, 3

_ANSWER_S = 5.0
_CALL_S = 10.0
_BACKLOG = 64
_MOST_CALLS = 256


class Relay:
    """The agent's handle on its relay; `stop` closes `worker_end`, which the worker is given."""

    def __init__(self, pid: int, commands: socket.socket, worker_end: socket.socket) -> None:
        self.pid, self.worker_end = pid, worker_end
        self._commands = commands

    def listen(self, machine: int) -> None:
        """Have it listen at the address of this machine; raises `PlatformError`: `platform-unsupported`."""
        try:
            self._commands.send(bytes([machine]))
            answer = self._commands.recv(1)
        except OSError:
            answer = b""
        if answer != b"\1":
            raise PlatformError(
                Code.PLATFORM,
                "this machine cannot listen for the others of its group",
                hint="its address among the peers is another's, or its port is taken",
            )

    def stop(self) -> None:
        """End it; may be called twice."""
        if self.pid:
            self._commands.close()
            self.worker_end.close()
            end_child(self.pid)
            self.pid = 0


def start(peers: tuple[str, ...]) -> Relay:
    """Fork it, before this process has a thread or a secret; `peers` is ``host:port`` of every machine, in order."""
    commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker_end, calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            _withdraw({theirs.fileno(), calls.fileno()})
            _Switch(theirs, calls, peers).serve()
        finally:
            os._exit(0)
    theirs.close()
    calls.close()
    commands.settimeout(_ANSWER_S)
    return Relay(pid, commands, worker_end)


def _withdraw(keep: set[int]) -> None:
    """Die with the agent, keep no descriptor of its, start nothing."""
    REAL.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    detach(keep)
    with contextlib.suppress(KernelError):  # what counts is observed on agent and worker; this holds nothing
        REAL.drop_capabilities()
        REAL.prctl(PR_SET_NO_NEW_PRIVS, 1)
        REAL.seccomp(seccomp.sealed_agent(REAL.machine, own_pid=os.getpid()))


class _Switch:
    """The relay's own side: one thread, one poll."""

    def __init__(self, commands: socket.socket, calls: socket.socket, peers: tuple[str, ...]) -> None:
        self._commands, self._calls = commands, calls
        split = [peer.rpartition(":") for peer in peers]
        self._peers = [(host.removeprefix("[").removesuffix("]"), int(port)) for host, _, port in split]
        self._listener: socket.socket | None = None
        self._calling: dict[int, tuple[socket.socket, bytes, float]] = {}
        self._poll = select.poll()
        self._poll.register(commands, select.POLLIN)
        self._poll.register(calls, select.POLLIN)
        calls.setblocking(False)

    def serve(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll(1000 if self._calling else None):
                if descriptor == self._commands.fileno():
                    if not self._obey():
                        return
                elif descriptor == self._calls.fileno():
                    if not self._asked():
                        return
                elif self._listener is not None and descriptor == self._listener.fileno():
                    self._accept(self._listener)
                elif descriptor in self._calling:
                    self._settle(descriptor)
            for descriptor in [one for one, (_, _, until) in self._calling.items() if time.monotonic() > until]:
                self._settle(descriptor, late=True)

    def _obey(self) -> bool:
        command = self._commands.recv(8)
        if not command:
            return False
        try:
            self._listener = _listener(*self._peers[command[0]])
            self._poll.register(self._listener, select.POLLIN)
            self._commands.send(b"\1")
        except (OSError, IndexError):
            self._commands.send(b"\0")
        return True

    def _asked(self) -> bool:
        try:
            with interrupted():
                data = self._calls.recv(64)
        except BlockingIOError:
            return True
        if len(data) == MESSAGE.size and data[0] == CALL:
            self._call(data, data[1])
        return bool(data)

    def _call(self, asked: bytes, machine: int) -> None:
        try:
            if machine >= len(self._peers) or len(self._calling) >= _MOST_CALLS:
                raise OSError("no such machine, or too many calls")
            family, _, _, _, where = socket.getaddrinfo(*self._peers[machine], type=socket.SOCK_STREAM)[0]
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            if connection.connect_ex(where) not in (0, errno.EINPROGRESS):
                connection.close()
                raise OSError("nothing there")
        except OSError:
            self._send(bytes([FAILED]) + asked[1:])
            return
        self._calling[connection.fileno()] = (connection, asked, time.monotonic() + _CALL_S)
        self._poll.register(connection, select.POLLOUT)

    def _settle(self, descriptor: int, *, late: bool = False) -> None:
        connection, asked, _ = self._calling.pop(descriptor)
        self._poll.unregister(descriptor)
        with connection:
            if late or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._send(bytes([FAILED]) + asked[1:])
            else:
                self._send(asked, connection)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is gone again
            connection = listener.accept()[0]
            with connection:
                self._send(MESSAGE.pack(CALLED, 0, 0), connection)

    def _send(self, message: bytes, connection: socket.socket | None = None) -> None:
        """Send to the worker; one that does not read loses the connection, and calls again if it was its own."""
        passed = [] if connection is None else [connection.fileno()]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
        with contextlib.suppress(OSError):
            self._calls.sendmsg([message], ancillary, socket.MSG_NOSIGNAL)


def _listener(host: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # Behind address translation the others have an address of this machine that it does not have itself.
            listener.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
