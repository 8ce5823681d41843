"""A broker on a thread, with a clock that a test moves; the same applications, sockets and server."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from glasshouse.broker.client.gate_client import GateClient
from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.broker.decide.challenges import GateLimits
from glasshouse.broker.decide.checkpoints.checkpoint_store import CheckpointStore
from glasshouse.broker.decide.stored_files import RunStore
from glasshouse.broker.http.intake import Intake
from glasshouse.broker.http.listeners import Server, bind_tcp, bind_unix
from glasshouse.broker.http.tls import CERTIFICATE_NAME, Certificate, TlsProtocol
from glasshouse.broker.serving import create_apps
from glasshouse.broker.store.broker_state import DATABASE_NAME, open_broker, system_clock_us
from glasshouse.broker.store.database import GroupCommit
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.uploads import StoreSpace
from glasshouse.errors import Code
from glasshouse.providers.protocol.line import GateLine
from glasshouse.tamper.stage import Actor
from glasshouse.wire.crypto import SigningKey

_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"


class _QuickServer(Server):
    """Does not wait for what is under way: hundreds of tests end one."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class LocalBroker:
    """Everything of a broker but its process.

    Args:
        directory: data and owner's socket go below it.
        limits: of the gate.
        owners: who may ask over the network, at `gate_url`.
        store_bytes: the most that it keeps of checkpoints and what runs leave, below `store`; None for nothing.
        quota: what each owner may have.
    """

    def __init__(
        self,
        directory: Path,
        *,
        limits: GateLimits | None = None,
        owners: tuple[bytes, ...] = (),
        store_bytes: int | None = None,
        quota: Quota | None = None,
    ) -> None:
        self.data = directory / "data"
        self.store = directory / "store"
        self._offset_us = 0
        self.opened = open_broker(self.data, clock_us=self.clock_us)
        self._executor = GroupCommit(self.opened.database)
        self._intake = Intake()
        self._keeps = self.checkpoints = None
        if store_bytes is not None:
            self.space = StoreSpace(self.opened, folder=self.store, limit_bytes=store_bytes, owners=len(owners))
            self._keeps, self.checkpoints = RunStore(self.opened, self.space), CheckpointStore(self.opened, self.space)
        apps = create_apps(
            self.opened,
            executor=self._executor,
            intake=self._intake,
            limits=limits,
            owners=owners,
            keeps=self._keeps,
            checkpoints=self.checkpoints,
            quota=quota,
        )
        runtime, self.runtime_url = bind_tcp("127.0.0.1", 0)
        owner, owner_url = bind_unix(directory / "s" / "owner")
        self._socket = Path(owner_url.removeprefix("unix:"))
        self.broker_public, self.store_public = self.opened.key.public, None
        gate, gate_url = bind_tcp("127.0.0.1", 0)
        self.gate_url = gate_url.replace("http:", "https:")
        self.certificate = Certificate(self.data / CERTIFICATE_NAME)
        self._listeners = [(apps.runtime, runtime), (apps.owner, owner), (apps.gate, gate)]
        self._servers: list[Server] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)))
        self._thread.start()
        assert started.wait(10)

    def clock_us(self) -> int:
        return system_clock_us() + self._offset_us

    def advance(self, seconds: float) -> None:
        """Let time pass, at the broker only."""
        self._offset_us += int(seconds * 1_000_000)

    def client(self) -> OwnerClient:
        return OwnerClient(self._socket)

    def gate(self, owner: SigningKey | None, *, key: bytes | None = None) -> GateClient:
        """Return an owner's client of the gate, over TLS."""
        line = GateLine(url=self.gate_url, certificate=self.certificate.sha256.hex())
        return GateClient(self.gate_url, line.connect, key or self.broker_public, owner, self.clock_us)

    def rows(self, query: str) -> list[tuple[object, ...]]:
        """Look into the database from outside."""
        connection = sqlite3.connect(self.data / DATABASE_NAME)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def edit(self, statement: str, *values: object) -> None:
        """Change the database from outside, as one who has it and not the key file."""
        connection = sqlite3.connect(self.data / DATABASE_NAME)
        try:
            connection.execute(statement, values)
            connection.commit()
        finally:
            connection.close()

    def everything(self) -> dict[str, list[tuple[object, ...]]]:
        """Return all rows of all tables."""
        return {str(name): self.rows(f"SELECT * FROM {name}") for (name,) in self.rows(_TABLES)}

    def count(self, table: str) -> int:
        [(count,)] = self.rows(f"SELECT count(*) FROM {table}")
        assert isinstance(count, int)
        return count

    def close(self) -> None:
        assert self._loop is not None
        for server in self._servers:
            self._loop.call_soon_threadsafe(server.stop)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._intake.close()
        self._executor.shutdown()
        if self._keeps is not None:
            self.space.close()
        self.opened.database.close()
        for _, listener in self._listeners:
            listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _run(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._servers = [_QuickServer(app) for app, _ in self._listeners[:2]]
        self._servers.append(_QuickServer(self._listeners[2][0], TlsProtocol, context=self.certificate.context))
        async with asyncio.TaskGroup() as group:
            for server, (_, listener) in zip(self._servers, self._listeners, strict=True):
                group.create_task(server.serve(sockets=[listener]))
            while not all(server.started for server in self._servers):
                await asyncio.sleep(0.001)
            started.set()


def exchange(actor: Actor) -> bytes:
    """Go through the whole exchange and return the package key."""
    challenge = actor.challenge()
    evidence = actor.sign(actor.claims(challenge))
    return actor.open(actor.send(evidence).content(), challenge, evidence)


def refused(actor: Actor, evidence: bytes) -> Code:
    """Send evidence that must be refused, and return why it was."""
    reply = actor.send(evidence)
    assert reply.status != 200
    return reply.problem().code
