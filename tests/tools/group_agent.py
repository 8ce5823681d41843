"""An agent as the ranks of a group see it: a Unix socket that gives the group's secret for a token."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glasshouse.errors import Code
from glasshouse.wire import ranks
from glasshouse.wire.frames import Decoder

__all__ = ["serving"]


@contextmanager
def serving(path: Path, secret: bytes, token: bytes, *, times: int) -> Iterator[list[bool]]:
    """Serve at `path`; give `secret` to the first `times` that show `token`, and refuse everybody else.

    Yields:
        for each that asked, whether it was given the secret.
    """
    given: list[bool] = []
    over = threading.Event()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                if over.is_set():
                    return
                request = _read(connection)
                good = request is not None and request.token == token and sum(given) < times
                given.append(good)
                connection.sendall(ranks.give_secret(secret) if good else ranks.refuse(Code.GROUP_SECRET))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield given
        finally:
            over.set()
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            thread.join()


def _read(connection: socket.socket) -> ranks.Request | None:
    decoder = Decoder()
    while data := connection.recv(ranks.MAX_FRAME_BYTES):
        for _, value in decoder.feed(data):
            return ranks.Request.from_json(value)  # type: ignore[arg-type]
    return None
