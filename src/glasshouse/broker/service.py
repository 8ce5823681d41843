"""The two applications: what runtimes may ask, and what the owner may."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from sqlalchemy.engine import URL

from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES
from glasshouse.broker import store
from glasshouse.broker.database import Database
from glasshouse.broker.gate import Gate, GateLimits
from glasshouse.broker.http import Limits, add_message_route, add_route, bare_app
from glasshouse.broker.intake import Intake, Pace
from glasshouse.broker.keys import KeyFile, private_directory
from glasshouse.broker.owner import OwnerSide
from glasshouse.broker.owners_groups import OwnersGroups
from glasshouse.broker.reports import Reports
from glasshouse.broker.views import Views
from glasshouse.evidence.countersignature import MAX_SUBMISSION_BYTES as MAX_RECEIPT_BYTES
from glasshouse.evidence.heads import MAX_SUBMISSION_BYTES as MAX_HEADS_BYTES
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
    """The applications of the two listeners."""

    runtime: FastAPI
    owner: FastAPI


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
        exists = database.read(store.has_broker_key)
        key_file = KeyFile.open(key_path) if exists else KeyFile.open_or_create(key_path)
        key = database.write(lambda connection: store.open_broker_key(connection, key_file))
        database.write(lambda connection: store.sweep(connection, clock_us()))
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
) -> Apps:
    """Return both applications over one opened broker.

    Args:
        broker: see `open_broker`.
        executor: where decisions are made, and what an answer waits for: `turns.Turns` once the broker serves.
        intake: where messages of runtimes are read.
        clock_us: microseconds since the epoch.
        limits: how much one deployment may ask for.
    """
    gate = Gate(broker.database, broker.key_file, broker.key, clock_us, limits or GateLimits())
    reports = Reports(broker.database, broker.key, clock_us)
    runtime, pace = bare_app(), Pace(clock_us)
    for path, reader, body_bytes in (
        ("/v1/challenge", gate.challenge, MAX_REQUEST_BYTES),
        ("/v1/evidence", gate.evidence, MAX_EVIDENCE_BYTES),
        ("/v1/release", gate.ask, MAX_RELEASE_REQUEST_BYTES),
        ("/v1/heads", reports.heads, MAX_HEADS_BYTES),
        ("/v1/receipt", reports.receipt, MAX_RECEIPT_BYTES),
    ):
        sizes = Limits(body_bytes=body_bytes)
        add_message_route(runtime, path, reader, limits=sizes, executor=executor, intake=intake, pace=pace)
    side = OwnerSide(broker.database, broker.key_file, broker.key, clock_us)
    group_side = OwnersGroups(broker.database, clock_us)
    views = Views(broker.database, broker.key.public, clock_us)
    owner = bare_app()
    for method, path, action in (
        ("GET", "/v1/broker", views.broker),
        ("PUT", "/v1/delegation", side.put_delegation),
        ("POST", "/v1/deployments", side.add_deployment),
        ("GET", "/v1/deployments/{deployment}", views.deployment),
        ("POST", "/v1/launches", side.add_launch),
        ("POST", "/v1/groups", group_side.add_group),
        ("GET", "/v1/groups/{group}", group_side.group),
        ("POST", "/v1/groups/{group}/refuse", group_side.refuse_group),
        ("POST", "/v1/packages/{package_id}/revoke", side.revoke),
        ("GET", "/v1/runs/{run_id}", views.run),
    ):
        add_route(owner, method, path, action, limits=Limits(), executor=executor)
    paged = Limits(parameters=frozenset({"after"}))
    add_route(owner, "GET", "/v1/audit", views.audit, limits=paged, executor=executor)
    return Apps(runtime=runtime, owner=owner)
