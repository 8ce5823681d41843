"""Ports for tests that must name one before anything listens there."""

from __future__ import annotations

import secrets
import socket

# Below what the kernel hands out by itself (32768 and up): only another test can take one in between.
_FIRST, _COUNT = 20_000, 12_000
_given: set[int] = set()


def free_port() -> int:
    """Return a port of the loopback on which nothing listens, of which no connection lingers, and never the same."""
    for _ in range(100):
        port = _FIRST + secrets.randbelow(_COUNT)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError("no port is free")
