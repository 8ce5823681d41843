"""`glasshouse sweep`: gives back rented machines whose command was killed, and shows that they are gone."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, locate
from glasshouse.cli.show.output import Output
from glasshouse.cli.show.words import asked_words
from glasshouse.errors import ExitCode

__all__ = ["command"]


def command(
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also machines of yours that were rented from another home, or on another machine: runs on those of "
            "another home are ended unread.",
        ),
    ] = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse.jobs.supervise import sweeping

    output, place = Output(as_json), locate(home)
    swept = sweeping.sweep(place, everything=everything, say=lambda text: output.say(f"  · {text}", style="dim"))
    others = sweeping.elsewhere(place)
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
        none = "they had made no machine"
        gone = f"{swept.machines} machine{'' if swept.machines == 1 else 's'} gone, by id and in two listings"
        many = "" if swept.rentals == 1 else "s"
        output.say(f"{swept.rentals} rental{many} ended: {gone if swept.machines else none}.")
    if swept.forgotten:
        output.say(f"{swept.forgotten} record(s) removed of rentals that were over before and belong to no run here.")
    for line in (*swept.left, *others.silent):
        output.warn(line)
    for one in others.strays:
        output.warn(f"{one.provider} has {one.machine.tag}, which is of no rental here; --all gives it back")
    if not (swept.rentals or swept.left or others.strays):
        output.say(f"Nothing is rented that no process looks after, by the journals here{asked_words(others.asked)}.")
    return ExitCode.UNREACHABLE if swept.left or others.silent else ExitCode.DONE
