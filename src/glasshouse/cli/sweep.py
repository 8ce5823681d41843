"""`glasshouse sweep`: gives back rented machines whose command was killed, and shows that they are gone."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, locate
from glasshouse.cli.output import Output
from glasshouse.errors import ExitCode

__all__ = ["command"]


def command(
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Also machines of yours that were rented from another home: runs on them are ended unread."
        ),
    ] = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse.jobs import sweeping

    output, place = Output(as_json), locate(home)
    ended, left = sweeping.sweep(place, everything=everything, say=lambda text: output.say(f"  · {text}", style="dim"))
    strays = sweeping.strays(place)
    output.result(
        {"returned": ended, "left": left, "elsewhere": [f"{one.provider}:{one.machine.tag}" for one in strays]}
    )
    if ended:
        output.say(
            f"{ended} rental{'' if ended == 1 else 's'} ended; the machines are gone, by id and in two listings."
        )
    for line in left:
        output.warn(line)
    for one in strays:
        output.warn(f"{one.provider} has {one.machine.tag}, which was rented from another home; --all gives it back")
    if not (ended or left or strays):
        output.say("Nothing is rented that no process looks after.")
    return ExitCode.UNREACHABLE if left else ExitCode.DONE
