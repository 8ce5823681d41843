"""`glasshouse gate add|list|remove`: gates that stay, and what of them is pinned."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from glasshouse.cli.options import Force, HomeOptions, argument, list_and_remove, option
from glasshouse.jobs.gates.known_gates import KnownGate, add_gate, gate_of, known_gates, remove_gate

group = typer.Typer(no_args_is_help=True)


@group.command("add")
def add(
    name: Annotated[str, argument("NAME", "What to call it.")],
    url: Annotated[str, argument("https://HOST[:PORT]", "Where it is reached.")],
    key: Annotated[str, option("--key HEX", "Its signing key, which it prints when it starts.")],
    certificate: Annotated[
        str | None,
        option(
            "--certificate HEX",
            "SHA-256 of its own certificate, printed too; left out, this system's authorities must vouch for it.",
        ),
    ] = None,
    force: Force = False,
    *,
    options: HomeOptions,
) -> None:
    """Give a gate a name, for: glasshouse run JOB --gate NAME."""
    gate = gate_of(url, key=key, certificate=certificate)
    add_gate(options.own_home, name, gate, force=force)
    options.output.result({"name": name, **gate.to_json()})
    options.output.say(f"{name} is the gate at {url} now.")


def _facts(gate: KnownGate) -> dict[str, Any]:
    return {"url": gate.url} | gate.to_json()


list_and_remove(
    group,
    "gate",
    lambda home: {name: _facts(gate) for name, gate in known_gates(home).items()},
    lambda home, name: _facts(remove_gate(home, name)),
    add="glasshouse gate add NAME https://HOST:PORT --key KEY",
)
