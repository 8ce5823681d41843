"""`glasshouse rm RUN...`: removes runs that have ended, after it has listed them."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import HomeOptions, Yes, argument
from glasshouse.cli.show.offered import can_ask
from glasshouse.cli.show.output import CommandOutput, printable
from glasshouse.cli.show.words import bytes_text
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise.removal import Removable, removable, remove


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


def remove_agreed(output: CommandOutput, runs: list[Removable], *, yes: bool) -> int:
    """List runs and how much room their removal makes, and remove them if that is agreed to; return the exit code."""
    freed = sum(run.freed_bytes for run in runs)
    listed = []
    for run in runs:
        one = {"run_id": run.record.run_id, "name": run.record.name, "outcome": run.record.outcome}
        listed.append(one | {"freed_bytes": run.freed_bytes})
        name = printable(run.record.name, keep="")
        output.say(f"{run.record.run_id[:8]}  {name}  {run.record.outcome}  {bytes_text(run.freed_bytes)}")
    question = f"Remove {len(runs)} run(s) with their sealed outputs, logs and receipts ({bytes_text(freed)})?"
    agreed = bool(runs) and (yes or (can_ask(output) and typer.confirm(question, default=False)))
    if agreed:
        remove(runs)
    output.result({"removed": agreed, "runs": listed, "freed_bytes": freed})
    if agreed:
        output.say(f"Removed {len(runs)} run(s), {bytes_text(freed)}. The keys of their packages stay.", style="bold")
    elif runs:
        output.say("Nothing is removed; --yes agrees to it.")
    else:
        output.say("There is nothing to remove.")
    return ExitCode.DONE if agreed or not runs else ExitCode.USAGE
