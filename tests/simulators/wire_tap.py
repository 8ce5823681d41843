"""Somebody on the path: sees every byte between runtime and broker, and can swallow answers."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One request and its answer, as they travelled."""

    path: str
    request: bytes
    answer: bytes

    @property
    def sent(self) -> bytes:
        """The request's body."""
        return self.request.partition(b"\r\n\r\n")[2]

    @property
    def got(self) -> bytes:
        """The answer's body."""
        return self.answer.partition(b"\r\n\r\n")[2]


class WireTap:
    """A relay in front of a broker's TCP listener.

    Args:
        url: the broker's.

    Attributes:
        url: where to connect instead.
        seen: everything that went through.
        swallow: how many of the next answers to drop after the broker gave them.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._broker = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen: list[Exchange] = []
        self.swallow = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                runtime, _ = self._listener.accept()
            except OSError:
                return
            with runtime, socket.create_connection(self._broker, timeout=10) as broker:
                runtime.settimeout(10)
                request = _request(runtime)
                broker.sendall(request)
                answer = b"".join(iter(lambda: broker.recv(65536), b""))
                self.seen.append(Exchange(path=request.split(b" ", 2)[1].decode(), request=request, answer=answer))
                if self.swallow:
                    self.swallow -= 1
                else:
                    runtime.sendall(answer)


def _request(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    [length] = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < length:
        part = connection.recv(65536)
        received += part
        body += part
    return received
