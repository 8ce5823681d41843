"""`glasshouse resume RUN`: its line goes on at another machine, from the last checkpoint that its gate counted."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import Accept, Detach, OwnerOptions, Run, Yes, option
from glasshouse.cli.runs.run_command import finish, listener_for


def command(
    run: Run = "latest",
    on: Annotated[str | None, option("--on MACHINE", "Where, as of `glasshouse run`; by default where it was.")] = None,
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
    from glasshouse.jobs.lines.resuming import resume
    from glasshouse.jobs.owner.rundir import RunFolder

    home, identity, steps = options.own_home, options.unlock(), listener_for(options, yes=yes)
    ended = resume(
        RunFolder.find(home, run),
        home=home,
        identity=identity,
        listener=steps,
        on=on,
        lost=lost,
        detach=detach,
        accept=accept_host_key,
    )
    return finish(ended, options, identity, steps)
