"""`glasshouse rewind RUN --to SEQ`: its line goes on from an older checkpoint, by its owner's order."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import Accept, Detach, On, OwnerOptions, Run, Yes, option
from glasshouse.cli.runs.run_command import go_on


def command(
    run: Run,
    to: Annotated[int, option("--to SEQ", "The number of the checkpoint, as `glasshouse status RUN` shows it.", min=1)],
    on: On = None,
    detach: Detach = False,
    yes: Yes = False,
    accept_host_key: Accept = False,
    *,
    options: OwnerOptions,
) -> int:
    """Go on with a run from an older checkpoint, and return the exit code of the end of its new leg."""
    return go_on(run, options, on=on, rewind_to=to, detach=detach, yes=yes, accept=accept_host_key)
