"""Frames between agent and worker over a Unix socket.

Laws: plaintext passes through one fixed buffer that is zeroed after every frame, and is never copied into
another object here; the worker cannot make the agent hold more than one frame, nor make it wait.
"""

from __future__ import annotations

import array
import socket
import time
from collections.abc import Callable, Sequence

from glasshouse.errors import Code, FormatError, RunError
from glasshouse.runtime.loop import Loop, interrupted, refuse_descriptors
from glasshouse.runtime.worker.worker_messages import Message, parse
from glasshouse.wire import frames
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.crypto import zero

_HEADER_BYTES = 5
# Per turn of the loop, so that a worker that never stops sending cannot keep signals and alarms waiting. Bytes alone
# bound nothing: with each may come a descriptor, and what closing it costs (an inotify's: a millisecond) is ours.
_BYTES_PER_TURN = 8 << 20
_TURN_S = 0.05
# What a worker that has ended left in the socket is read within this, or not at all.
_DRAIN_S = 5.0


class WorkerLink:
    """The agent's end of the control socket.

    It owns `connection`. What `on_data` is called with is valid until that returns; `on_closed` is called once.
    """

    def __init__(
        self,
        connection: socket.socket,
        loop: Loop,
        *,
        on_message: Callable[[Message], None],
        on_data: Callable[[memoryview], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._socket, self._loop = connection, loop
        self._on_message, self._on_data, self._on_closed = on_message, on_data, on_closed
        self._header = bytearray(_HEADER_BYTES)
        self._payload = bytearray(frames.MAX_PAYLOAD_BYTES)
        self._target = memoryview(self._header)
        self._filled = self._kind = 0
        refuse_descriptors(connection)
        connection.setblocking(False)
        loop.watch(connection.fileno(), self._turn)

    def send(self, message: Json, descriptors: Sequence[int] = ()) -> None:
        """Send a control message, with descriptors beside it; raises `RunError`: `worker-killed`: it reads no more."""
        data = frames.control(message)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            sent = self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except OSError:
            sent = 0
        # The agent sends a few short things to a worker that is reading: less than all means that it is not.
        if sent != len(data):
            raise RunError(Code.WORKER_KILLED, "the worker no longer reads")

    def drain(self) -> None:
        """Handle what the worker had sent before it went away."""
        until_s = time.monotonic() + _DRAIN_S
        while self._socket.fileno() >= 0 and time.monotonic() < until_s and self._turn():
            continue

    def close(self) -> None:
        """Close the socket and zero the buffers."""
        if self._socket.fileno() >= 0:
            self._loop.unwatch(self._socket.fileno())
            with interrupted():
                self._socket.close()
        zero(self._payload)
        zero(self._header)

    def _turn(self) -> bool:
        """Receive for one turn; return whether there may be more."""
        left, until_s = _BYTES_PER_TURN, time.monotonic() + _TURN_S
        while left > 0:
            try:
                with interrupted():
                    count = self._socket.recv_into(self._target[self._filled :])
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                count = 0
            if not count:
                self.close()
                self._on_closed()
                return False
            left -= count
            self._filled += count
            if self._filled == len(self._target):
                self._completed()
                if self._socket.fileno() < 0:
                    return False
            if time.monotonic() >= until_s:
                break
        return True

    def _completed(self) -> None:
        whole, self._filled = self._target, 0
        if self._kind == 0:
            length, self._kind = int.from_bytes(self._header[:4], "big"), self._header[4]
            limits = {frames.CONTROL: frames.MAX_CONTROL_BYTES, frames.DATA: frames.MAX_PAYLOAD_BYTES}
            if not 0 < length <= limits.get(self._kind, 0):
                raise RunError(Code.WORKER_FAILED, "the worker sent what is not a frame")
            self._target = memoryview(self._payload)[:length]
            return
        kind, self._kind = self._kind, 0
        self._target = memoryview(self._header)
        if kind == frames.DATA:
            try:
                self._on_data(whole)
            finally:
                zero(whole)
            return
        try:
            message = decode(whole, max_bytes=frames.MAX_CONTROL_BYTES)
        except FormatError:
            raise RunError(Code.WORKER_FAILED, "the worker sent a message that is not canonical JSON") from None
        self._on_message(parse(message))
