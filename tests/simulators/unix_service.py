"""A service of HTTP on a Unix socket, as a machine's agent or launcher offers it to a container."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["unix_service"]


@contextmanager
def unix_service(
    path: Path, answer: Callable[[bytes, bytes], bytes | None], *, instead: bytes | None = None
) -> Iterator[None]:
    """Serve POST on this socket, each connection once.

    Args:
        answer: what a path and a body are answered with; None for a path that there is not.
        instead: bytes that are sent in the place of every answer.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(BrokenPipeError):  # a collector reads no more than it has to
                connection.sendall(_answered(connection, answer) if instead is None else instead)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def _answered(connection: socket.socket, answer: Callable[[bytes, bytes], bytes | None]) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += connection.recv(65536)
    method, path, _ = head.split(b" ", 2)
    found = answer(path, body) if method == b"POST" else None
    if found is None:
        return b"HTTP/1.0 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    return b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(found), found)
