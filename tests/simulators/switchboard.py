"""Hands connections over between the ranks of a test, as the worker does where no socket may have a name."""

from __future__ import annotations

import secrets
import socket
import threading

from glasshouse.collectives.transport.dial import HandedOver

__all__ = ["Switchboard"]


class Switchboard:
    """The doors of one test.

    Attributes:
        refused: how many calls it still refuses, as for a rank that has many to take.
    """

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.doors: dict[str, socket.socket] = {}
        self._lock = threading.Lock()

    def dialler(self) -> HandedOver:
        return HandedOver(self.listen, self.call)

    def listen(self) -> tuple[socket.socket, str]:
        name, (own, theirs) = secrets.token_hex(16), socket.socketpair()
        self.doors[name] = own
        return theirs, name

    def call(self, name: str, _timeout_s: float) -> socket.socket:
        with self._lock:
            self.refused -= 1
            if self.refused >= 0 or name not in self.doors:
                raise ConnectionRefusedError(name)
            return self.through(self.doors[name])

    def through(self, door: socket.socket) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(door, [b"c"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        for door in self.doors.values():
            door.close()
