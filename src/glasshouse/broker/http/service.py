"""The applications: the calls of runtimes, those of the broker's own user, and those over the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.engine import URL
from starlette.applications import Starlette

from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES
from glasshouse.broker.decide.countersigning import Reports
from glasshouse.broker.decide.group_requests import OwnersGroups
from glasshouse.broker.decide.key_release import Gate, GateLimits
from glasshouse.broker.decide.owner_requests import OwnerSide
from glasshouse.broker.decide.owner_views import Views
from glasshouse.broker.decide.stored_files import Store
from glasshouse.broker.http.endpoints import (
    Answer,
    Handler,
    Limits,
    add_message_route,
    add_open_route,
    add_route,
    add_signed_route,
    bare_app,
)
from glasshouse.broker.http.intake import Intake, Pace
from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import Database
from glasshouse.broker.store.key_file import KeyFile, private_directory
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import Admission
from glasshouse.evidence.countersignature import MAX_SUBMISSION_BYTES as MAX_RECEIPT_BYTES
from glasshouse.evidence.heads import MAX_SUBMISSION_BYTES as MAX_HEADS_BYTES
from glasshouse.evidence.stored import MAX_STORE_BYTES
from glasshouse.handshake.messages import MAX_RELEASE_REQUEST_BYTES, MAX_REQUEST_BYTES
from glasshouse.wire.signing import SigningKey

__all__ = ["Apps", "Broker", "create_apps", "open_broker", "system_clock_us"]

DATABASE_NAME = "broker.sqlite3"
KEY_FILE_NAME = "broker.key"


def system_clock_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Broker:
    """An opened broker: its database, the key file that opens it, and the signing key."""

    database: Database
    key_file: KeyFile
    key: SigningKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Apps:
    """The applications of the listeners.

    Attributes:
        runtime: the calls of runtimes.
        owner: the calls of the broker's own user, on a Unix socket.
        gate: the calls of runtimes and of enrolled owners, over the network.
    """

    runtime: Starlette
    owner: Starlette
    gate: Starlette


class Call(NamedTuple):
    """One call of an owner's: a row of the table in spec/owner-api.md."""

    method: str
    path: str
    handler: Handler
    limits: Limits = Limits()


def open_broker(data_dir: Path, *, clock_us: Callable[[], int] = system_clock_us) -> Broker:
    """Open the broker in `data_dir`, making it on the first start.

    Raises:
        UsageError: a directory or key file that others can read, a key file that is missing or another's.
        PeerError: `broker-unreachable` when the database cannot be opened.
    """
    private_directory(data_dir, what="broker's data directory")
    path, key_path = data_dir / DATABASE_NAME, data_dir / KEY_FILE_NAME
    path.touch(mode=0o600)  # the database's files take their mode from the first
    database = Database(URL.create("sqlite", database=str(path)))
    try:
        database.create_tables()
        # A new key file could open nothing of a database that is there already.
        exists = database.read(recorded.has_broker_key)
        key_file = KeyFile.open(key_path) if exists else KeyFile.open_or_create(key_path)
        key = database.write(lambda connection: recorded.open_broker_key(connection, key_file))
        database.write(lambda connection: recorded.sweep(connection, clock_us()))
    except BaseException:
        database.close()
        raise
    return Broker(database=database, key_file=key_file, key=key)


def create_apps(
    broker: Broker,
    *,
    executor: Executor,
    intake: Intake,
    clock_us: Callable[[], int] = system_clock_us,
    limits: GateLimits | None = None,
    owners: tuple[bytes, ...] = (),
    keeps: Store | None = None,
    quota: Quota | None = None,
) -> Apps:
    """Return the applications over one opened broker.

    Args:
        broker: see `open_broker`.
        executor: where decisions are made, and what answers wait for: a `GroupCommit` once the broker serves.
        intake: where messages of runtimes are read.
        clock_us: microseconds since the epoch.
        limits: how many challenges one deployment may have.
        owners: public signing keys of those who are enrolled: they alone may call over the network.
        keeps: what runs leave, at a gate that stores that.
        quota: how much of the gate each of them may have.
    """
    decides = Gate(broker.database, broker.key_file, broker.key, clock_us, limits or GateLimits())
    reports = Reports(broker.database, broker.key, clock_us)
    runtime, owner, gate, pace = bare_app(), bare_app(), bare_app(), Pace(clock_us)
    for path, reader, body_bytes in (
        ("/v1/challenge", decides.challenge, MAX_REQUEST_BYTES),
        ("/v1/evidence", decides.evidence, MAX_EVIDENCE_BYTES),
        ("/v1/release", decides.ask, MAX_RELEASE_REQUEST_BYTES),
        ("/v1/heads", reports.heads, MAX_HEADS_BYTES),
        ("/v1/receipt", reports.receipt, MAX_RECEIPT_BYTES),
    ):
        sizes = Limits(body_bytes=body_bytes)
        for app in (runtime, gate):
            add_message_route(app, path, reader, limits=sizes, executor=executor, intake=intake, pace=pace)
    if keeps is not None:
        sizes = Limits(body_bytes=MAX_STORE_BYTES)
        add_message_route(
            gate, "/v1/store", keeps.take, limits=sizes, executor=keeps.executor, intake=intake, pace=pace
        )
    views = Views(broker.database, broker.key, clock_us, stores=keeps is not None)
    for path, look in (("/v1/broker", views.broker), ("/metrics", views.metrics)):
        add_route(owner, "GET", path, look, limits=Limits(), executor=executor)
    quota = quota or Quota()
    admission = Admission(broker.database, owners, broker.key.public, clock_us, in_flight=quota.in_flight)
    for call in (*_calls(broker, views, clock_us, quota), *_calls_on(keeps)):
        add_route(owner, call.method, call.path, call.handler, limits=call.limits, executor=executor)
        add_signed_route(
            gate, call.method, call.path, call.handler, limits=call.limits, executor=executor, admission=admission
        )
    add_open_route(gate, "/v1/broker", views.known)
    add_open_route(gate, "/health", lambda: Answer.of({"status": "ok"}))
    return Apps(runtime=runtime, owner=owner, gate=gate)


def _calls(broker: Broker, views: Views, clock_us: Callable[[], int], quota: Quota) -> Iterable[Call]:
    """Return the calls of an owner, on the Unix socket and over the network."""
    side = OwnerSide(broker.database, broker.key_file, broker.key, clock_us, quota)
    groups = OwnersGroups(broker.database, broker.key.public, clock_us, quota)
    return (
        Call("PUT", "/v1/delegation", side.put_delegation),
        Call("POST", "/v1/deployments", side.add_deployment),
        Call("GET", "/v1/deployments/{deployment}", views.deployment),
        Call("POST", "/v1/launches", side.add_launch),
        Call("POST", "/v1/groups", groups.add_group),
        Call("GET", "/v1/groups/{group}", groups.group),
        Call("POST", "/v1/groups/{group}/refuse", groups.refuse_group),
        Call("POST", "/v1/packages/{package_id}/revoke", side.revoke),
        Call("GET", "/v1/runs/{run_id}", views.run),
        Call("GET", "/v1/audit", views.audit, Limits(parameters=frozenset({"after"}))),
    )


def _calls_on(keeps: Store | None) -> Iterable[Call]:
    """Return the calls of an owner about what runs left."""
    if keeps is None:
        return ()
    return (
        Call("GET", "/v1/runs/{run_id}/stored", keeps.files),
        Call("GET", "/v1/runs/{run_id}/stored/{sha256}", keeps.piece, Limits(parameters=frozenset({"after"}))),
        Call("POST", "/v1/runs/{run_id}/stored/forget", keeps.forget),
    )
