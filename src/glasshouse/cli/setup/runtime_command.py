"""`glasshouse runtime bundle`: what a machine needs that has no Glasshouse of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import Force, JsonOptions, option
from glasshouse.jobs.places.runtime_bundle import make_bundle
from glasshouse.providers.place.bundled import digest_of

group = typer.Typer(no_args_is_help=True)


@group.callback()
def _group() -> None:
    """Keep the name of the one command below it."""


@group.command("bundle")
def bundle(
    out: Annotated[Path, option("-o --out FILE", "The file to write.")],
    wheels: Annotated[
        Path | None, option("--wheels DIR", "Take what it needs from these wheels, not from what is installed.")
    ] = None,
    python: Annotated[
        str | None, option("--python 3.N", "The machine's Python, for which the wheels are; this one's.")
    ] = None,
    force: Force = False,
    *,
    options: JsonOptions,
) -> None:
    """Put this Glasshouse and what its runtime needs into one file, the same each time."""
    output, made = options.output, make_bundle(out, wheels=wheels, python=python, replace=force)
    facts = {"python": made.python, "machine": made.machine, "sha256": digest_of(out), "bytes": out.stat().st_size}
    output.result({"file": str(out), "distributions": made.distributions} | facts)
    output.facts({**facts, **made.distributions})
    output.say(
        f"A machine with Python {made.python} takes it: glasshouse machine add NAME ssh://user@host --bundle {out}"
    )
