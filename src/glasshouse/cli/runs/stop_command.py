"""`glasshouse stop RUN`: the runtime stops its worker and zeroizes, and its receipt records that."""

from __future__ import annotations

from typing import Annotated

from glasshouse.cli.options import HomeOptions, Run, option
from glasshouse.cli.show.ending import say_ended
from glasshouse.cli.show.steps import StepPrinter
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places.rented_machine import return_left
from glasshouse.jobs.supervise import attach, control


def command(
    run: Run,
    no_wait: Annotated[bool, option("--no-wait", "Return without waiting for zeroization.")] = False,
    give_up: Annotated[
        bool, option("--give-up", "Wait no more for a machine that cannot be reached; nothing is known of it.")
    ] = False,
    *,
    options: HomeOptions,
) -> int:
    """Stop a run, and print its end."""
    output, home = options.output, options.own_home
    folder = RunFolder.find(home, run)
    if give_up:
        asked, done = control.give_up(folder, home), "It is waited for no more."
        return_left(StepPrinter(output), home, folder)
    else:
        asked = attach.stop(folder, home)
        done = "Asked to stop." if no_wait else "Asked to stop; waiting until it has zeroized."
    if no_wait and not give_up:
        output.result({"run_id": folder.run_id, "asked": asked})
    output.say(done if asked else "It had ended already.")
    if give_up or not no_wait:
        say_ended(output, attach.wait(folder, home), sealing=None, home=options.home)
    # The command did what it was asked; how the run ended is in its summary.
    return ExitCode.DONE
