"""Speaks to a broker in bytes, as no client of ours would."""

from __future__ import annotations

import socket

from glasshouse.broker.http_api import PROBLEM_TYPE, Problem
from simulators.local_broker import LocalBroker


def raw(broker: LocalBroker, data: bytes, *, close: bool = False) -> bytes:
    """Send bytes and return whatever comes back until the other side hangs up."""
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        if close:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            pass
        return received


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def problem(answer: bytes) -> Problem:
    top, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-type: {PROBLEM_TYPE}".encode() in top
    assert b"connection: close" in top
    return Problem.parse(body)
