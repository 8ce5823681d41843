"""`glasshouse resume RUN`: its line goes on at another machine, from the last checkpoint that its gate counted."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import Accept, Detach, On, OwnerOptions, Run, Yes, option
from glasshouse.cli.runs.run_command import go_on


def command(
    run: Run = "latest",
    on: On = None,
    lost: Annotated[
        bool, option("--lost", "Its machines do not exist any more: tell the gate so, and wait for no lease.")
    ] = False,
    detach: Detach = False,
    yes: Yes = False,
    accept_host_key: Accept = False,
    *,
    options: OwnerOptions,
) -> int:
    """Go on with a run, and return the exit code of the end of its new leg."""
    return go_on(run, options, on=on, lost=lost, detach=detach, yes=yes, accept=accept_host_key)
