"""A gate that keeps what runs leave, as an owner and a rented machine reach it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from glasshouse.broker.client.gate_client import GateClient
from glasshouse.broker.client.owner_client import Reply
from glasshouse.errors import Code
from glasshouse.evidence.events import Event
from glasshouse.evidence.stored import MAX_PART_BYTES, StoredPart
from glasshouse.providers.serve.storing import Storing
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.canonical import decode
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.merkle import Tree, leaf_hash
from simulators.left_run import LeftRun
from simulators.local_broker import LocalBroker

ALICE, MALLORY = SigningKey.generate(), SigningKey.generate()
OWNERS = (ALICE.public, MALLORY.public)
MIB = 1 << 20


@dataclass(frozen=True)
class AtGate:
    """A gate as one owner reaches it."""

    broker: LocalBroker
    key: SigningKey

    @property
    def runtime_url(self) -> str:
        return self.broker.runtime_url

    @property
    def broker_public(self) -> bytes:
        return self.broker.broker_public

    def client(self) -> GateClient:
        return self.broker.gate(self.key)


def run_of(gate: LocalBroker, key: SigningKey, folder: Path) -> LeftRun:
    owner = Owner(AtGate(gate, key), signing=key, releases=3)
    return LeftRun(Actor.enter(owner), folder / secrets.token_hex(4))


def post(gate: LocalBroker, body: bytes) -> Reply:
    return gate.gate(None)._send("POST", "/v1/store", body)


def storing(gate: LocalBroker, run: LeftRun) -> Storing:
    def send(body: bytes) -> tuple[int, bytes]:
        reply = post(gate, body)
        return reply.status, reply.body

    return Storing(run.out, send)


def part_of(
    run: LeftRun, name: str, head: bytes, *, event: int = -1, start: int = 0, size: int = 1 << 30
) -> StoredPart:
    """Return a part of a file as the house sends it, with the line of the log that has that number."""
    lines = (run.out / "events.log").read_bytes().splitlines()
    tree = Tree()
    for line in lines:
        tree.append(leaf_hash(line))
    content, index = (run.out / name).read_bytes(), event % len(lines)
    return StoredPart(
        name=name,
        size=len(content),
        sha256=sha256(content),
        start=start,
        data=content[start : start + min(size, MAX_PART_BYTES)],
        event=Event.parse(lines[index]),
        head=Envelope.parse(head, max_bytes=8192),
        proof=tuple(tree.inclusion_proof(index, len(lines))),
    )


def files_in(folder: Path) -> list[Path]:
    """Return the files of runs that are in a store."""
    return [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]


def content_of(client: GateClient, run: LeftRun, name: str) -> bytes:
    size, digest = client.stored(run.run_id)[name]
    content = b""
    while piece := client.stored_piece(run.run_id, digest, len(content)):
        content += piece
    assert len(content) == size
    return content


def answered(reply: Reply) -> object:
    assert reply.status == 200, reply.body
    return decode(reply.body, max_bytes=1024)


def refused(reply: Reply) -> Code:
    assert reply.status != 200
    return reply.problem().code
