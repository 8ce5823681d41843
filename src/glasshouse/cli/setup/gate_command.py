"""`glasshouse gate add|list|remove`: gates that stay, and what of them is pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from glasshouse.cli.options import Force, HomeOption, Json
from glasshouse.cli.setup.named import list_and_remove
from glasshouse.cli.show.output import Output

if TYPE_CHECKING:
    from glasshouse.jobs.gates.known_gates import Gate
    from glasshouse.jobs.owner.home import Home

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
    from glasshouse.jobs.gates.known_gates import add_gate, gate_of
    from glasshouse.jobs.owner.home import Home

    output = Output(as_json)
    gate = gate_of(url, key=key, certificate=certificate)
    add_gate(Home.locate(home).require(), name, gate, force=force)
    output.result({"name": name, **gate.to_json()})
    output.say(f"{name} is the gate at {url} now.")


def _known(home: Home) -> dict[str, dict[str, Any]]:
    from glasshouse.jobs.gates.known_gates import known_gates

    return {name: _told(gate) for name, gate in known_gates(home).items()}


def _forget(home: Home, name: str) -> dict[str, Any]:
    from glasshouse.jobs.gates.known_gates import remove_gate

    return _told(remove_gate(home, name))


def _told(gate: Gate) -> dict[str, Any]:
    return {"url": gate.url} | gate.to_json()


list_and_remove(group, "gate", _known, _forget, add="glasshouse gate add NAME https://HOST:PORT --key KEY")
