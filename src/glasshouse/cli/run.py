"""`glasshouse run JOB.toml|F`: seals if need be, places, follows, verifies, and says what came of it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
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
from glasshouse.cli.output import Output
from glasshouse.cli.renting import Asked, Renting, cost_so_far, hand_over, rental_of
from glasshouse.cli.words import bytes_text, left_out_words
from glasshouse.errors import Code, ExitCode, UsageError

if TYPE_CHECKING:
    from glasshouse.cli.view import View
    from glasshouse.jobs.gates import Broker
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.identity import Identity
    from glasshouse.jobs.jobfile import Job
    from glasshouse.jobs.run import Prepared, Ranks
    from glasshouse.jobs.rundir import RunFolder
    from glasshouse.providers.base import Place

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
    if raw and detach:
        raise UsageError(Code.USAGE, "--raw and --detach do not go together")
    shape = _shape(ranks, machines)
    if raw and machines is not None:
        raise UsageError(Code.USAGE, "--raw runs on this machine: leave --machines out")
    if raw and on not in (None, "local"):
        raise UsageError(Code.USAGE, "--raw runs on this machine: leave --on out")
    if raw and gate is not None:
        raise UsageError(Code.USAGE, "--raw asks no gate: leave --gate out")
    # The job file is checked before anyone is asked for a passphrase and before anything is started.
    job = _job(what)
    where = (on or _where(job)).split(",")
    if machines is None and len(where) > 1 and not raw:
        shape = _shape(ranks, len(where))
    gate = _gate(place, gate, None if raw else job)
    if job is not None and shape is not None:
        shape.check(job.workload, job.floor)
    identity = unlock(place, passphrase_file, passphrase_fd)
    if raw:
        from glasshouse.cli.raw import run_raw_leg

        return run_raw_leg(what, job, output, place, identity, ranks=shape)
    asked = Asked(
        what=what,
        job=job,
        ranks=shape,
        detach=detach,
        given=home,
        on=where,
        gate=gate,
        yes=yes,
        accept=accept_host_key,
    )
    return _protected(asked, output, place, identity)


def _where(job: Job | None) -> str:
    """Return where a job says that it runs."""
    return "local" if job is None or job.machine is None or job.machine.on is None else job.machine.on


def _gate(place: Home, given: str | None, job: Job | None) -> str | None:
    """Return the name of the gate that the command line or else the job means; None for the broker of this machine."""
    if given is None and job is not None:
        given = job.gate
    if given is None:
        return None
    from glasshouse.jobs.gates import gate_name

    return gate_name(place, given)


def _shape(ranks: int | None, machines: int | None) -> Ranks | None:
    """Return in how many ranks the job runs; None for one process without a group."""
    if ranks is None and machines is None:
        return None
    from glasshouse.jobs.run import Ranks

    return Ranks(each=1 if ranks is None else ranks, machines=1 if machines is None else machines)


def _protected(asked: Asked, output: Output, place: Home, identity: Identity) -> int:
    from glasshouse.cli.closing import say_ended
    from glasshouse.cli.seal import warn_of_losses
    from glasshouse.cli.terminal import is_reader_gone
    from glasshouse.cli.view import View
    from glasshouse.jobs import runner
    from glasshouse.jobs.embedded import Embedded
    from glasshouse.jobs.gates import Standing
    from glasshouse.jobs.rented import watched
    from glasshouse.jobs.renting import cap_reached
    from glasshouse.jobs.rundir import RunFolder
    from glasshouse.jobs.supervise import Interrupts, Silent

    job, gate = asked.job, asked.gate
    rents = Renting.of(asked, place)
    where = _places(asked, place) if rents is None else []
    if job is not None:
        warn_of_losses(output, job)
    folder = RunFolder.create(place)
    broker: Broker = Embedded(place) if gate is None else Standing(place, gate, identity.signing)
    view = None if output.as_json else View(output.console)
    interrupts = Interrupts()
    with contextlib.ExitStack() as until_ended:
        until_ended.enter_context(_removed_if_unused(folder))
        until_ended.enter_context(runner.settled(folder, broker))
        if rents is not None:  # a signal between two of the blocks below ends no command that has a machine
            until_ended.enter_context(runner.counted(interrupts))
        try:
            with runner.stoppable():
                package, left_out = _seal(asked, output, view, place, identity, folder)
                if rents is not None:
                    where = until_ended.enter_context(rents.rented(output, place, folder, package))
                with watched(place, folder.run_id, runner.interrupt):  # its caps hold while it is sent to, too
                    prepared = _prepare(asked, package, view, place, identity, folder, broker, where)
        except (KeyboardInterrupt, OSError) as error:
            if isinstance(error, OSError) and not is_reader_gone(error):
                raise
            rental = rental_of(place, folder)
            if rental is not None and rental.stopped_by:
                raise cap_reached(rental.stopped_by) from None
            raise UsageError(
                Code.INTERRUPTED, "interrupted before a runtime was placed: the key was not released"
            ) from None
        if asked.detach:
            supervisor = runner.detach(
                folder,
                prepared.launch,
                home=place,
                others=prepared.others,
                hand_over=partial(hand_over, place, folder),
            )
            if interrupts.count:
                supervisor.send(signal.SIGTERM)
        else:
            with contextlib.nullcontext() if view is None else view:
                ended = runner.run_here(
                    folder,
                    prepared.launch,
                    home=place,
                    broker=broker,
                    watcher=Silent() if view is None else view,
                    others=prepared.others,
                    places=where,
                    interrupts=interrupts,
                )
    if asked.detach:
        return _detached(output, folder, asked.given, left_out)
    # Names are sealed with the outputs; the owner's key opens them.
    try:
        return say_ended(
            output,
            ended,
            sealing=identity.sealing,
            owner_signing=identity.signing.public,
            home=asked.given,
            left_out=left_out if job is not None else None,
        )
    except OSError as error:
        if not is_reader_gone(error):
            raise
        return ended.conclusion.exit_code  # the run ended as it did, and its record and receipt say the same


def _places(asked: Asked, home: Home) -> list[Place]:
    """Return where a run shall be, each looked at before anything is sealed."""
    from glasshouse.jobs.places import place_of

    where = [place_of(home, name) for name in asked.on]
    for one in dict(zip(asked.on, where, strict=True)).values():
        one.check()
    return where


def _job(what: Path) -> Job | None:
    """Return a job file's job; None for a sealed package."""
    if what.suffix != ".toml":
        return None
    from glasshouse.jobs.jobfile import load

    return load(what)


def _seal(
    asked: Asked, output: Output, view: View | None, place: Home, identity: Identity, folder: RunFolder
) -> tuple[Path, tuple[str, ...]]:
    """Seal a job file; return the package, and what of the inputs' folders was left out."""
    from glasshouse.jobs.seal import seal

    if asked.job is None:
        return asked.what, ()
    started = time.monotonic()
    sealed = seal(asked.job, out=folder.package, home=place, identity=identity)
    seconds = time.monotonic() - started
    for note in sealed.notes:
        output.warn(note)
    if view is not None:
        files = "1 file" if sealed.files == 1 else f"{sealed.files} files"
        view.done("packed", f"{asked.job.name}: {files}, {bytes_text(sealed.package_bytes)} sealed", seconds)
        if (words := left_out_words(sealed.left_out)) is not None:
            view.done("left out", words, None)
    return folder.package, sealed.left_out


def _prepare(
    asked: Asked,
    package: Path,
    view: View | None,
    place: Home,
    identity: Identity,
    folder: RunFolder,
    broker: Broker,
    where: list[Place],
) -> Prepared:
    """Prepare the run of a sealed package."""
    from glasshouse.jobs.run import prepare

    ranks, started = asked.ranks, time.monotonic()
    with contextlib.nullcontext() if view is None else view:
        prepared = prepare(
            package,
            home=place,
            identity=identity,
            folder=folder,
            broker=broker,
            places=where,
            gate=asked.gate,
            ranks=ranks,
            sending=_unseen if view is None else view.sending,
        )
    if view is not None:
        record = prepared.record
        machines = 1 if ranks is None else ranks.machines
        cost = cost_so_far(place, folder)
        view.expect(assurance=record.assurance, profile=record.profile, machines=machines, cost=cost)
        told = f"run {record.run_id[:8]}; broker told of package and policy" + _in_ranks(ranks)
        view.done("prepared", told, time.monotonic() - started)
    return prepared


def _unseen(_sent: int, _size: int) -> None:
    pass


def _in_ranks(ranks: Ranks | None) -> str:
    if ranks is None:
        return ""
    each = f"{ranks.each} rank" + ("" if ranks.each == 1 else "s")
    return f"; {each}" if ranks.machines == 1 else f"; {each} on each of {ranks.machines} machines"


def _detached(output: Output, folder: RunFolder, home: Path | None, left_out: tuple[str, ...]) -> int:
    name, at = folder.run_id[:8], again(home)
    placed = {"run_id": folder.run_id, "state": "placed", "detached": True, "files": str(folder.path)}
    output.result(placed | {"left_out": list(left_out)})
    output.say(f"Run {folder.run_id} goes on by itself.", style="bold")
    output.facts(
        {"follow": f"glasshouse attach {name}{at}", "stop": f"glasshouse stop {name}{at}", "files": folder.path}
    )
    return ExitCode.DONE


@contextlib.contextmanager
def _removed_if_unused(folder: RunFolder) -> Iterator[None]:
    """Take away the folder of a run that never had a record: nothing of it happened."""
    try:
        yield
    except BaseException:
        if not folder.recorded:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
