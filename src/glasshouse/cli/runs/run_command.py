"""`glasshouse run JOB.toml|F`: seals if need be, places, follows, verifies, and prints the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import GateOption, OwnerOptions, Yes, argument, option
from glasshouse.errors import Code, ExitCode, UsageError
from glasshouse.providers.rental.known import PROVIDERS


def command(
    what: Annotated[Path, argument("JOB.toml|FILE", "A job file, or a sealed package.")],
    detach: Annotated[bool, option("--detach", "Return when it is placed; it goes on by itself.")] = False,
    ranks: Annotated[
        int | None, option("--ranks N", "Run a script in N ranks on each machine, as torchrun would.")
    ] = None,
    machines: Annotated[
        int | None, option("--machines M", "On M machines, all released to or none; 1 by default.")
    ] = None,
    on: Annotated[
        str | None,
        option(
            "--on MACHINE",
            "Where: a name of `glasshouse machine`, or ssh://user@host (several, with commas, for a group); "
            f"or rent one: {', '.join(PROVIDERS)}. By default as the job's table `machine` says, else this machine.",
        ),
    ] = None,
    yes: Yes = False,
    accept_host_key: Annotated[
        bool, option("--accept-host-key", "Rent also what does not print its host key; the rental says so.")
    ] = False,
    gate: GateOption = None,
    raw: Annotated[bool, option("--raw", "Run it UNPROTECTED, to compare with.")] = False,
    *,
    options: OwnerOptions,
) -> int:
    """Run a job, and return the exit code of its end."""
    # What runs a job is not loaded for the help.
    from glasshouse.cli.runs.unprotected_run import run_raw_leg
    from glasshouse.cli.show.ending import say_ended
    from glasshouse.cli.show.live_view import RunView
    from glasshouse.cli.show.steps import StepPrinter
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.supervise.run_job import run_job
    from glasshouse.jobs.supervise.run_request import RunRequest

    output, home = options.output, options.own_home
    if raw:
        refused = {"--detach": detach, "--machines": machines, "--gate": gate, "--on": None if on == "local" else on}
        if given := [option for option, value in refused.items() if value not in (None, False)]:
            raise UsageError(Code.USAGE, f"--raw runs on this machine and asks no gate: leave {', '.join(given)} out")
        return run_raw_leg(what, ranks, options)
    # The job file is checked before a passphrase is asked for and before anything is started.
    request = RunRequest.of(
        what, home=home, on=on, gate=gate, ranks=ranks, machines=machines, detach=detach, accept=accept_host_key
    )
    identity = options.unlock()
    steps = StepPrinter(output, yes=yes) if output.as_json else RunView(output, yes=yes)
    ended = run_job(request, home=home, identity=identity, listener=steps)
    if isinstance(ended, RunFolder):
        name = f"{ended.run_id[:8]}{options.again}"
        placed = {"run_id": ended.run_id, "state": "placed", "detached": True, "files": str(ended.path)}
        output.result(placed | {"left_out": list(steps.left_out or ())})
        output.say(f"Run {ended.run_id} goes on by itself.", style="bold")
        output.facts({"follow": f"glasshouse attach {name}", "stop": f"glasshouse stop {name}", "files": ended.path})
        return ExitCode.DONE
    try:
        return say_ended(
            output,
            ended,
            sealing=identity.sealing,
            owner_signing=identity.signing.public,
            home=options.home,
            left_out=steps.left_out,
        )
    except OSError as error:
        if not steps.has_lost(error):
            raise
        return ended.conclusion.exit_code  # the run ended as it did, and its record and receipt say the same
