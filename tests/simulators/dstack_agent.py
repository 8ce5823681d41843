"""The agent of a machine of dstack on its Unix socket, and the events of its launcher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from glasshouse.attestation.roots.dstack.dstack_events import DstackEvent, replay
from glasshouse.wire.crypto import sha256
from simulators.tdx_machine import PADDING, TdxMachine
from simulators.unix_service import unix_service

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


def dstack_agent(
    path: Path, machine: TdxMachine, events: Sequence[DstackEvent], *, instead: bytes | None = None
) -> AbstractContextManager[None]:
    """Serve GetQuote on this socket, each connection once.

    Args:
        instead: bytes that are sent in the place of every answer.
    """

    def quote(asked: bytes, body: bytes) -> bytes | None:
        if asked != b"/GetQuote":
            return None
        return json.dumps(answer(machine, events, bytes.fromhex(json.loads(body)["report_data"]))).encode()

    return unix_service(path, quote, instead=instead)
