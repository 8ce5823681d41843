"""One broker process: what each listener answers, its listeners on one loop, and a graceful end.

``python -m glasshouse.broker.serving`` runs one and prints one JSON line when it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path

from starlette.applications import Starlette

from glasshouse.attestation.detached import MAX_MESSAGE_BYTES
from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES
from glasshouse.broker.decide.challenges import ChallengeIssuer, GateLimits
from glasshouse.broker.decide.checkpoints.checkpoint_store import CheckpointStore
from glasshouse.broker.decide.countersigning import Countersigner
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.decide.group_release import ReleaseRequests
from glasshouse.broker.decide.groups import GroupRequests
from glasshouse.broker.decide.hardware.packs import CollateralRequests
from glasshouse.broker.decide.key_release import ReleaseGate
from glasshouse.broker.decide.lines.counting import CheckpointCounter
from glasshouse.broker.decide.lines.leg_launch import catch_up
from glasshouse.broker.decide.lines.line_requests import LineRequests
from glasshouse.broker.decide.owner_requests import OwnerRequests
from glasshouse.broker.decide.owner_views import OwnerViews
from glasshouse.broker.decide.stored_files import RunStore
from glasshouse.broker.http.connections import Troubles
from glasshouse.broker.http.endpoints import (
    Admission,
    OwnerCall,
    Reader,
    add_message_route,
    add_open_route,
    add_route,
    add_signed_route,
    bare_app,
)
from glasshouse.broker.http.intake import Intake, Pace
from glasshouse.broker.http.listeners import BACKLOG, MOST_LISTENERS, Server, bind_tcp, bind_unix, parse_bind
from glasshouse.broker.http.tls import CERTIFICATE_NAME, Certificate, TlsProtocol
from glasshouse.broker.http_api import MAX_COLLATERAL_BYTES, BrokerReady, GateReady
from glasshouse.broker.store.broker_state import open_broker
from glasshouse.broker.store.database import BrokerState, GroupCommit
from glasshouse.broker.store.line_rows import NOTHING_KEPT, LineMemory
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.uploads import NO_LIMIT, StoreSpace
from glasshouse.errors import GlasshouseError
from glasshouse.evidence.bundle import MAX_SUBMISSION_BYTES as MAX_RECEIPT_BYTES
from glasshouse.evidence.heads import MAX_SUBMISSION_BYTES as MAX_HEADS_BYTES
from glasshouse.evidence.stored import MAX_STORE_BYTES
from glasshouse.handshake.messages import MAX_RELEASE_REQUEST_BYTES, MAX_REQUEST_BYTES
from glasshouse.wire.lines.statements import (
    COUNT_PATH,
    HEADER_PATH,
    MAX_PIECE_BYTES,
    MAX_SIGNED_HEADER_BYTES,
    MAX_STATEMENT_BYTES,
    PART_PATH,
    READ_PATH,
)

_TOLD_TO_STOP = signal.SIGTERM, signal.SIGINT


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
    checkpoints: CheckpointStore | None = None,
    quota: Quota | None = None,
) -> Apps:
    """Return the applications over one opened broker.

    Args:
        executor: where decisions are made, and what answers wait for: a `GroupCommit` once the broker serves.
        owners: public signing keys of those who are enrolled: they alone may call over the network.
        keeps: what runs leave, at a gate that stores that.
    """
    memory: LineMemory = NOTHING_KEPT if checkpoints is None else checkpoints.memory
    catch_up(broker, memory)
    quota = quota or Quota()
    reports = Countersigner(broker)
    runtime, owner, gate, pace = bare_app(), bare_app(), bare_app(), Pace(broker.clock_us)
    messages: list[tuple[str, Reader, int]] = [
        ("/v1/challenge", ChallengeIssuer(broker, limits or GateLimits()).challenge, MAX_REQUEST_BYTES),
        ("/v1/release", ReleaseRequests(broker).ask, MAX_RELEASE_REQUEST_BYTES),
        ("/v1/heads", reports.heads, MAX_HEADS_BYTES),
        ("/v1/receipt", reports.receipt, MAX_RECEIPT_BYTES),
    ]
    if memory is not NOTHING_KEPT:
        messages.append((COUNT_PATH, CheckpointCounter(broker, memory).count, MAX_STATEMENT_BYTES))
    evidence = ReleaseGate(broker, memory).evidence
    sizes = {"body_bytes": MAX_MESSAGE_BYTES, "alone_bytes": MAX_EVIDENCE_BYTES}
    for app in (runtime, gate):
        add_message_route(app, "/v1/evidence", evidence, **sizes, executor=executor, intake=intake, pace=pace)
    for path, reader, body_bytes in messages:
        for app in (runtime, gate):
            add_message_route(app, path, reader, body_bytes=body_bytes, executor=executor, intake=intake, pace=pace)
    if keeps is not None:
        add_message_route(
            gate, "/v1/store", keeps.take, body_bytes=MAX_STORE_BYTES, executor=keeps.executor, intake=intake, pace=pace
        )
    if checkpoints is not None:
        for path, reader, body_bytes in (
            (PART_PATH, checkpoints.part, MAX_PIECE_BYTES),
            (HEADER_PATH, checkpoints.header, MAX_SIGNED_HEADER_BYTES),
            (READ_PATH, checkpoints.read, MAX_STATEMENT_BYTES),
        ):
            writer = checkpoints.executor
            for app in (runtime, gate):
                add_message_route(app, path, reader, body_bytes=body_bytes, executor=writer, intake=intake, pace=pace)
    store_public = None if checkpoints is None else checkpoints.key.public
    views = OwnerViews(broker, stores=keeps is not None, store_public=store_public)
    add_route(owner, OwnerCall("GET", "/v1/broker", lambda *_: views.identity()), executor=executor)
    add_route(owner, OwnerCall("GET", "/metrics", views.metrics), executor=executor)
    admission = Admission(broker, owners, in_flight=quota.in_flight)
    for call in _owner_calls(broker, views, quota, keeps, memory):
        add_route(owner, call, executor=executor)
        add_signed_route(gate, call, executor=executor, admission=admission)
    add_open_route(gate, "/v1/broker", views.identity)
    add_open_route(gate, "/health", lambda: ApiAnswer.of({"status": "ok"}))
    return Apps(runtime=runtime, owner=owner, gate=gate)


def _owner_calls(
    broker: BrokerState, views: OwnerViews, quota: Quota, keeps: RunStore | None, memory: LineMemory
) -> Iterator[OwnerCall]:
    """Yield the calls of an owner, on the Unix socket and over the network."""
    requests, groups = OwnerRequests(broker, quota, memory), GroupRequests(broker, quota)
    lines, packs = LineRequests(broker, quota, memory), CollateralRequests(broker, quota)
    yield OwnerCall("PUT", "/v1/delegation", requests.put_delegation)
    yield OwnerCall("POST", "/v1/collateral", packs.put_collateral, body_bytes=MAX_COLLATERAL_BYTES)
    yield OwnerCall("POST", "/v1/deployments", requests.add_deployment)
    yield OwnerCall("GET", "/v1/deployments/{deployment}", views.deployment)
    yield OwnerCall("POST", "/v1/launches", requests.add_launch)
    yield OwnerCall("POST", "/v1/groups", groups.add_group)
    yield OwnerCall("GET", "/v1/groups/{group}", groups.group)
    yield OwnerCall("POST", "/v1/groups/{group}/refuse", groups.refuse_group)
    yield OwnerCall("GET", "/v1/lines/{line}", lines.line)
    yield OwnerCall("POST", "/v1/lines/{line}/lost", lines.lost)
    yield OwnerCall("POST", "/v1/packages/{package_id}/revoke", requests.revoke)
    yield OwnerCall("GET", "/v1/runs/{run_id}", views.run)
    yield OwnerCall("GET", "/v1/audit", views.audit, is_paged=True)
    if keeps is not None:
        yield OwnerCall("GET", "/v1/runs/{run_id}/stored", keeps.files)
        yield OwnerCall("GET", "/v1/runs/{run_id}/stored/{sha256}", keeps.piece, is_paged=True)
        yield OwnerCall("POST", "/v1/runs/{run_id}/stored/forget", keeps.forget)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Where a broker listens for owners and places over the network, and which owners."""

    bind: str  # ``host:port`` or ``unix:/path``
    owners: tuple[bytes, ...]  # public signing keys of those who are enrolled
    plain: bool = False  # whether a proxy in front of it has the certificate and ends TLS; the proxy sees package keys


def serve(
    *,
    data_dir: Path,
    runtime_bind: str,
    owner_socket: Path,
    ready: Callable[[BrokerReady], None],
    network: Network | None = None,
    store: Path | None = None,
    store_bytes: int = NO_LIMIT,
    stop_at_eof: int | None = None,
) -> None:
    """Run a broker until SIGTERM or SIGINT, and finish what is being answered.

    Args:
        data_dir: database and key file; made with mode 0700.
        runtime_bind: ``host:port`` (port 0 chooses one) or ``unix:/path``.
        ready: called once all listeners take requests; with a `GateReady` where there is a network.
        network: of a gate that stays; None for one that is called on this machine alone.
        store: where it keeps checkpoints and, of a gate that stays, what runs leave; None where it does not.
        store_bytes: the most that it keeps.
        stop_at_eof: a descriptor whose end of file stops the broker too: that of the process that started it.

    Raises:
        UsageError: a directory, key file, socket or address that cannot be used, and how to mend it.
        PeerError: `broker-unreachable` when the database cannot be opened.
    """
    os.umask(0o077)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # package keys pass through this memory
    broker = open_broker(data_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(broker.database.close)
        runtime, runtime_url = stack.enter_context(_listening(runtime_bind))
        owner, owner_url = stack.enter_context(_listening(f"unix:{os.path.abspath(owner_socket)}"))  # noqa: PTH100
        enrolled = () if network is None else network.owners
        keeps = checkpoints = None
        if store is not None:
            space = StoreSpace(broker, folder=store, limit_bytes=store_bytes, owners=len(enrolled))
            stack.callback(space.close)
            checkpoints = CheckpointStore(broker, space)
            keeps = None if network is None else RunStore(broker, space)
        executor = stack.enter_context(GroupCommit(broker.database))
        intake = stack.enter_context(contextlib.closing(Intake()))
        apps = create_apps(
            broker, executor=executor, intake=intake, owners=enrolled, keeps=keeps, checkpoints=checkpoints
        )
        count = MOST_LISTENERS if network is not None else MOST_LISTENERS - 1
        servers = [(Server(apps.runtime, listeners=count), runtime), (Server(apps.owner, listeners=count), owner)]
        path = Path(owner_url.removeprefix("unix:"))
        listens = BrokerReady(
            runtime_url=runtime_url,
            owner_socket=path,
            broker_public=broker.public,
            store_public=None if checkpoints is None else checkpoints.key.public,
        )
        if network is not None:
            gate, gate_url = stack.enter_context(_listening(network.bind))
            pinned = None
            if network.plain:
                servers.append((Server(apps.gate), gate))
            else:
                certificate = Certificate(data_dir / CERTIFICATE_NAME)
                servers.append((Server(apps.gate, TlsProtocol, context=certificate.context), gate))
                pinned, gate_url = certificate.sha256, gate_url.replace("http:", "https:", 1)
            listens = GateReady(**asdict(listens), gate=gate_url, certificate=pinned)
        gc.collect()
        gc.freeze()
        asyncio.run(_run(servers, lambda: ready(listens), stop_at_eof))
        # Told once more while it closes, it ends no worse.
        for number in _TOLD_TO_STOP:
            signal.signal(number, signal.SIG_IGN)


async def _run(servers: list[tuple[Server, socket.socket]], ready: Callable[[], None], stop_at_eof: int | None) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(Troubles())

    def stop() -> None:
        for server, _ in servers:
            server.stop()

    for number in _TOLD_TO_STOP:
        loop.add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as group:
        for server, listener in servers:
            group.create_task(server.serve(sockets=[listener]))
        while not all(server.started for server, _ in servers):
            await asyncio.sleep(0.001)
        for _, listener in servers:
            listener.listen(BACKLOG)
        ready()
        if stop_at_eof is not None:
            try:
                loop.add_reader(stop_at_eof, _at_eof, loop, stop_at_eof, stop)
            except OSError:  # a file or /dev/null: no process whose end could be awaited
                stop()


def _at_eof(loop: asyncio.AbstractEventLoop, descriptor: int, stop: Callable[[], None]) -> None:
    try:
        data = os.read(descriptor, 4096)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    if not data:
        loop.remove_reader(descriptor)
        stop()


@contextlib.contextmanager
def _listening(bind: str) -> Iterator[tuple[socket.socket, str]]:
    where = parse_bind(bind)
    listener, url = bind_unix(where) if isinstance(where, Path) else bind_tcp(*where)
    try:
        yield listener, url
    finally:
        listener.close()
        if isinstance(where, Path):
            where.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; return the exit status."""
    parser = argparse.ArgumentParser(prog="glasshouse-broker", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory of database and key file (mode 0700)")
    parser.add_argument("--runtime-bind", default="127.0.0.1:0", help="host:port or unix:/path, for runtimes")
    parser.add_argument("--owner-socket", type=Path, required=True, help="path of the owner's Unix socket")
    parser.add_argument("--store", type=Path, help="folder of the checkpoints that are kept")
    parser.add_argument("--stop-at-eof", action="store_true", help="stop when standard input ends")
    options = parser.parse_args(arguments)
    try:
        serve(
            data_dir=options.data,
            runtime_bind=options.runtime_bind,
            owner_socket=options.owner_socket,
            ready=_print_ready,
            store=options.store,
            stop_at_eof=sys.stdin.fileno() if options.stop_at_eof else None,
        )
    except GlasshouseError as error:
        sys.stderr.write(f"{error}\n{error.hint}\n" if error.hint else f"{error}\n")
        return error.exit_code
    return 0


def _print_ready(ready: BrokerReady) -> None:
    sys.stdout.write(ready.encode().decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
