"""`glasshouse sweep`: gives back rented machines whose command was killed, and shows that they are gone."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import HomeOptions, option
from glasshouse.cli.show.output import asked_words, counted
from glasshouse.errors import ExitCode
from glasshouse.jobs.supervise import sweeping


def command(
    everything: Annotated[
        bool,
        option(
            "--all",
            "Also machines of yours that were rented from another home, or on another machine: runs on those of "
            "another home are ended unread.",
        ),
    ] = False,
    *,
    options: HomeOptions,
) -> int:
    """Give back what no process looks after, and list what could not be."""
    output, home = options.output, options.own_home
    swept = sweeping.sweep(home, everything=everything, say=lambda text: output.say(f"  · {text}", style="dim"))
    others = sweeping.elsewhere(home)
    output.result(
        {
            "returned": swept.rentals,
            "machines": swept.machines,
            "forgotten": swept.forgotten,
            "left": swept.left,
            "elsewhere": [f"{one.provider}:{one.machine.tag}" for one in others.strays],
            "asked": list(others.asked),
            "silent": list(others.silent),
        }
    )
    if swept.rentals:
        gone = f"{counted(swept.machines, 'machine')} gone, by id and in two listings"
        gone = gone if swept.machines else "they had made no machine"
        output.say(f"{counted(swept.rentals, 'rental')} ended: {gone}.")
    if swept.forgotten:
        output.say(f"{swept.forgotten} record(s) removed of rentals that were over before and belong to no run here.")
    for line in (*swept.left, *others.silent):
        output.warn(line)
    for one in others.strays:
        output.warn(f"{one.provider} has {one.machine.tag}, which is of no rental here; --all gives it back")
    if not (swept.rentals or swept.left or others.strays):
        output.say(f"Nothing is rented that no process looks after, by the journals here{asked_words(others.asked)}.")
    return ExitCode.UNREACHABLE if swept.left or others.silent else ExitCode.DONE
