"""`glasshouse attach RUN`: follows a run of another process; leaving it does not stop the run."""

from __future__ import annotations

from glasshouse.cli.options import HomeOptions, Run, sealing_without_asking
from glasshouse.cli.show.ending import say_ended
from glasshouse.cli.show.live_view import RunView
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places.rented_machine import cost_so_far
from glasshouse.jobs.supervise.attach import wait


def command(run: Run = "latest", *, options: HomeOptions) -> int:
    """Follow a run until it has ended."""
    output, home = options.output, options.own_home
    folder = RunFolder.find(home, run)
    record = folder.load()
    try:
        if output.as_json:
            ended = wait(folder, home)
        else:
            output.say(f"Run {record.run_id[:8]} · {record.name} · {record.workload}", style="bold")
            with RunView(output) as view:
                view.expect(record, cost_so_far(home, folder))
                ended = wait(folder, home, view)
    except KeyboardInterrupt:
        output.result({"run_id": record.run_id, "state": "detached", "outcome": None})
        output.say(f"The run goes on. To stop it: glasshouse stop {record.run_id[:8]}{options.again}")
        return ExitCode.DONE
    signing = read_public(home.owner_public).signing
    return say_ended(output, ended, sealing=sealing_without_asking(home), owner_signing=signing, home=options.home)
