"""`glasshouse broker serve`: a broker that runs alone, until it is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import HomeOption, Json
from glasshouse.cli.output import Output

if TYPE_CHECKING:
    from glasshouse.broker.serve import Ready

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.callback()
def _group() -> None:
    """Keeps `serve` a command of its own; a group of one would swallow its name."""


@group.command("serve", help="Serve until stopped: SIGINT or SIGTERM.")
def serve(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Database and key file; the home's by default.")
    ] = None,
    runtime_bind: Annotated[
        str, typer.Option("--runtime-bind", metavar="WHERE", help="For runtimes: host:port or unix:/path.")
    ] = "127.0.0.1:0",
    owner_socket: Annotated[
        Path | None, typer.Option("--owner-socket", metavar="PATH", help="For the owner: a 0600 Unix socket.")
    ] = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    import contextlib

    from glasshouse.broker.serve import serve as serve_broker
    from glasshouse.jobs.embedded import Embedded, Serving, socket_folder
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.processes import ProcessName

    output, place = Output(as_json), Home.locate(home).make()
    # With the home's own data it is the broker that this home's runs use, in place of an embedded one.
    for_home = data is None
    with contextlib.ExitStack() as stack:

        def ready(told: Ready) -> None:
            if for_home:
                serving = Serving(
                    process=ProcessName.of(),
                    runtime_url=told.runtime_url,
                    owner_socket=told.owner_socket,
                    public=told.broker_public,
                    embedded=False,
                )
                stack.enter_context(Embedded(place).announced(serving))
            output.result(told.to_json())
            output.say("The broker serves.", style="bold green")
            output.facts({"runtimes": told.runtime_url, "owner": told.owner_socket, "stop": "Ctrl-C"})

        serve_broker(
            data_dir=data or place.broker / "data",
            runtime_bind=runtime_bind,
            owner_socket=owner_socket or socket_folder(place) / "owner.sock",
            ready=ready,
        )
