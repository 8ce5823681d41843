"""Listening sockets and the server around them.

A Unix socket is made with mode 0600; one that exists with a looser mode, or in a directory that others
can enter, is refused; one that a dead process left behind is replaced, one that a process listens on is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from glasshouse.broker.http.bounded import BoundedProtocol
from glasshouse.broker.http.connections import ACCEPTED_AT_ONCE, MOST_OF_ADDRESS, Room, room_for
from glasshouse.broker.store.key_file import private_directory
from glasshouse.errors import Code, UsageError

GRACE_S = 5
BACKLOG = 1024  # beyond it, the kernel makes a newcomer wait for a second
MOST_LISTENERS = 3  # of a broker that is a gate too
_PATH_BYTES = 100  # macOS allows 104 with its end, Linux 108


class Server(uvicorn.Server):
    """One listener that waits without ticking and leaves signals to its caller.

    Args:
        protocol: what each connection is given to: `BoundedProtocol`, or one that has it inside.
        listeners: of the whole broker: they share its descriptors.
        attributes: further attributes of the protocol's class.
    """

    def __init__(
        self,
        app: Starlette,
        protocol: type[Any] = BoundedProtocol,
        *,
        listeners: int = MOST_LISTENERS,
        **attributes: Any,
    ) -> None:
        room = Room(room_for(listeners), MOST_OF_ADDRESS)
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Bounded", (protocol,), {"room": room, **attributes}),
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",  # nothing a client sends is written to a log
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=ACCEPTED_AT_ONCE,  # which is how the loop reads it; what the kernel keeps is `BACKLOG`
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Finish what is being answered, then end; from within the loop."""
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def parse_bind(bind: str) -> tuple[str, int] | Path:
    """Read ``host:port``, ``[v6]:port`` or ``unix:/path``. Raises `UsageError`, `usage`."""
    if bind.startswith("unix:/"):
        return Path(bind[5:])
    host, colon, port = bind.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port[:6]) > 65535:
        raise UsageError(Code.USAGE, f"{bind!r} is neither host:port nor unix:/path")
    return host.removeprefix("[").removesuffix("]"), int(port)


def bind_tcp(host: str, port: int) -> tuple[socket.socket, str]:
    """Listen on TCP and return the socket and its URL.

    Raises:
        UsageError: `usage` when the address is taken or not ours.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(Code.USAGE, f"cannot listen on {host}:{port}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(Code.USAGE, f"cannot listen on {host}:{port}: {error.strerror}") from None
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return listener, f"http://{shown}:{listener.getsockname()[1]}"


def bind_unix(path: Path) -> tuple[socket.socket, str]:
    """Listen on a Unix socket of mode 0600 in a directory of mode 0700, and return it and its URL.

    Raises:
        UsageError: `usage`, with the mend in its hint.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 — not resolved: the name that was given is the one that is used
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise UsageError(
            Code.USAGE, f"{path} is too long for a Unix socket", hint=f"choose a path of at most {_PATH_BYTES} bytes"
        )
    private_directory(path.parent, what="socket's directory")
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The umask is one for all threads. Linux gives the name the socket's mode; elsewhere its folder keeps it.
        with contextlib.suppress(OSError):
            os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(Code.USAGE, f"cannot listen on {path}: {error.strerror}") from None
    return listener, f"unix:{path}"


def _clear(path: Path) -> None:
    """Remove a socket that no process listens on any more."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(Code.USAGE, f"{path} exists and is not a socket of this user")
    if stat.S_IMODE(found.st_mode) & 0o177:
        raise UsageError(
            Code.USAGE,
            f"the socket {path} has mode {stat.S_IMODE(found.st_mode):04o}, not 0600: others could have used it",
            hint=f"see who made it, then: rm {path}",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        answer: Any = probe.connect_ex(str(path))
    if answer not in (errno.ECONNREFUSED, errno.ENOENT):
        raise UsageError(Code.USAGE, f"another process listens on {path}", hint="stop it, or choose another path")
    path.unlink(missing_ok=True)
