"""Listeners that the worker must not reach: the counterpart of the launcher's trials.

A trial that fails proves something only if its target would have answered. The agent therefore opens one
target of each kind, reaches it itself, and looks afterwards whether anything else arrived.
"""

from __future__ import annotations

import os
import socket

_CANARY = b"no worker may read this file\n"


class Controls:
    """One TCP listener, one datagram socket, one abstract and one named Unix listener, one file, all in `directory`.

    `targets` is what the launcher tries, for its specification; those of `unproven` even the agent cannot reach here.
    """

    def __init__(self, directory: str) -> None:
        self._listeners: dict[str, socket.socket] = {}
        self._paths = [f"{directory}/control", f"{directory}/canary"]
        self.unproven: list[str] = []
        self.targets: dict[str, int | str] = {"tcp": 0, "udp": 0}
        abstract, named = "\0glasshouse-" + os.urandom(8).hex(), self._paths[0]
        for name, family, kind, address in (
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, abstract),
            ("named", socket.AF_UNIX, socket.SOCK_STREAM, named),
        ):
            self.targets.setdefault(name, str(address))
            try:
                self._open(name, family, kind, address)
            except OSError:
                self.unproven.append(name)
        with open(self._paths[1], "xb") as canary:  # noqa: PTH123
            canary.write(_CANARY)
        self.targets["file"] = self._paths[1]

    def touched(self) -> list[str]:
        """Return the names of the targets that were reached since they were made."""
        return [name for name, listener in self._listeners.items() if _arrived(listener)]

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for path in self._paths:
            try:
                os.unlink(path)  # noqa: PTH108
            except FileNotFoundError:
                continue

    def _open(self, name: str, family: int, kind: int, address: tuple[str, int] | str) -> None:
        listener = socket.socket(family, kind)
        try:
            listener.bind(address)
            if kind == socket.SOCK_STREAM:
                listener.listen(4)
            listener.setblocking(False)
            bound = listener.getsockname()
            with socket.socket(family, kind) as caller:
                caller.settimeout(1)
                caller.connect(bound)
                caller.send(b"control")
            if not _arrived(listener):
                raise OSError("nothing arrived")
        except OSError:
            listener.close()
            raise
        if family == socket.AF_INET:
            self.targets[name] = bound[1]
        self._listeners[name] = listener


def _arrived(listener: socket.socket) -> bool:
    try:
        if listener.type == socket.SOCK_DGRAM:
            listener.recv(64)
        else:
            listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True
