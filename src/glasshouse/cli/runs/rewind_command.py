"""`glasshouse rewind RUN --to SEQ`: its line goes on from an older checkpoint, by its owner's order."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import Accept, Detach, OwnerOptions, Run, Yes, option
from glasshouse.cli.runs.run_command import finish, listener_for


def command(
    run: Run,
    to: Annotated[int, option("--to SEQ", "The number of the checkpoint, as `glasshouse status RUN` shows it.", min=1)],
    on: Annotated[str | None, option("--on MACHINE", "Where, as of `glasshouse run`; by default where it was.")] = None,
    detach: Detach = False,
    yes: Yes = False,
    accept_host_key: Accept = False,
    *,
    options: OwnerOptions,
) -> int:
    """Go on with a run from an older checkpoint, and return the exit code of the end of its new leg."""
    from glasshouse.jobs.lines.resuming import resume
    from glasshouse.jobs.owner.rundir import RunFolder

    home, identity, steps = options.own_home, options.unlock(), listener_for(options, yes=yes)
    ended = resume(
        RunFolder.find(home, run),
        home=home,
        identity=identity,
        listener=steps,
        on=on,
        rewind_to=to,
        detach=detach,
        accept=accept_host_key,
    )
    return finish(ended, options, identity, steps)
