"""Sockets that tests play with."""

from __future__ import annotations

import socket


def connection() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a TCP connection over the loopback; neither waits longer than ten seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    one.settimeout(10)
    other.settimeout(10)
    return one, other
