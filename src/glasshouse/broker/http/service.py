"""The applications: the calls of runtimes, those of the broker's own user, and those over the network."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from starlette.applications import Starlette

from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES
from glasshouse.broker.decide.countersigning import Countersigner
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.decide.group_requests import GroupRequests
from glasshouse.broker.decide.key_release import GateLimits, ReleaseGate
from glasshouse.broker.decide.owner_requests import OwnerRequests
from glasshouse.broker.decide.owner_views import OwnerViews
from glasshouse.broker.decide.stored_files import RunStore
from glasshouse.broker.http.admission import Admission
from glasshouse.broker.http.endpoints import (
    OwnerCall,
    add_message_route,
    add_open_route,
    add_route,
    add_signed_route,
    bare_app,
)
from glasshouse.broker.http.intake import Intake, Pace
from glasshouse.broker.store.broker_state import BrokerState
from glasshouse.broker.store.quota import Quota
from glasshouse.evidence.countersignature import MAX_SUBMISSION_BYTES as MAX_RECEIPT_BYTES
from glasshouse.evidence.heads import MAX_SUBMISSION_BYTES as MAX_HEADS_BYTES
from glasshouse.evidence.stored import MAX_STORE_BYTES
from glasshouse.handshake.messages import MAX_RELEASE_REQUEST_BYTES, MAX_REQUEST_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Apps:
    """The applications of the listeners."""

    runtime: Starlette  # the calls of runtimes
    owner: Starlette  # the calls of the broker's own user, on a Unix socket
    gate: Starlette  # the calls of runtimes and of enrolled owners, over the network


def create_apps(
    broker: BrokerState,
    *,
    executor: Executor,
    intake: Intake,
    limits: GateLimits | None = None,
    owners: tuple[bytes, ...] = (),
    keeps: RunStore | None = None,
    quota: Quota | None = None,
) -> Apps:
    """Return the applications over one opened broker.

    Args:
        executor: where decisions are made, and what answers wait for: a `GroupCommit` once the broker serves.
        owners: public signing keys of those who are enrolled: they alone may call over the network.
        keeps: what runs leave, at a gate that stores that.
    """
    quota = quota or Quota()
    decides, reports = ReleaseGate(broker, limits or GateLimits()), Countersigner(broker)
    runtime, owner, gate, pace = bare_app(), bare_app(), bare_app(), Pace(broker.clock_us)
    for path, reader, body_bytes in (
        ("/v1/challenge", decides.challenge, MAX_REQUEST_BYTES),
        ("/v1/evidence", decides.evidence, MAX_EVIDENCE_BYTES),
        ("/v1/release", decides.ask, MAX_RELEASE_REQUEST_BYTES),
        ("/v1/heads", reports.heads, MAX_HEADS_BYTES),
        ("/v1/receipt", reports.receipt, MAX_RECEIPT_BYTES),
    ):
        for app in (runtime, gate):
            add_message_route(app, path, reader, body_bytes=body_bytes, executor=executor, intake=intake, pace=pace)
    if keeps is not None:
        add_message_route(
            gate, "/v1/store", keeps.take, body_bytes=MAX_STORE_BYTES, executor=keeps.executor, intake=intake, pace=pace
        )
    views = OwnerViews(broker, stores=keeps is not None)
    add_route(owner, OwnerCall("GET", "/v1/broker", lambda *_: views.identity()), executor=executor)
    add_route(owner, OwnerCall("GET", "/metrics", views.metrics), executor=executor)
    admission = Admission(broker, owners, in_flight=quota.in_flight)
    for call in _owner_calls(broker, views, quota, keeps):
        add_route(owner, call, executor=executor)
        add_signed_route(gate, call, executor=executor, admission=admission)
    add_open_route(gate, "/v1/broker", views.identity)
    add_open_route(gate, "/health", lambda: ApiAnswer.of({"status": "ok"}))
    return Apps(runtime=runtime, owner=owner, gate=gate)


def _owner_calls(broker: BrokerState, views: OwnerViews, quota: Quota, keeps: RunStore | None) -> Iterator[OwnerCall]:
    """Yield the calls of an owner, on the Unix socket and over the network."""
    requests, groups = OwnerRequests(broker, quota), GroupRequests(broker, quota)
    yield OwnerCall("PUT", "/v1/delegation", requests.put_delegation)
    yield OwnerCall("POST", "/v1/deployments", requests.add_deployment)
    yield OwnerCall("GET", "/v1/deployments/{deployment}", views.deployment)
    yield OwnerCall("POST", "/v1/launches", requests.add_launch)
    yield OwnerCall("POST", "/v1/groups", groups.add_group)
    yield OwnerCall("GET", "/v1/groups/{group}", groups.group)
    yield OwnerCall("POST", "/v1/groups/{group}/refuse", groups.refuse_group)
    yield OwnerCall("POST", "/v1/packages/{package_id}/revoke", requests.revoke)
    yield OwnerCall("GET", "/v1/runs/{run_id}", views.run)
    yield OwnerCall("GET", "/v1/audit", views.audit, is_paged=True)
    if keeps is not None:
        yield OwnerCall("GET", "/v1/runs/{run_id}/stored", keeps.files)
        yield OwnerCall("GET", "/v1/runs/{run_id}/stored/{sha256}", keeps.piece, is_paged=True)
        yield OwnerCall("POST", "/v1/runs/{run_id}/stored/forget", keeps.forget)
