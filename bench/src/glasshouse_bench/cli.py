"""`glasshouse bench …`, as this distribution adds it; what a command needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.app import expanded
from glasshouse.cli.options import JsonOptions, OwnerOptions

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True, help="Measure what protection costs a training step.")


@group.callback()
def _bench() -> None:
    """Measure what protection costs a training step."""


@group.command(help="What protection costs while it trains: one number, its interval, and one word.")
@expanded
def overhead(
    workload: Annotated[str, typer.Option("--workload", metavar="KIND", help="mlp, lora, or your own script.")],
    job: Annotated[
        Path | None, typer.Option("--job", metavar="JOB.toml", help="Your own job instead of the built-in one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="For lora: config:qwen2-tiny, config:qwen2.5-0.5b or config:qwen2.5-7b."),
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="interleaved (with a null beside it), sequential, alternating, or null.")
    ] = "interleaved",
    time: Annotated[
        str,
        typer.Option("--time", metavar="TIME", help="For the sessions; a null beside them takes half of it more."),
    ] = "10m",
    margin: Annotated[
        str, typer.Option("--margin", metavar="PERCENT", help="Differences below it count as equivalent.")
    ] = "1%",
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            help="Where the files go; a measurement of yours that lies there goes on by its design.",
        ),
    ] = None,
    planted: Annotated[str | None, typer.Option("--planted", hidden=True)] = None,
    *,
    options: OwnerOptions,
) -> int:
    from glasshouse_bench import overhead as steps

    asked = steps.wish(mode, time, margin, planted)
    make = steps.maker(workload, job, model, device)
    identity = steps.owner(options)
    folder = out or steps.new_folder(workload)
    return steps.run(options.output, asked, make, folder=folder, identity=identity, on_cpu=device == "cpu")


@group.command()
@expanded
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A measurement's folder.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Where to; by default report.html in the folder.")
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option("--published", metavar="FILE", help="Rows to draw beside the result, as JSON."),
    ] = None,
    *,
    options: JsonOptions,
) -> None:
    """Draw a measurement as one page, computed again from its records; no signature is checked."""
    from glasshouse.jobs.owner.home import write_private
    from glasshouse_bench.report import render
    from glasshouse_bench.statement import Measurement

    output = options.output
    page = render(Measurement.load(folder), published=published)
    path = out or folder / "report.html"
    write_private(path, page.encode())
    output.result({"bytes": len(page.encode()), "path": str(path)})
    output.say(f"The report is in {path}; what it says is signed only in statement.json: glasshouse verify {folder}")
