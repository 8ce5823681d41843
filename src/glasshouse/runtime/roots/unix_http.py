"""Asks a service on a Unix socket one question, over the least of HTTP; what it answers is for the caller to read."""

from __future__ import annotations

import re
import socket
from pathlib import Path

_TIMEOUT_S = 30.0  # of each wait; evidence takes a second or two
_ANSWER = re.compile(rb"HTTP/1\.[01] 200 [^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n(.*)", re.DOTALL)


def ask(address: Path, path: str, body: bytes, *, max_bytes: int) -> bytes:
    """Return the body of the answer to a POST of JSON; of HTTP 1.0, so that it ends with the connection, in one piece.

    Raises:
        OSError: for no answer in time.
        ValueError: for an answer that is none, is another than 200, or is larger.
    """
    head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(address))
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        received = bytearray()
        while (part := connection.recv(65536)) and len(received) <= max_bytes:
            received += part
    if part or (whole := _ANSWER.fullmatch(received)) is None:
        raise ValueError
    return whole[1]
