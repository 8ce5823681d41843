"""The agent of a machine of dstack on its Unix socket, and the events of its launcher."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from glasshouse.attestation.roots.dstack.dstack_events import DstackEvent, replay
from glasshouse.wire.crypto import sha256
from simulators.tdx_machine import PADDING, TdxMachine

APP_COMPOSE = b'{"docker_compose_file":"services: {}","manifest_version":2,"name":"glasshouse"}'
COMPOSE_HASH = sha256(APP_COMPOSE)
KEY_PROVIDER = '{"name":"kms","id":"3059"}'


def launched(version: int = 1) -> list[DstackEvent]:
    """Return what the launcher writes before the first container starts."""
    events = {
        "system-preparing": b"",
        "app-id": COMPOSE_HASH[:20],
        "compose-hash": COMPOSE_HASH,
        "instance-id": bytes(range(20)),
        "boot-mr-done": b"",
        "os-image-hash": bytes(32),
        "key-provider": KEY_PROVIDER.encode(),
        "storage-fs": b"zfs",
        "system-ready": b"",
    }
    return [DstackEvent(name=name, payload=payload, version=version) for name, payload in events.items()]


def answer(machine: TdxMachine, events: Sequence[DstackEvent], report_data: bytes) -> dict[str, Any]:
    """Return the answer to GetQuote of a machine on which these events were written."""
    machine.registers.rtmr3 = replay(events)
    log = [{"imr": 0, "event_type": 4, "digest": "39" * 48, "event": "", "event_payload": ""}]
    for event in events:
        logged = {"imr": 3, "event_type": 0x08000001, "digest": "", "event": event.name}
        logged |= {"event_payload": event.payload.hex()} | ({"version": 2} if event.version == 2 else {})
        log.append(logged)
    return {
        "quote": (machine.quote(report_data) + PADDING).hex(),
        "event_log": json.dumps(log),
        "report_data": report_data.hex(),
        "vm_config": json.dumps({"os_image_hash": "00" * 32}),
    }


@contextmanager
def dstack_agent(
    path: Path, machine: TdxMachine, events: Sequence[DstackEvent], *, instead: bytes | None = None
) -> Iterator[None]:
    """Serve GetQuote on this socket, each connection once.

    Args:
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
            with connection, suppress(BrokenPipeError):  # the collector reads no more than it has to
                connection.sendall(instead if instead is not None else _answered(connection, machine, events))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def _answered(connection: socket.socket, machine: TdxMachine, events: Sequence[DstackEvent]) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += connection.recv(65536)
    if not head.startswith(b"POST /GetQuote HTTP/1."):
        return b"HTTP/1.0 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    found = json.dumps(answer(machine, events, bytes.fromhex(json.loads(body)["report_data"]))).encode()
    return b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(found), found)
