"""`glasshouse migrate RUN --on NAME`: it saves a last checkpoint, wipes itself, and goes on at another machine."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import Accept, Detach, OwnerOptions, Run, Yes, option
from glasshouse.cli.runs.run_command import finish, listener_for


def command(
    run: Run,
    on: Annotated[str, option("--on MACHINE", "Where to, as of `glasshouse run`.")],
    detach: Detach = False,
    yes: Yes = False,
    accept_host_key: Accept = False,
    *,
    options: OwnerOptions,
) -> int:
    """Move a run, and return the exit code of the end of its new leg."""
    from glasshouse.cli.show.live_view import RunView
    from glasshouse.jobs.lines.resuming import migrate
    from glasshouse.jobs.owner.rundir import RunFolder

    home, identity, steps = options.own_home, options.unlock(), listener_for(options, yes=yes)
    folder = RunFolder.find(home, run)
    if isinstance(steps, RunView):
        steps.expect(folder.load(), None)  # what it is shown first is how that run ends
    ended = migrate(
        folder,
        home=home,
        identity=identity,
        listener=steps,
        on=on,
        detach=detach,
        accept=accept_host_key,
    )
    return finish(ended, options, identity, steps)
