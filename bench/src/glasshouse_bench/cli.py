"""`glasshouse bench …`, as this distribution adds it; what a command needs is imported when it runs."""

from __future__ import annotations

import typer

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True, help="Measure what protection costs a training step.")


@group.callback()
def _bench() -> None:
    """Measure what protection costs a training step."""
