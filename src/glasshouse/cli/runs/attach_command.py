"""`glasshouse attach RUN`: follows a run of another process; leaving it does not stop the run."""

from __future__ import annotations

from glasshouse.cli.options import HomeOption, Json, Run, again, locate
from glasshouse.cli.show.output import Output
from glasshouse.errors import ExitCode

__all__ = ["command"]


def command(run: Run = "latest", home: HomeOption = None, as_json: Json = False) -> int:
    from glasshouse.cli.names import sealing_without_asking
    from glasshouse.cli.show.ending import say_ended
    from glasshouse.cli.show.live_view import View
    from glasshouse.jobs.owner.owner_identity import read_public
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.places.rented_machine import cost_so_far
    from glasshouse.jobs.supervise.control import wait

    output, place = Output(as_json), locate(home)
    folder = RunFolder.find(place, run)
    record = folder.load()
    try:
        if output.as_json:
            ended = wait(folder, place)
        else:
            output.say(f"Run {record.run_id[:8]} · {record.name} · {record.workload}", style="bold")
            view = View(output.console)
            machines = 1 if record.group is None else record.group.machines
            cost = cost_so_far(place, folder)
            view.expect(assurance=record.assurance, profile=record.profile, machines=machines, cost=cost)
            with view:
                ended = wait(folder, place, view)
    except KeyboardInterrupt:
        output.result({"run_id": record.run_id, "state": "detached", "outcome": None})
        output.say(f"The run goes on. To stop it: glasshouse stop {record.run_id[:8]}{again(home)}")
        return ExitCode.DONE
    return say_ended(
        output,
        ended,
        sealing=sealing_without_asking(place),
        owner_signing=read_public(place.owner_public).signing,
        home=home,
    )
