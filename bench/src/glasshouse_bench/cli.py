"""`glasshouse bench …`, as this distribution adds it; what a command needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import Json
from glasshouse.cli.output import Output
from glasshouse_bench import overhead

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True, help="Measure what protection costs a training step.")

group.command("overhead", help="What protection costs while it trains: one number, its interval, and one word.")(
    overhead.overhead
)


@group.callback()
def _bench() -> None:
    """Measure what protection costs a training step."""


@group.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A measurement's folder.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Where to; by default report.html in the folder.")
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option("--published", metavar="FILE", help="Rows to draw beside the result, as JSON."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a measurement as one page, computed again from its records; no signature is checked."""
    from glasshouse.jobs.files import write_private
    from glasshouse_bench.report import render
    from glasshouse_bench.statement import Measurement

    output = Output(as_json)
    page = render(Measurement.load(folder), published=published)
    path = out or folder / "report.html"
    write_private(path, page.encode())
    output.result({"bytes": len(page.encode()), "path": str(path)})
    output.say(f"The report is in {path}; what it says is signed only in statement.json: glasshouse verify {folder}")
