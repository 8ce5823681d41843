"""`glasshouse rm RUN...`: removes runs that have ended, after it has said what goes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, Yes, locate
from glasshouse.cli.show.output import Output, printable
from glasshouse.cli.show.words import bytes_text
from glasshouse.errors import ExitCode

if TYPE_CHECKING:
    from glasshouse.jobs.supervise.removal import Removable

__all__ = ["command", "remove_agreed"]


def command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run ids, unique beginnings of them, or `latest`.")
    ],
    yes: Yes = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.supervise.removal import removable

    output, place = Output(as_json), locate(home)
    folders = {folder.run_id: folder for folder in (RunFolder.find(place, run) for run in runs)}
    return remove_agreed(output, [removable(folder, place) for folder in folders.values()], yes=yes)


def remove_agreed(output: Output, runs: list[Removable], *, yes: bool) -> int:
    """Say what goes and how much room that makes, and remove it if that is agreed to; return the exit code."""
    from glasshouse.jobs.supervise.removal import remove

    freed = sum(run.freed_bytes for run in runs)
    for run in runs:
        record = run.record
        output.say(
            f"{record.run_id[:8]}  {printable(record.name, keep='')}  {record.outcome}  {bytes_text(run.freed_bytes)}"
        )
    agreed = bool(runs) and (yes or _asked(output, len(runs), freed))
    if agreed:
        remove(runs)
    output.result(
        {
            "removed": agreed,
            "runs": [
                {
                    "run_id": run.record.run_id,
                    "name": run.record.name,
                    "outcome": run.record.outcome,
                    "freed_bytes": run.freed_bytes,
                }
                for run in runs
            ],
            "freed_bytes": freed,
        }
    )
    if agreed:
        output.say(f"Removed {len(runs)} run(s), {bytes_text(freed)}. The keys of their packages stay.", style="bold")
    elif runs:
        output.say("Nothing is removed; --yes agrees to it.")
    else:
        output.say("There is nothing to remove.")
    return ExitCode.DONE if agreed or not runs else ExitCode.USAGE


def _asked(output: Output, count: int, freed: int) -> bool:
    """Ask where there is a person to ask."""
    if output.as_json or not sys.stdin.isatty() or not sys.stdout.isatty():
        return False
    return typer.confirm(
        f"Remove {count} run(s) with their sealed outputs, logs and receipts ({bytes_text(freed)})?", default=False
    )
