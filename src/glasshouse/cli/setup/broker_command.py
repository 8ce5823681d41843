"""`glasshouse broker serve`: a broker that runs alone, until it is stopped; with `--bind`, a gate that others use."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import GateOption, HomeOptions, OwnerOptions, option
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.gates.embedded import Embedded, Serving, audit_own
from glasshouse.jobs.gates.known_gates import audit_gate, gate_name
from glasshouse.jobs.owner.home import socket_folder
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.providers.protocol.line import GateLine

if TYPE_CHECKING:  # the server and its database are loaded for `serve` alone
    from glasshouse.broker.http_api import BrokerReady
    from glasshouse.broker.serving import Network

group = typer.Typer(no_args_is_help=True)
_STORE_LIMIT_GIB = 20


@group.command("serve")
def serve(
    data: Annotated[Path | None, option("--data DIR", "Database and key file; the home's by default.")] = None,
    runtime_bind: Annotated[
        str, option("--runtime-bind WHERE", "For runtimes: host:port or unix:/path.")
    ] = "127.0.0.1:0",
    owner_socket: Annotated[Path | None, option("--owner-socket PATH", "For the owner: a 0600 Unix socket.")] = None,
    bind: Annotated[str | None, option("--bind HOST:PORT", "Be a gate for enrolled owners, over TLS, here.")] = None,
    advertise: Annotated[str | None, option("--advertise URL", "Where owners and machines reach it: https://…")] = None,
    owners: Annotated[
        list[Path] | None, option("--owner FILE", "An owner.pub whose owner is enrolled; several.")
    ] = None,
    plain: Annotated[
        bool, option("--behind-proxy", "No TLS here: a proxy on this machine has it, and sees package keys.")
    ] = False,
    store: Annotated[
        Path | None, option("--store DIR", "Keep checkpoints and what runs elsewhere leave, sealed, here.")
    ] = None,
    store_limit: Annotated[
        int | None, option("--store-limit GIB", "At most so much, in equal parts [20].", min=1, max=1 << 20)
    ] = None,
    *,
    options: HomeOptions,
) -> None:
    """Serve until stopped: SIGINT or SIGTERM."""
    from glasshouse.broker.http_api import GateReady
    from glasshouse.broker.serving import serve as serve_broker
    from glasshouse.broker.store.uploads import NO_LIMIT

    output, home = options.output, options.any_home.make()
    network = _network(bind, advertise, owners or [], plain=plain)
    if store_limit is not None and store is None:
        raise UsageError(Code.USAGE, "--store-limit belongs to --store DIR")
    if store is not None and network is None:
        raise UsageError(Code.USAGE, "--store belongs to --bind HOST:PORT: what runs here leave is here")
    # With the home's own data it is the broker that this home's runs use, in place of an embedded one.
    for_home = data is None
    folder = None if store is None else store.absolute()
    if network is None:  # a broker for this machine alone keeps checkpoints as an embedded one does
        folder = home.store if data is None else data / "store"
    with contextlib.ExitStack() as stack:

        def ready(bound: BrokerReady) -> None:
            if for_home:
                serving = Serving(
                    process=ProcessName.of(),
                    runtime_url=bound.runtime_url,
                    owner_socket=bound.owner_socket,
                    public=bound.broker_public,
                    embedded=False,
                )
                stack.enter_context(Embedded(home).announced(serving))
            gate = {} if advertise is None else {"advertise": advertise, "key": bound.broker_public.hex()}
            output.result(bound.to_json() | gate)
            output.say("The broker serves.", style="bold green")
            output.facts({"runtimes": bound.runtime_url, "owner": bound.owner_socket, "stop": "Ctrl-C"})
            if isinstance(bound, GateReady):
                pinned = "" if bound.certificate is None else f" --certificate {bound.certificate.hex()}"
                output.say("It is a gate too; each owner who is enrolled adds it with:")
                output.say(f"glasshouse gate add NAME {advertise} --key {bound.broker_public.hex()}{pinned}")

        serve_broker(
            data_dir=data or home.broker / "data",
            runtime_bind=runtime_bind,
            owner_socket=owner_socket or socket_folder(home) / "owner.sock",
            ready=ready,
            network=network,
            store=folder,
            store_bytes=NO_LIMIT if network is None else (store_limit or _STORE_LIMIT_GIB) << 30,
        )


@group.command("audit")
def audit(gate: GateOption = None, *, options: OwnerOptions) -> None:
    """Check the audit log: of your own broker, or what a gate has of you."""
    output = options.output
    if gate is None:
        records = audit_own(options.any_home.make())
    else:
        gate = gate_name(options.own_home, gate)
        records = audit_gate(options.own_home, gate, options.unlock().signing)
    output.result({"gate": gate, "records": records})
    for record in records:
        if isinstance(record, dict):
            facts = record["facts"] if isinstance(record["facts"], dict) else {}
            words = " ".join(f"{name}={value}" for name, value in facts.items())
            output.say(f"{record['sequence']} {record['event']} {words}")
    output.say(f"{len(records)} records; they follow each other.", style="bold")


def _network(bind: str | None, advertise: str | None, owners: list[Path], *, plain: bool) -> Network | None:
    """Return where the broker is a gate, and for whom; None where it is none."""
    from glasshouse.broker.serving import Network

    if bind is None:
        if advertise is not None or owners or plain:
            raise UsageError(Code.USAGE, "--advertise, --owner and --behind-proxy belong to --bind HOST:PORT")
        return None
    if advertise is None or not owners:
        why = "a gate needs --advertise https://HOST:PORT and at least one --owner FILE"
        hint = "FILE is an owner.pub: its owner has it from glasshouse identity show"
        raise UsageError(Code.USAGE, why, hint=hint)
    _check_plain(bind, plain=plain)
    GateLine(url=advertise, certificate=None)  # an address that owners and launch files can name
    return Network(bind=bind, owners=tuple(read_public(path).signing for path in owners), plain=plain)


def _check_plain(bind: str, *, plain: bool) -> None:
    """Refuse to take package keys without TLS from anywhere but this machine."""
    from glasshouse.broker.http.listeners import parse_bind

    where = parse_bind(bind)
    if not plain or isinstance(where, Path):
        return
    try:
        loopback = ipaddress.ip_address(where[0]).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        why = f"--behind-proxy on {where[0]} would take package keys over the network in the clear"
        hint = "bind it to 127.0.0.1 or to unix:/path, and let the proxy on this machine reach it there"
        raise UsageError(Code.USAGE, why, hint=hint)
