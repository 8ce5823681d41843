"""`glasshouse stop RUN`: the runtime stops its worker, zeroizes and says so in its receipt."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, Run, locate
from glasshouse.cli.show.output import Output
from glasshouse.errors import ExitCode

__all__ = ["command"]


def command(
    run: Run,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return without waiting for zeroization.")] = False,
    give_up: Annotated[
        bool,
        typer.Option("--give-up", help="Wait no more for a machine that cannot be reached; nothing is known of it."),
    ] = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse.cli.show.ending import say_ended
    from glasshouse.cli.show.steps import Shown
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.supervise import control
    from glasshouse.jobs.supervise.run_job import return_left

    output, place = Output(as_json), locate(home)
    folder = RunFolder.find(place, run)
    if give_up:
        given = control.give_up(folder, place)
        return_left(Shown(output), place, folder)
        output.say("It is waited for no more." if given else "It had ended already.")
        say_ended(output, control.wait(folder, place), sealing=None, home=home)
        return ExitCode.DONE
    asked = control.stop(folder, place)
    if no_wait:
        output.result({"run_id": folder.run_id, "asked": asked})
        output.say("Asked to stop." if asked else "It had ended already.")
        return ExitCode.DONE
    output.say("Asked to stop; waiting until it has zeroized." if asked else "It had ended already.")
    say_ended(output, control.wait(folder, place), sealing=None, home=home)
    # The command did what it was asked; how the run ended is in its summary.
    return ExitCode.DONE
