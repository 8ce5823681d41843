"""The broker as a process: its listeners on one loop, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from glasshouse.broker.api.owner_calls import BrokerReady, GateReady
from glasshouse.broker.decide.stored_files import RunStore
from glasshouse.broker.http.connections import Troubles
from glasshouse.broker.http.intake import Intake
from glasshouse.broker.http.listeners import BACKLOG, MOST_LISTENERS, Server, bind_tcp, bind_unix, parse_bind
from glasshouse.broker.http.service import create_apps
from glasshouse.broker.http.tls import CERTIFICATE_NAME, Certificate, TlsProtocol
from glasshouse.broker.store.broker_state import open_broker
from glasshouse.broker.store.group_commit import GroupCommit


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Where a broker listens for owners and places over the network, and which owners."""

    bind: str  # ``host:port`` or ``unix:/path``
    owners: tuple[bytes, ...]  # public signing keys of those who are enrolled
    plain: bool = False  # whether a proxy in front of it has the certificate and ends TLS; the proxy sees package keys
    store: Path | None = None  # where it keeps what runs leave; None where it does not
    store_bytes: int = 0  # the most that it keeps


def serve(
    *,
    data_dir: Path,
    runtime_bind: str,
    owner_socket: Path,
    ready: Callable[[BrokerReady], None],
    network: Network | None = None,
    stop_at_eof: int | None = None,
) -> None:
    """Run a broker until SIGTERM or SIGINT, and finish what is being answered.

    Args:
        data_dir: database and key file; made with mode 0700.
        runtime_bind: ``host:port`` (port 0 chooses one) or ``unix:/path``.
        ready: called once all listeners take requests; with a `GateReady` where there is a network.
        network: of a gate that stays; None for one that is called on this machine alone.
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
        executor = stack.enter_context(GroupCommit(broker.database))
        intake = stack.enter_context(contextlib.closing(Intake()))
        enrolled = () if network is None else network.owners
        keeps = None
        if network is not None and network.store is not None:
            keeps = RunStore(broker, folder=network.store, limit_bytes=network.store_bytes, owners=len(enrolled))
            stack.callback(keeps.close)
        apps = create_apps(broker, executor=executor, intake=intake, owners=enrolled, keeps=keeps)
        count = MOST_LISTENERS if network is not None else MOST_LISTENERS - 1
        servers = [(Server(apps.runtime, listeners=count), runtime), (Server(apps.owner, listeners=count), owner)]
        path = Path(owner_url.removeprefix("unix:"))
        listens = BrokerReady(runtime_url=runtime_url, owner_socket=path, broker_public=broker.public)
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


async def _run(servers: list[tuple[Server, socket.socket]], ready: Callable[[], None], stop_at_eof: int | None) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(Troubles())

    def stop() -> None:
        for server, _ in servers:
            server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
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
