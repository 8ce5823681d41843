"""This worker's connections to the workers of the other machines of its group.

Law: one machine that ends without having finished ends all. The first machine's worker has a connection to that of
every other, and each other's to the first.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from glasshouse.workloads.distributed.machine_streams import Stream, answer, call, prepare

__all__ = ["STORE_PORT", "Machines"]

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


class Machines:
    """This worker's place among those of its group.

    Args:
        relay: the end of the agent's relay; belongs to this object from now on.
        secret: the group secret.
        machine, machines: which this is, and how many there are.
    """

    def __init__(self, relay: socket.socket, secret: bytes, *, machine: int, machines: int) -> None:
        self.machine, self.machines = machine, machines
        self._relay, self._secret = relay, secret
        self._asked: dict[int, SimpleQueue[socket.socket | None]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._lines: list[socket.socket] = []
        self._store: socket.socket | None = None
        self._over = False
        self._on_lost: Callable[[int], None] = lambda _machine: None

    def start(self, on_lost: Callable[[int], None]) -> None:
        """Answer from now on; on every machine but the first, lead to the first one's store.

        Args:
            on_lost: called, in a thread, with a machine whose worker ended before it had finished. The first machine
                hears of every other, and every other of the first: one that is lost so ends them all.
        """
        self._on_lost = on_lost
        threading.Thread(target=self._listen, name="glasshouse-relay", daemon=True).start()
        if self.machine:
            threading.Thread(target=self._hold_on, name="glasshouse-first", daemon=True).start()
            self._store = socket.create_server((_LOOPBACK, STORE_PORT))
            threading.Thread(target=self._forward, args=(self._store,), name="glasshouse-store", daemon=True).start()

    def finish(self) -> None:
        """Tell the other workers that this one ends in order."""
        with self._lock:
            self._over = True
            lines = list(self._lines)
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
                line.settimeout(_FINISHING_S)
                line.recv(1)  # what was said is on its way when the other side is done too, or some time has passed

    def dial(self, machine: int, port: int) -> socket.socket:
        """Return a connection over this machine's loopback that leads to a listener on another's.

        Raises:
            OSError: there is none.
        """
        return self._inside(self._reach(machine, port))

    def _inside(self, stream: Stream) -> socket.socket:
        with socket.create_server((_LOOPBACK, 0)) as listener:
            outer = socket.create_connection(listener.getsockname())
            inner, caller = listener.accept()
            if caller != outer.getsockname():
                inner.close()
                stream.close()
                raise ConnectionAbortedError("another process came first")
        prepare(inner)
        prepare(outer)
        stream.join(inner)
        return outer

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
            connection = _within(answers, _CALL_S)
        finally:
            with self._lock:
                del self._asked[number]
        if connection is None:
            raise ConnectionRefusedError(f"machine {machine} cannot be reached")
        try:
            return call(connection, self._secret, own=self.machine, machine=machine, port=port)
        except (OSError, EOFError):
            connection.close()
            raise ConnectionRefusedError(f"machine {machine} is not who it should be") from None

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
                self._meet(connection)
                continue
            with self._lock:
                waiting = self._asked.get(number)
            if waiting is not None:
                waiting.put(connection)
            elif connection is not None:
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        if not self._strangers.acquire(blocking=False):
            connection.close()  # one of ours calls again
            return
        threading.Thread(target=self._greet, args=(connection,), name="glasshouse-called", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            stream = answer(connection, self._secret, own=self.machine, machines=self.machines)
        except (OSError, EOFError):
            connection.close()
            return
        finally:
            self._strangers.release()
        if stream.port == _WORKER_PORT:
            self._watch(stream.caller, self._inside(stream))
            return
        try:
            inside = _patiently(lambda: socket.create_connection((_LOOPBACK, stream.port), timeout=_CALL_S), _CALL_S)
        except OSError:
            stream.close()
            return
        prepare(inside)
        stream.join(inside)

    def _hold_on(self) -> None:
        """Keep a line to the first machine's worker; its end is how either learns of the other's."""
        try:
            line = _patiently(lambda: self.dial(0, _WORKER_PORT), _STORE_S)
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
            threading.Thread(target=self._lead_to_store, args=(inside,), daemon=True).start()

    def _lead_to_store(self, inside: socket.socket) -> None:
        try:
            stream = _patiently(lambda: self._reach(0, STORE_PORT), _STORE_S)
        except OSError:
            inside.close()
            return
        prepare(inside)
        stream.join(inside)


def _patiently(action: Callable[[], _T], within_s: float) -> _T:
    """Do `action`, again while it fails, for at most `within_s`; raises its `OSError`."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return action()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _within(answers: SimpleQueue[socket.socket | None], seconds: float) -> socket.socket | None:
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return None
