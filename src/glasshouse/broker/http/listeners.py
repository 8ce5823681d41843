"""Listening sockets and the server around them.

A Unix socket is made with mode 0600; one that exists with a looser mode, or in a directory that others
can enter, is refused; one that a dead process left behind is replaced, one that a process listens on is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from glasshouse.broker.http.connections import ACCEPTED_AT_ONCE, MOST_OF_ADDRESS, Room, address_of, room_for
from glasshouse.broker.http_api import PROBLEM_TYPE, Problem
from glasshouse.broker.store.key_file import private_directory
from glasshouse.errors import Code, FormatError, UsageError

MAX_HEADER_BYTES = 4096
MAX_HEADER_LINES = 64
MAX_HEADER_COMMAS = 64
FREE_PIECES = 8  # of a request are read as they come; after each later one the kernel is left to join what follows
PAUSE_SHARE = 0.25  # of the time that a request has taken so far, and so the most by which it is found to be whole late
SHORTEST_PAUSE_S = 0.01
PART_BYTES = 64 * 1024  # of a body are parsed and passed on at once, or its rest
HEADER_TIMEOUT_S = 2.0
CONNECTION_TIMEOUT_S = 15.0
GRACE_S = 5
BACKLOG = 1024  # beyond it, the kernel makes a newcomer wait for a second
_BLANK_LINE = re.compile(rb"\n\r?\n")
_NOT_IN_A_HEAD = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\r(?!\n|\Z)")
MOST_LISTENERS = 3  # of a broker that is a gate too
_PATH_BYTES = 100  # macOS allows 104 with its end, Linux 108


class _Requests(h11.Connection):
    """Reads requests whose body has a length in its headers.

    A body in chunks costs by the chunk: as many as it has bytes, at its sender's choice.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise h11.RemoteProtocolError("a body in chunks")
        return event


class BoundedProtocol(H11Protocol):
    """One connection, cut off when its headers, or all of it, take too long, or when it idles in another's place.

    Every answer closes its connection, so the second timer bounds slow bodies and slow readers alike. Pauses grow with
    the time that a request takes, so that it is read in some forty pieces at most however its sender parts it.
    """

    room: Room
    _deadline: asyncio.TimerHandle | None = None
    _pause: asyncio.TimerHandle | None = None
    _pieces = 0
    _began_s = 0.0
    _head = b""
    _left = 0  # bytes of the body to come

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._part = bytearray()
        self.conn = _Requests(h11.SERVER, MAX_HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.room.enter(self, address_of(self.client[0] if self.client else None)):
            self.cut()
            return
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_due)

    def data_received(self, data: bytes) -> None:
        taken = self._whole_head(data) if self.cycle is None else self._whole_part(data)
        if taken is None:
            return
        if taken:
            first = self.cycle is None
            super().data_received(taken)
            if first and self.cycle is not None:
                length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
                self._left = length - len(self.cycle.body)
        # After each read: where its window is full the kernel wakes below the mark, and a rest below it would stay
        self._wake_for(min(self._left, PART_BYTES - len(self._part)))
        if self.cycle is not None and not self.cycle.more_body:
            self.room.whole(self)
        else:
            self.room.received(self, len(data))
            self._leave_to_the_kernel()

    def _wake_for(self, count: int) -> None:
        """Let the kernel wake the loop no sooner than so many bytes are there: TCP only, and not every kernel does."""
        connection = self.transport.get_extra_info("socket")
        if count > 0 and connection is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _leave_to_the_kernel(self) -> None:
        """Read nothing for a while, after more than a few pieces: each costs a turn of the loop, whatever is in it."""
        now_s = self.loop.time()
        self._pieces += 1
        if self._pieces == 1:
            self._began_s = now_s
        if self._pieces > FREE_PIECES:
            self.transport.pause_reading()
            pause_s = max(SHORTEST_PAUSE_S, PAUSE_SHARE * (now_s - self._began_s))
            self._pause = self.loop.call_later(pause_s, self._read_on)

    def _read_on(self) -> None:
        if not self.flow.read_paused:  # by the server, which has enough for now and will resume by itself
            self.transport.resume_reading()

    def _whole_head(self, data: bytes) -> bytes | None:
        """Return all that has come when it holds a whole head, b"" until then, and None when the head was refused.

        h11 measures a head that is incomplete alone, and a line that it refuses may cost it the square of its length.
        """
        head = self._head + data
        blank = _BLANK_LINE.search(head, max(0, len(self._head) - 2))
        end = len(head) if blank is None else blank.start()
        refused = None
        if end > MAX_HEADER_BYTES:
            refused = f"more than {MAX_HEADER_BYTES} bytes of headers"
        elif head.count(b"\n", 0, end) + (blank is not None) > MAX_HEADER_LINES:
            refused = "too many header lines"  # each costs as much as a hundred bytes of a body
        elif head.count(b",", 0, end) > MAX_HEADER_COMMAS:
            refused = "too many commas among the headers"  # of lists that are parted more than once
        elif blank is not None and _NOT_IN_A_HEAD.search(head, 0, end):
            refused = "a control character among the headers"
        if refused is not None:
            self.send_400_response(refused)
            return None
        self._head = b"" if blank else head
        return head if blank else b""

    def _whole_part(self, data: bytes) -> bytes:
        """Return a part of the body that is long enough, or its end, and b"" until then."""
        self._part += data
        self._left -= len(data)
        if self._left > 0 and len(self._part) < PART_BYTES:
            return b""
        part, self._part = bytes(self._part), bytearray()
        return part

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.leave(self)
        for timer in (self._deadline, self._pause):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def cut(self) -> None:
        """End the connection at once; who has sent nothing is owed no answer."""
        self.transport.abort()

    def shutdown(self) -> None:
        """Begin the graceful end of a connection, if it has not begun: what was refused has its answer already."""
        if not self.transport.is_closing():
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP/1.1 as taken here with a problem document, and close."""
        problem = Problem.of(FormatError(Code.MESSAGE_INVALID, f"not a request that is taken here: {msg}")).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {PROBLEM_TYPE}\r\ncontent-length: {len(problem)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + problem)
        self.transport.close()

    def _headers_due(self) -> None:
        if self.cycle is None:
            self.cut()
        else:
            self._deadline = self.loop.call_later(CONNECTION_TIMEOUT_S - HEADER_TIMEOUT_S, self.cut)


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
