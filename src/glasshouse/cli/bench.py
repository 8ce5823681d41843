"""`glasshouse bench`: its commands."""

from __future__ import annotations

import typer

from glasshouse.cli import bench_overhead, bench_phases

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)
group.command("overhead", help="What protection costs while it trains: interval, null result, raw slices, report.")(
    bench_overhead.command
)
group.command("phases", help="Where a step's time goes, raw against protected, and what limits its speed.")(
    bench_phases.command
)
