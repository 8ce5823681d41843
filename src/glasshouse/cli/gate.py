"""`glasshouse gate add|list|remove`: gates that stay, and what of them is pinned."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import Force, HomeOption, Json
from glasshouse.cli.output import Output

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.command("add", help="Give a gate a name, for: glasshouse run JOB --gate NAME.")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    url: Annotated[str, typer.Argument(metavar="https://HOST[:PORT]", help="Where it is reached.")],
    key: Annotated[str, typer.Option("--key", metavar="HEX", help="Its signing key, which it prints when it starts.")],
    certificate: Annotated[
        str | None,
        typer.Option(
            "--certificate",
            metavar="HEX",
            help="SHA-256 of its own certificate, printed too; left out, this system's authorities must know it.",
        ),
    ] = None,
    force: Force = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.gates import add_gate, gate_of
    from glasshouse.jobs.home import Home

    output = Output(as_json)
    gate = gate_of(url, key=key, certificate=certificate)
    add_gate(Home.locate(home).require(), name, gate, force=force)
    output.result({"name": name, **gate.to_json()})
    output.say(f"{name} is the gate at {url} now.")


@group.command("list", help="The gates that have a name here.")
def show(home: HomeOption = None, as_json: Json = False) -> None:
    from glasshouse.jobs.gates import known_gates
    from glasshouse.jobs.home import Home

    output, known = Output(as_json), known_gates(Home.locate(home))
    output.result({"gates": [{"name": name, **one.to_json()} for name, one in known.items()]})
    output.facts({name: one.url for name, one in known.items()})
    if not known:
        output.say("No gate has a name here: glasshouse gate add NAME https://HOST:PORT --key KEY")


@group.command("remove", help="Forget a gate; nothing happens to it.")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name here.")],
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.gates import remove_gate
    from glasshouse.jobs.home import Home

    output = Output(as_json)
    gate = remove_gate(Home.locate(home), name)
    output.result({"name": name, **gate.to_json()})
    output.say(f"{name} ({gate.url}) has no name here any more.")
