"""`glasshouse run JOB.toml|F`: seals if need be, places, follows, verifies, and prints the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from glasshouse.cli.options import Accept, Detach, GateOption, OwnerOptions, Yes, argument, option
from glasshouse.errors import Code, ExitCode, UsageError
from glasshouse.providers.rental.known import PROVIDERS
from glasshouse.wire.policy import RANKED

if TYPE_CHECKING:  # what runs a job is not loaded for the help
    from glasshouse.cli.show.steps import StepPrinter
    from glasshouse.jobs.owner.owner_identity import Identity
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.supervise.supervision import Ended

_RAW = "UNPROTECTED: the raw leg, for comparison; inputs and outputs are in the clear on this machine"


def command(
    what: Annotated[Path, argument("JOB.toml|FILE", "A job file, or a sealed package.")],
    detach: Detach = False,
    ranks: Annotated[
        int | None, option("--ranks N", "Run a script, or lora, in N ranks on each machine, as torchrun would.")
    ] = None,
    machines: Annotated[
        int | None, option("--machines M", "On M machines, all released to or none; 1 by default.")
    ] = None,
    on: Annotated[
        str | None,
        option(
            "--on MACHINE",
            "Where: a name of `glasshouse machine`, or ssh://user@host (several, with commas, for a group); "
            f"or rent one: {', '.join(PROVIDERS)}. More than are needed, as in `runpod,vast`, are for when there is "
            "none, or it is lost (`retries`). By default as in the job's table `machine`, else this machine.",
        ),
    ] = None,
    yes: Yes = False,
    accept_host_key: Accept = False,
    gate: GateOption = None,
    raw: Annotated[bool, option("--raw", "Run it UNPROTECTED, to compare with.")] = False,
    *,
    options: OwnerOptions,
) -> int:
    """Run a job, and return the exit code of its end."""
    # What runs a job is not loaded for the help.
    from glasshouse.jobs.lines.resuming import run_through
    from glasshouse.jobs.supervise.run_request import RunRequest

    home = options.own_home
    if raw:
        refused = {"--detach": detach, "--machines": machines, "--gate": gate, "--on": None if on == "local" else on}
        if given := [option for option, value in refused.items() if value not in (None, False)]:
            raise UsageError(Code.USAGE, f"--raw runs on this machine and asks no gate: leave {', '.join(given)} out")
        return _run_raw(what, ranks, options)
    # The job file is checked before a passphrase is asked for and before anything is started.
    request = RunRequest.of(
        what, home=home, on=on, gate=gate, ranks=ranks, machines=machines, detach=detach, accept=accept_host_key
    )
    identity = options.unlock()
    steps = listener_for(options, yes=yes)
    ended = run_through(request, home=home, identity=identity, listener=steps)
    return finish(ended, options, identity, steps)


def go_on(
    run: str,
    options: OwnerOptions,
    *,
    on: str | None,
    detach: bool,
    yes: bool,
    accept: bool,
    lost: bool = False,
    rewind_to: int | None = None,
) -> int:
    """Go on with a run as a new leg of its line, and return the exit code of its end; options are as of `resume`."""
    from glasshouse.jobs.lines.resuming import resume
    from glasshouse.jobs.owner.rundir import RunFolder

    home, identity, steps = options.own_home, options.unlock(), listener_for(options, yes=yes)
    ended = resume(
        RunFolder.find(home, run),
        home=home,
        identity=identity,
        listener=steps,
        on=on,
        lost=lost,
        rewind_to=rewind_to,
        detach=detach,
        accept=accept,
    )
    return finish(ended, options, identity, steps)


def listener_for(options: OwnerOptions, *, yes: bool) -> StepPrinter:
    """Return what shows a run's steps; `yes` agrees to renting."""
    from glasshouse.cli.show.live_view import RunView
    from glasshouse.cli.show.steps import StepPrinter

    return StepPrinter(options.output, yes=yes) if options.output.as_json else RunView(options.output, yes=yes)


def finish(ended: Ended | RunFolder, options: OwnerOptions, identity: Identity, steps: StepPrinter) -> int:
    """Print how a run ended, or how to follow one that was detached, and return the exit code."""
    from glasshouse.cli.show.ending import say_ended
    from glasshouse.jobs.owner.rundir import RunFolder

    output = options.output
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


def _run_raw(what: Path, ranks: int | None, options: OwnerOptions) -> int:
    """Run a job file or package in the clear, in so many ranks, and print its end; return the exit code."""
    from glasshouse.cli.show.ending import output_line, work_text
    from glasshouse.evidence.receipt import Work
    from glasshouse.jobs.define.raw_job import of_job, of_package, run_raw
    from glasshouse.jobs.results.summary import work_facts
    from glasshouse.jobs.supervise.run_request import load_job, shape_of

    output, home, shape, job = options.output, options.own_home, shape_of(ranks, None), load_job(what)
    if job is not None and shape is not None:
        shape.check(job.workload, job.floor)
    identity = options.unlock()
    output.say(_RAW, style="bold red")
    plain = of_package(what, home=home, identity=identity) if job is None else of_job(job)
    if shape is not None and plain.workload not in RANKED:
        raise UsageError(Code.JOB_INVALID, f"the workload {plain.workload!r} runs in one process")

    def progress(message: Mapping[str, Any]) -> None:
        if message.get("type") == "progress" and output.console.is_terminal:
            total = f"/{message['total']}" if message["total"] else ""
            loss = f", loss {float(message['loss']):.4g}" if message["loss"] else ""
            output.say(f"  {message['unit']} {message['done']}{total}{loss}")

    # What the training prints goes to standard error: standard output is one object, or the summary.
    with os.fdopen(os.dup(sys.stderr.fileno()), "wb", buffering=0) as log:
        ended = run_raw(plain, home=home, event=progress, log=log, ranks=None if shape is None else shape.each)
    loss = ended.loss
    work = None if ended.work is None else Work.from_json(ended.work)
    output.result(
        {
            "run_id": ended.run_id,
            "protected": False,
            "label": _RAW,
            "outcome": ended.outcome,
            "code": ended.code,
            "assurance": None,
            "workload": plain.workload,
            "work": None if work is None else work_facts(work),
            "loss": None if loss is None else {"first": float(loss["first"]), "final": float(loss["final"])},
            "trainable": ended.trainable,
            "outputs": list(ended.outputs),
            "training_imports_s": ended.imports_s,
            "total_s": round(ended.total_s, 4),
            "files": str(ended.folder),
        }
    )
    output.say("")
    output.say(f"Raw run {ended.outcome}" + (f" ({ended.code})" if ended.code else ""), style="bold")
    outputs = (output_line(one["name"], one["bytes"], f"{one['sha256'][:16]}…") for one in ended.outputs)
    output.facts(
        {
            "protection": "none; nothing about this run can be verified",
            "work": None if work is None else work_text(work),
            "loss": f"{float(loss['first']):.4g} → {float(loss['final']):.4g}" if loss else None,
            "outputs": "\n".join(outputs) or "none",
            "files": f"{ended.folder} (in the clear)",
        }
    )
    return ended.exit_code
