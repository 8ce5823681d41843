"""`glasshouse rm RUN...`: removes runs that have ended, after it has listed them."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import HomeOptions, Yes, argument
from glasshouse.cli.show.steps import remove_agreed
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise.sweeping import removable


def command(
    runs: Annotated[list[str], argument("RUN...", "Run ids, unique beginnings of them, or `latest`.")],
    yes: Yes = False,
    *,
    options: HomeOptions,
) -> int:
    """Remove runs, if that is agreed to."""
    home = options.own_home
    folders = {folder.run_id: folder for folder in (RunFolder.find(home, run) for run in runs)}
    return remove_agreed(options.output, [removable(folder, home) for folder in folders.values()], yes=yes)
