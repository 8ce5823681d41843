"""`glasshouse machine add|list|remove|slurm|sweep|rented`: machines that you have or rent, and how they are reached."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import Force, HomeOption, Json
from glasshouse.cli.setup.named import list_and_remove
from glasshouse.cli.show.output import Output
from glasshouse.cli.show.words import asked_words
from glasshouse.errors import ExitCode

if TYPE_CHECKING:
    from glasshouse.jobs.owner.home import Home

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.command("add", help="Give a machine a name, for: glasshouse run JOB --on NAME.")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="How it is reached: ssh://USER@HOST[:PORT], or slurm://USER@LOGIN/JOB/NODE."
        ),
    ],
    python: Annotated[
        str, typer.Option("--python", metavar="PATH", help="The interpreter there that has Glasshouse, or torch.")
    ] = "python3",
    folder: Annotated[
        str | None, typer.Option("--folder", metavar="PATH", help="Where runs are kept there while they last.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A configuration file of ssh; your own by default.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST", help="Where other machines of a group reach it; where ssh does."),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Bring Glasshouse along: a file of `glasshouse runtime bundle`."),
    ] = None,
    force: Force = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.places.known_machines import Machine, add_machine

    output = Output(as_json)
    given = {
        "folder": folder,
        "config": None if config is None else str(config.absolute()),
        "address": address,
        "bundle": None if bundle is None else str(bundle.absolute()),
    }
    machine = Machine(url=url, python=python, **{name: value for name, value in given.items() if value is not None})
    add_machine(Home.locate(home).require(), name, machine, replace=force)
    output.result({"name": name, "url": url, "python": python})
    output.say(f"{name} is {url} now.")
    if bundle is not None:
        output.say(f"Glasshouse comes from {bundle}; torch, and what else a job imports, are those of its {python}.")


def _known(home: Home) -> dict[str, dict[str, str]]:
    from glasshouse.jobs.places.known_machines import known_machines

    return {name: {"url": one.url, "python": one.python} for name, one in known_machines(home).items()}


def _forget(home: Home, name: str) -> dict[str, str]:
    from glasshouse.jobs.places.known_machines import remove_machine

    return {"url": remove_machine(home, name).url}


list_and_remove(group, "machine", _known, _forget, add="glasshouse machine add NAME ssh://user@host")


@group.command("slurm", help="Print the batch script of a Slurm job whose nodes you run on: | sbatch --nodes=1 …")
def slurm(
    python: Annotated[
        str, typer.Option("--python", metavar="PATH", help="Any Python of the nodes, 3.9 or newer.")
    ] = "python3",
    folder: Annotated[
        str | None, typer.Option("--folder", metavar="PATH", help="A folder on each node's own disk; /tmp by default.")
    ] = None,
) -> None:
    import sys

    from glasshouse.providers.place.slurm_node import NODE_FOLDER, batch_script

    sys.stdout.write(batch_script(python=python, folder=folder or NODE_FOLDER))


@group.command("sweep", help="Remove from a machine what is left there of your runs that have ended.")
def sweep(
    name: Annotated[str, typer.Argument(metavar="MACHINE", help="A name, or ssh://user@host.")],
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.places import known_machines

    output = Output(as_json)
    removed, left = known_machines.sweep(Home.locate(home), name)
    output.result({"removed": removed, "left": left})
    output.say(f"{name} says that what it had of {removed} ended run{'' if removed == 1 else 's'} is gone.")
    output.facts({f"left {run[:8]}": why for run, why in left.items()})


@group.command("rented", help="What is rented, since when, and what it has cost.")
def rented(
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    import time

    from glasshouse.jobs.owner.durations import format_s
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.places.rented_machine import statement
    from glasshouse.jobs.supervise.sweeping import elsewhere, found

    output, place, now_us = Output(as_json), Home.locate(home).require(), time.time_ns() // 1000
    there, others = found(place), elsewhere(place)
    problems = (*there.damaged, *others.silent)
    output.result(
        {
            "rentals": [
                {"place": one.place, "run_id": one.run_id, "kept": one.kept} | statement(one, now_us)
                for one in there.rentals
            ],
            "elsewhere": [{"provider": one.provider, "tag": one.machine.tag} for one in others.strays],
            "asked": list(others.asked),
            "problems": list(problems),
        }
    )
    for one in there.rentals:
        since = format_s((now_us - one.created_us) / 1e6)
        cost = f"{one.cost_usd(now_us):.3f} $ so far"
        steps = ", ".join(attempt.step.value for attempt in one.attempts if not attempt.step.over)
        kept = "" if one.kept else "; no process looks after it: glasshouse sweep"
        output.say(f"{one.place}  {steps}  since {since}  {cost}{kept}")
    for other in others.strays:
        price = other.machine.usd_per_hour
        cost = "" if price is None else f", {price:.3f} $ an hour"
        output.say(f"{other.provider}: {other.machine.tag}{cost}, of no rental here: glasshouse sweep --all")
    for problem in problems:
        output.warn(problem)
    if not (there.rentals or others.strays or there.damaged):
        output.say(f"Nothing is rented, by the journals here{asked_words(others.asked)}.")
    return ExitCode.UNREACHABLE if problems else ExitCode.DONE
