"""`glasshouse machine add|list|remove`: machines that you have, and how they are reached."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.named import list_and_remove
from glasshouse.cli.options import Force, HomeOption, Json
from glasshouse.cli.output import Output

if TYPE_CHECKING:
    from glasshouse.jobs.home import Home

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.command("add", help="Give a machine a name, for: glasshouse run JOB --on NAME.")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    url: Annotated[str, typer.Argument(metavar="ssh://USER@HOST[:PORT]", help="How ssh reaches it.")],
    python: Annotated[
        str, typer.Option("--python", metavar="PATH", help="The interpreter there that has Glasshouse, or torch.")
    ] = "python3",
    folder: Annotated[
        str | None, typer.Option("--folder", metavar="PATH", help="Where runs are kept there while they last.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A configuration file of ssh; your own by default.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST", help="Where other machines of a group reach it; where ssh does."),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Bring Glasshouse along: a file of `glasshouse runtime bundle`."),
    ] = None,
    force: Force = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.places import Machine, add_machine

    output = Output(as_json)
    given = {
        "folder": folder,
        "config": None if config is None else str(config.absolute()),
        "address": address,
        "bundle": None if bundle is None else str(bundle.absolute()),
    }
    machine = Machine(url=url, python=python, **{name: value for name, value in given.items() if value is not None})
    add_machine(Home.locate(home).require(), name, machine, replace=force)
    output.result({"name": name, "url": url, "python": python})
    output.say(f"{name} is {url} now.")
    if bundle is not None:
        output.say(f"Glasshouse comes from {bundle}; torch, and what else a job imports, are those of its {python}.")


def _known(home: Home) -> dict[str, dict[str, str]]:
    from glasshouse.jobs.places import known_machines

    return {name: {"url": one.url, "python": one.python} for name, one in known_machines(home).items()}


def _forget(home: Home, name: str) -> dict[str, str]:
    from glasshouse.jobs.places import remove_machine

    return {"url": remove_machine(home, name).url}


list_and_remove(group, "machine", _known, _forget, add="glasshouse machine add NAME ssh://user@host")


@group.command("sweep", help="Remove from a machine what is left there of your runs that have ended.")
def sweep(
    name: Annotated[str, typer.Argument(metavar="MACHINE", help="A name, or ssh://user@host.")],
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs import places
    from glasshouse.jobs.home import Home

    output = Output(as_json)
    removed, left = places.sweep(Home.locate(home), name)
    output.result({"removed": removed, "left": left})
    output.say(f"{name} says that what it had of {removed} ended run{'' if removed == 1 else 's'} is gone.")
    output.facts({f"left {run[:8]}": why for run, why in left.items()})
