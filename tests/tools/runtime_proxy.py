"""Stands between a runtime and its broker, as anybody on the way could, and does what it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

Reply = tuple[int, bytes]
Act = Callable[[str, bytes, Callable[[], Reply]], Reply | None]


class Proxy:
    """An HTTP server on a Unix socket.

    Args:
        path: of the socket.
        upstream: the broker's URL.
        act: called with each request's path and body and a way to ask the broker; returns the status and
            body to answer with, or None to hang up.
    """

    def __init__(self, path: Path, upstream: str, act: Act) -> None:
        self.url = f"unix:{path}"
        self.seen: list[str] = []
        self._upstream = upstream
        self._act = act
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(path))
            self._socket.listen(16)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        received = b""
        while b"\r\n\r\n" not in received:
            received += _more(connection)
        head, _, body = received.partition(b"\r\n\r\n")
        path = head.split()[1].decode()
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l"))
        while len(body) < length:
            body += _more(connection)
        self.seen.append(path)
        reply = self._act(path, body, lambda: self._ask(head, body))
        if reply is not None:
            status, content = reply
            connection.sendall(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content))

    def _ask(self, head: bytes, body: bytes) -> Reply:
        with self._connected() as upstream:
            upstream.sendall(head + b"\r\n\r\n" + body)
            received = b""
            while data := upstream.recv(65536):
                received += data
        top, _, content = received.partition(b"\r\n\r\n")
        return int(top.split()[1]), content

    def _connected(self) -> socket.socket:
        if self._upstream.startswith("unix:"):
            upstream = socket.socket(socket.AF_UNIX)
            upstream.settimeout(10)
            upstream.connect(self._upstream.removeprefix("unix:"))
            return upstream
        host, _, port = self._upstream.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


def _more(connection: socket.socket) -> bytes:
    """Return what came next; a request that is given up in its middle, as at a run's end, holds up no other."""
    data = connection.recv(65536)
    if not data:
        raise ConnectionAbortedError
    return data
