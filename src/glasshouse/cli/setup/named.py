"""`list` and `remove` of what has a name here: gates, machines, recorded installations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from glasshouse.cli.options import HomeOptions, argument
from glasshouse.jobs.owner.home import Home


def list_and_remove(
    group: typer.Typer,
    kind: str,
    known: Callable[[Home], Mapping[str, Mapping[str, Any]]],
    forget: Callable[[Home, str], Mapping[str, Any]],
    *,
    add: str,
    then: str = "nothing happens to it",
) -> None:
    """Add the two commands to a group.

    Args:
        kind: of what, in the singular.
        known: returns what each name stands for: its JSON members, of which people are shown the first that is there,
            and of a table its names.
        forget: forgets a name, and returns what it stood for.
        add: what to do where nothing has a name yet.
        then: what forgetting one does.
    """

    @group.command("list", help=f"The {kind}s that have a name here.")
    def show(*, options: HomeOptions) -> None:
        output, found = options.output, known(options.any_home)
        output.result({f"{kind}s": [{"name": name, **one} for name, one in found.items()]})
        output.facts({name: _shown(one) for name, one in found.items()})
        if not found:
            output.say(f"No {kind} has a name here: {add}")

    @group.command("remove", help=f"Forget a {kind}; {then}.")
    def remove(name: Annotated[str, argument("NAME", "Its name here.")], *, options: HomeOptions) -> None:
        output, one = options.output, forget(options.any_home, name)
        output.result({"name": name, **one})
        output.say(f"{name} ({_shown(one)}) has no name here any more.")


def _shown(one: Mapping[str, Any]) -> str:
    value = next(value for value in one.values() if value is not None)
    return " and ".join(value) if isinstance(value, dict) else str(value)
