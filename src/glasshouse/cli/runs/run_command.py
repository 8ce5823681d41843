"""`glasshouse run JOB.toml|F`: seals if need be, places, follows, verifies, and says what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import (
    GateOption,
    HomeOption,
    Json,
    PassphraseFd,
    PassphraseFile,
    Yes,
    again,
    locate,
    unlock,
)
from glasshouse.cli.show.output import Output
from glasshouse.errors import Code, ExitCode, UsageError

if TYPE_CHECKING:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.owner_identity import Identity
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.supervise.run_job import Request

__all__ = ["command"]


def command(
    what: Annotated[Path, typer.Argument(metavar="JOB.toml|FILE", help="A job file, or a sealed package.")],
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is placed; it goes on by itself.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="Run a script in N ranks on each machine, as torchrun would."),
    ] = None,
    machines: Annotated[
        int | None,
        typer.Option("--machines", metavar="M", help="On M machines, all released to or none; 1 by default."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="MACHINE",
            help="Where: a name of `glasshouse machine`, or ssh://user@host (several, with commas, for a group); "
            "or rent one: runpod, vast, slurm. By default as the job's table `machine` says, else this machine.",
        ),
    ] = None,
    yes: Yes = False,
    accept_host_key: Annotated[
        bool,
        typer.Option("--accept-host-key", help="Rent also what does not print its host key; the rental says so."),
    ] = False,
    gate: GateOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Run it UNPROTECTED, to compare with.")] = False,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    output, place = Output(as_json), locate(home)
    if raw:
        refused = {"--detach": detach, "--machines": machines, "--gate": gate, "--on": None if on == "local" else on}
        if given := [option for option, value in refused.items() if value not in (None, False)]:
            raise UsageError(Code.USAGE, f"--raw runs on this machine and asks no gate: leave {', '.join(given)} out")
        return _raw(what, output, place, ranks, passphrase_file, passphrase_fd)
    from glasshouse.jobs.supervise.run_job import Request

    # The job file is checked before anyone is asked for a passphrase and before anything is started.
    request = Request.of(
        what, home=place, on=on, gate=gate, ranks=ranks, machines=machines, detach=detach, accept=accept_host_key
    )
    identity = unlock(place, passphrase_file, passphrase_fd)
    return _protected(request, output, place, identity, given=home, yes=yes)


def _raw(
    what: Path, output: Output, place: Home, ranks: int | None, passphrase_file: Path | None, passphrase_fd: int | None
) -> int:
    from glasshouse.cli.runs.raw_leg import run_raw_leg
    from glasshouse.jobs.supervise.run_job import load_job, shape_of

    shape, job = shape_of(ranks, None), load_job(what)
    if job is not None and shape is not None:
        shape.check(job.workload, job.floor)
    return run_raw_leg(what, job, output, place, unlock(place, passphrase_file, passphrase_fd), ranks=shape)


def _protected(
    request: Request, output: Output, place: Home, identity: Identity, *, given: Path | None, yes: bool
) -> int:
    from glasshouse.cli.show.ending import say_ended
    from glasshouse.cli.show.live_view import View
    from glasshouse.cli.show.steps import Shown
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.supervise.run_job import run_job

    shown = Shown(output, None if output.as_json else View(output.console), yes=yes)
    ended = run_job(request, home=place, identity=identity, listener=shown)
    if isinstance(ended, RunFolder):
        return _detached(output, ended, given, shown.left_out or ())
    # Names are sealed with the outputs; the owner's key opens them.
    try:
        return say_ended(
            output,
            ended,
            sealing=identity.sealing,
            owner_signing=identity.signing.public,
            home=given,
            left_out=shown.left_out,
        )
    except OSError as error:
        if not shown.has_lost(error):
            raise
        return ended.conclusion.exit_code  # the run ended as it did, and its record and receipt say the same


def _detached(output: Output, folder: RunFolder, home: Path | None, left_out: tuple[str, ...]) -> int:
    name, at = folder.run_id[:8], again(home)
    placed = {"run_id": folder.run_id, "state": "placed", "detached": True, "files": str(folder.path)}
    output.result(placed | {"left_out": list(left_out)})
    output.say(f"Run {folder.run_id} goes on by itself.", style="bold")
    output.facts(
        {"follow": f"glasshouse attach {name}{at}", "stop": f"glasshouse stop {name}{at}", "files": folder.path}
    )
    return ExitCode.DONE
