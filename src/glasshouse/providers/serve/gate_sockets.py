"""The sockets at a place that runtimes call as their gate: one for each run, while its owner is connected."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from glasshouse.errors import PlatformError
from glasshouse.providers.serve.keepers import listening
from glasshouse.providers.serve.runs import own_folder

# What a socket's address holds, less the end that makes it a string.
_MAX_PATH_BYTES = 107
_NAMED = "sockets"


class _Gate(NamedTuple):
    listener: socket.socket
    path: Path
    inode: int


class GateSockets:
    """The sockets of one connection."""

    def __init__(
        self, folder: Path, selector: selectors.BaseSelector, on_call: Callable[[socket.socket], None]
    ) -> None:
        self._folder, self._selector, self._on_call = folder, selector, on_call
        self._gates: dict[str, _Gate] = {}
        self._listening = False

    def open(self, run: str) -> str:
        """Listen for a run's runtime, in the place of another connection; return its `broker_url`. Raises as `path`."""
        path = self.path(run)
        fresh = path.with_name(f"{run}.{os.getpid()}")
        listener = listening(fresh)
        listener.setblocking(False)
        inode = fresh.stat().st_ino
        fresh.rename(path)
        self._gates[run] = _Gate(listener, path, inode)
        if self._listening:
            self._select(listener)
        return f"unix:{path}"

    def listen(self, listening: bool) -> None:
        """Take calls from now on, or no more."""
        if listening != self._listening:
            for gate in self._gates.values():
                if listening:
                    self._select(gate.listener)
                else:
                    self._selector.unregister(gate.listener)
        self._listening = listening

    def path(self, run: str) -> Path:
        """Return where the runtime of a run calls; raises `OSError`, `PlatformError`."""
        return self._sockets() / run

    def drop(self, run: str) -> None:
        """Close the socket of a run, if there is one."""
        gate = self._gates.pop(run, None)
        if gate is None:
            return
        if self._listening:
            self._selector.unregister(gate.listener)
        gate.listener.close()
        with contextlib.suppress(FileNotFoundError):
            if gate.path.stat().st_ino == gate.inode:  # not the socket of a connection that came after this one
                gate.path.unlink()

    def close(self) -> None:
        """Close all of them."""
        for run in list(self._gates):
            self.drop(run)

    def _select(self, listener: socket.socket) -> None:
        def accept(_events: int) -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._on_call(connection)

        self._selector.register(listener, selectors.EVENT_READ, accept)

    def _sockets(self) -> Path:
        """Return the folder of the sockets: the place's own, or, where its name is too long for an address, another.

        It is the same for every connection, whatever a login has as its folder for temporary files.
        """
        own = self._folder / _NAMED
        if len(os.fsencode(own / f"{'0' * 32}.{1 << 22}")) <= _MAX_PATH_BYTES:
            own_folder(own)
            return own
        link = self._folder / f"{_NAMED}-elsewhere"
        with contextlib.suppress(OSError, PlatformError):
            own_folder(link.readlink())
            return link.readlink()
        made = tempfile.mkdtemp(prefix="glasshouse-", dir="/tmp")  # its own, by a name that none foresees
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(made)
        except FileExistsError:  # another connection's, of this moment
            os.rmdir(made)  # noqa: PTH106
            return link.readlink()
        return Path(made)
