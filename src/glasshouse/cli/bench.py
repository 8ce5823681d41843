"""`glasshouse bench broker`: the numbers of the README, printed by what measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from glasshouse.cli import bench_collectives, bench_overhead, bench_phases
from glasshouse.cli.options import Json
from glasshouse.cli.output import Output
from glasshouse.cli.words import bytes_text
from glasshouse.errors import ExitCode

__all__ = ["group"]

_BYTES = "_bytes"

group = typer.Typer(no_args_is_help=True)
group.command("overhead", help="What protection costs while it trains: interval, null result, raw slices, report.")(
    bench_overhead.command
)
group.command("phases", help="Where a step's time goes, raw against protected, and what limits its speed.")(
    bench_phases.command
)
group.command("collectives", help="What sealed collectives cost beside plaintext ones, with a model of more ranks.")(
    bench_collectives.command
)


@group.command("broker", help="Releases a second, and how long they take, when many runtimes attest at once.")
def broker(
    runtimes: Annotated[
        str, typer.Option("--runtimes", metavar="N,N,...", help="How many at a time, one level after the other.")
    ] = "1,2,4,8,16",
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=600, help="How long each level is measured.")
    ] = 5.0,
    warm_up: Annotated[
        float, typer.Option("--warm-up", min=0, max=60, help="Seconds that each level goes on before that.")
    ] = 1.0,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where the database lies; a disk by default.")
    ] = None,
    as_json: Json = False,
) -> int:
    from glasshouse.bench.broker import run

    levels = [int(part) if part.isascii() and part.isdigit() else 0 for part in runtimes.split(",")]
    output = Output(as_json)
    result = run(runtimes=levels, seconds=seconds, warm_up_s=warm_up, folder=folder)
    if not as_json:
        _levels(output, result["levels"])
        cores, kind = result["cores_shared_by_all"], result["filesystem"]
        output.say(f"Broker and clients share {cores} cores; the database lies on {kind}.")
        if not result["database_on_disk"]:
            output.say("That is memory: a commit costs nothing there, and would not outlive a restart.", style="yellow")
    return _print(output, result)


def _print(output: Output, result: dict[str, Any]) -> int:
    """Print the bars for people, everything for programs; fail when a bar is not met."""
    output.result(result)
    met = all(bar["met"] for bar in result["bars"].values())
    if not output.as_json:
        _table(output, result["bars"])
        numbers = {
            name: value
            for name, value in result.items()
            if name not in ("bars", "bare_requests", "each", "levels", "seconds", "warm_up")
        }
        output.facts({name.removesuffix(_BYTES): _text(value, name) for name, value in numbers.items()})
        if not met:
            missed = ", ".join(name.replace("_", " ") for name, bar in result["bars"].items() if not bar["met"])
            output.say(f"This machine, or what else loads it now, did not reach: {missed}.", style="bold yellow")
    return ExitCode.DONE if met else ExitCode.RUN_FAILED


def _levels(output: Output, levels: list[dict[str, Any]]) -> None:
    from rich.table import Table

    columns = ("runtimes", "a second", "p50 ms", "p90 ms", "p99 ms", "longest ms", "broker CPU ms", "client CPU ms")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right")
    for level in levels:
        times = level["exchange_ms"]
        numbers = [level["runtimes"], level["per_s"], *(times[name] for name in ("p50", "p90", "p99", "max"))]
        table.add_row(*(f"{value:g}" for value in [*numbers, level["server_cpu_ms"], level["client_cpu_ms"]]))
    output.console.print(table)
    output.say("")


def _table(output: Output, bars: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "what", "found", "bar"):
        table.add_column(name)
    for name, bar in bars.items():
        least = "at_least" in bar
        limit = f"at {'least' if least else 'most'} {_flat(bar['at_least' if least else 'at_most'], name)}"
        mark = Text("✓", style="green") if bar["met"] else Text("✗", style="bold red")
        table.add_row(mark, name.removesuffix(_BYTES).replace("_", " "), _flat(bar["found"], name), limit)
    output.console.print(table)
    output.say("")


def _text(value: Any, name: str) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key.removesuffix(_BYTES)}: {_flat(item, key)}" for key, item in value.items())
    return _flat(value, name)


def _flat(value: Any, name: str) -> str:
    """Return a number for people; one whose name says that it counts bytes as a size."""
    if isinstance(value, dict):
        return ", ".join(f"{key.removesuffix(_BYTES)} {_flat(item, key)}" for key, item in value.items())
    if isinstance(value, int | float) and not isinstance(value, bool) and name.endswith(_BYTES):
        return bytes_text(round(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
