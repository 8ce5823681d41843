"""This worker's connections to the workers of the other machines of its group.

Law: one machine that ends without having finished ends all. The first machine's worker has a connection to that of
every other, and each other's to the first.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Lock, Thread
from typing import TypeVar

from glasshouse.workloads.distributed.machine_streams import Stream, answer, call, prepare

STORE_PORT = 29400
"""Of the group's store on the first machine's loopback, and of the way to it on every other's."""

_LOOPBACK = "127.0.0.1"
_CALL_S = 15.0
_STORE_S = 300.0
_RETRY_S = 0.1
_FINISHING_S = 1.0
_STRANGERS = 32
_WORKER_PORT = 0

# As the agent's relay has it.
_MESSAGE = struct.Struct(">BBI")
_CALL, _FAILED, _CALLED = 1, 2, 3

_T = TypeVar("_T")


class MachineGroup:
    """This worker's place, `machine` of `machines`, in its group; the end of the relay belongs to this object."""

    def __init__(self, relay: socket.socket, secret: bytes, *, machine: int, machines: int) -> None:
        self.machine, self.machines = machine, machines
        self._relay, self._secret = relay, secret
        self._asked: dict[int, SimpleQueue[socket.socket | None]] = {}
        self._count = 0
        self._lock = Lock()
        self._strangers = BoundedSemaphore(_STRANGERS)
        self._lines: list[socket.socket] = []
        self._store: socket.socket | None = None
        self._over = False
        self._on_lost: Callable[[int], None] = lambda _machine: None

    def start(self, on_lost: Callable[[int], None]) -> None:
        """Answer calls from now on; on every machine but the first, lead to the first one's store.

        Args:
            on_lost: called, in a thread, with a machine whose worker ended before it had finished: on the first machine
                with any other, on every other with the first. One that is lost so ends them all.
        """
        self._on_lost = on_lost
        Thread(target=self._listen, name="glasshouse-relay", daemon=True).start()
        if self.machine:
            Thread(target=self._watch_first, name="glasshouse-first", daemon=True).start()
            self._store = socket.create_server((_LOOPBACK, STORE_PORT))
            Thread(target=self._forward, args=(self._store,), name="glasshouse-store", daemon=True).start()

    def finish(self) -> None:
        """End in order, as the other workers see it."""
        with self._lock:
            self._over = True
            lines = list(self._lines)
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
                line.settimeout(_FINISHING_S)
                line.recv(1)  # the end is on its way when the other side has finished too, or some time has passed

    def dial(self, machine: int, port: int) -> socket.socket:
        """Return a connection over this machine's loopback that leads to a listener on another's; raises `OSError`."""
        return _over_loopback(self._reach(machine, port))

    def _reach(self, machine: int, port: int) -> Stream:
        if not 0 <= machine < self.machines or machine == self.machine:
            raise OSError(f"no other machine {machine}")
        answers: SimpleQueue[socket.socket | None] = SimpleQueue()
        with self._lock:
            self._count += 1
            number = self._count
            self._asked[number] = answers
        try:
            self._relay.send(_MESSAGE.pack(_CALL, machine, number))
            connection = answers.get(timeout=_CALL_S)
        except Empty:
            connection = None
        finally:
            with self._lock:
                del self._asked[number]
        if connection is None:
            raise ConnectionRefusedError(f"machine {machine} cannot be reached")
        try:
            return call(connection, self._secret, own=self.machine, machine=machine, port=port)
        except (OSError, EOFError):
            connection.close()
            raise ConnectionRefusedError(f"machine {machine} did not prove itself") from None

    def _listen(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._relay, 64, 1)
            except OSError:
                return
            if len(data) != _MESSAGE.size:
                return  # the agent is gone, and this process a moment later
            kind, _, number = _MESSAGE.unpack(data)
            connection = socket.socket(fileno=descriptors[0]) if descriptors else None
            if kind == _CALLED and connection is not None:
                if self._strangers.acquire(blocking=False):
                    Thread(target=self._greet, args=(connection,), name="glasshouse-called", daemon=True).start()
                else:
                    connection.close()  # one of ours calls again
                continue
            with self._lock:
                waiting = self._asked.get(number)
            if waiting is not None:
                waiting.put(connection)
            elif connection is not None:
                connection.close()

    def _greet(self, connection: socket.socket) -> None:
        try:
            stream = answer(connection, self._secret, own=self.machine, machines=self.machines)
        except (OSError, EOFError):
            connection.close()
            return
        finally:
            self._strangers.release()
        if stream.port == _WORKER_PORT:
            self._watch(stream.caller, _over_loopback(stream))
            return
        try:
            stream.join(_repeat(lambda: socket.create_connection((_LOOPBACK, stream.port), timeout=_CALL_S), _CALL_S))
        except OSError:
            stream.close()

    def _watch_first(self) -> None:
        """Hold a line to the first machine's worker; its end is how either learns of the other's."""
        try:
            line = _repeat(lambda: self.dial(0, _WORKER_PORT), _STORE_S)
        except OSError:
            self._on_lost(0)
            return
        self._watch(0, line)

    def _watch(self, machine: int, line: socket.socket) -> None:
        with self._lock:
            self._lines.append(line)
            over = self._over
        if over:
            self.finish()
            return
        try:
            in_order = not line.recv(1)
        except OSError:
            in_order = False
        if not in_order and not self._over:
            self._on_lost(machine)

    def _forward(self, listener: socket.socket) -> None:
        while True:
            try:
                inside = listener.accept()[0]
            except OSError:
                return
            Thread(target=self._lead_to_store, args=(inside,), daemon=True).start()

    def _lead_to_store(self, inside: socket.socket) -> None:
        try:
            stream = _repeat(lambda: self._reach(0, STORE_PORT), _STORE_S)
        except OSError:
            inside.close()
            return
        stream.join(inside)


def _over_loopback(stream: Stream) -> socket.socket:
    """Return a connection of the loopback that is joined with a stream."""
    with socket.create_server((_LOOPBACK, 0)) as listener:
        outer = socket.create_connection(listener.getsockname())
        inner, caller = listener.accept()
        if caller != outer.getsockname():
            inner.close()
            stream.close()
            raise ConnectionAbortedError("another process came first")
    prepare(outer)
    stream.join(inner)
    return outer


def _repeat(action: Callable[[], _T], within_s: float) -> _T:
    """Do `action`, again while it fails, for at most `within_s`; raises its `OSError`."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return action()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)
