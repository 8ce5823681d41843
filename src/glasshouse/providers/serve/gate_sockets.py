"""The sockets at a place that runtimes call, as if they were their gate: one for each run, while its owner is there."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from glasshouse.errors import Code, FormatError, PlatformError, UsageError
from glasshouse.providers.protocol.calls import MAX_CALLS
from glasshouse.providers.protocol.order import RelayOrder
from glasshouse.providers.serve.runs import own_folder
from glasshouse.wire.fields import Fields

__all__ = ["Gates", "relay_order"]

# What a socket's address holds, less the end that makes it a string.
_MAX_PATH_BYTES = 107
_NAMED = "sockets"


@dataclass(frozen=True, slots=True)
class _Gate:
    """A listener, its name, and the name's inode."""

    listener: socket.socket
    path: Path
    number: int


class Gates:
    """The gates of one connection.

    Args:
        folder: the place's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gates: dict[str, _Gate] = {}

    @property
    def listeners(self) -> tuple[socket.socket, ...]:
        return tuple(gate.listener for gate in self._gates.values())

    def listener(self, run: str) -> socket.socket | None:
        """Return that of a run; None where there is none."""
        gate = self._gates.get(run)
        return None if gate is None else gate.listener

    def open(self, run: str) -> str:
        """Listen for the runtime of a run, in the place of another connection's; return its `broker_url`.

        Raises:
            OSError, PlatformError: it cannot be.
        """
        path = self.path(run)
        fresh = path.with_name(f"{run}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Linux gives the name the socket's mode; the umask is one for all threads.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(fresh))
        listener.listen(MAX_CALLS)
        listener.setblocking(False)
        number = fresh.stat().st_ino
        fresh.rename(path)
        self._gates[run] = _Gate(listener, path, number)
        return f"unix:{path}"

    def path(self, run: str) -> Path:
        """Return where the runtime of a run calls; raises `OSError`, `PlatformError`."""
        return self._sockets() / run

    def drop(self, run: str) -> None:
        """Listen no more; one that does not is fine."""
        gate = self._gates.pop(run, None)
        if gate is None:
            return
        gate.listener.close()
        with contextlib.suppress(FileNotFoundError):
            if gate.path.stat().st_ino == gate.number:  # not the socket of a connection that came after this one
                gate.path.unlink()

    def close(self) -> None:
        for run in list(self._gates):
            self.drop(run)

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


def relay_order(fields: Fields, path: Path) -> RelayOrder:
    """Read to which gate a keeper carries the calls that come to `path`; raises `FormatError`."""
    from glasshouse.providers.protocol.line import GateLine  # TLS is loaded where it is needed

    url, certificate = fields.text("url", max_chars=512), fields.digest_or_null("certificate")
    fields.end()
    try:
        GateLine(url=url, certificate=certificate)
    except UsageError as error:
        raise FormatError(Code.SCHEMA, error.message) from None
    return RelayOrder(
        url=url, certificate=None if certificate is None else certificate.hex(), socket=str(path), store=True
    )
