"""`glasshouse machine add|list|remove|slurm|sweep|rented`: machines that you have or rent, and how they are reached."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import Force, HomeOptions, argument, list_and_remove, option
from glasshouse.cli.show.output import asked_words, counted
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.places import known_machines
from glasshouse.jobs.places.known_machines import Machine
from glasshouse.jobs.places.rented_machine import statement
from glasshouse.jobs.supervise.sweeping import elsewhere, found, sweep_machine
from glasshouse.providers.place.ways import NODE_FOLDER, batch_script
from glasshouse.providers.protocol.messages import OWN_FOLDER

group = typer.Typer(no_args_is_help=True)


@group.command("add")
def add(
    name: Annotated[str, argument("NAME", "What to call it.")],
    url: Annotated[str, argument("URL", "How it is reached: ssh://USER@HOST[:PORT], or slurm://USER@LOGIN/JOB/NODE.")],
    python: Annotated[str, option("--python PATH", "The interpreter there that has Glasshouse, or torch.")] = "python3",
    folder: Annotated[str | None, option("--folder PATH", "Where runs are kept there while they last.")] = None,
    config: Annotated[Path | None, option("--config FILE", "A configuration file of ssh; your own by default.")] = None,
    address: Annotated[
        str | None, option("--address HOST", "Where other machines of a group reach it; where ssh does.")
    ] = None,
    bundle: Annotated[
        Path | None, option("--bundle FILE", "Bring Glasshouse along: a file of `glasshouse runtime bundle`.")
    ] = None,
    force: Force = False,
    *,
    options: HomeOptions,
) -> None:
    """Give a machine a name, for: glasshouse run JOB --on NAME."""
    machine = Machine(
        url=url,
        python=python,
        folder=folder or OWN_FOLDER,
        config=None if config is None else str(config.absolute()),
        address=address,
        bundle=None if bundle is None else str(bundle.absolute()),
    )
    known_machines.add_machine(options.own_home, name, machine, replace=force)
    options.output.result({"name": name, "url": url, "python": python})
    options.output.say(f"{name} is {url} now.")
    if bundle is not None:
        what = "torch, and what else a job imports, are those of its"
        options.output.say(f"Glasshouse comes from {bundle}; {what} {python}.")


list_and_remove(
    group,
    "machine",
    lambda home: {
        name: {"url": one.url, "python": one.python} for name, one in known_machines.known_machines(home).items()
    },
    lambda home, name: {"url": known_machines.remove_machine(home, name).url},
    add="glasshouse machine add NAME ssh://user@host",
)


@group.command("slurm")
def slurm(
    python: Annotated[str, option("--python PATH", "Any Python of the nodes, 3.9 or newer.")] = "python3",
    folder: Annotated[str | None, option("--folder PATH", "A folder on each node's own disk; /tmp by default.")] = None,
) -> None:
    """Print the batch script of a Slurm job whose nodes you run on: | sbatch --nodes=1 …"""
    sys.stdout.write(batch_script(python=python, folder=folder or NODE_FOLDER))


@group.command("sweep")
def sweep(
    name: Annotated[str, argument("MACHINE", "A name, or ssh://user@host.")],
    *,
    options: HomeOptions,
) -> None:
    """Remove from a machine what is left there of your runs that have ended."""
    removed, left = sweep_machine(options.any_home, name)
    options.output.result({"removed": removed, "left": left})
    options.output.say(f"{name} reports that what it had of {counted(removed, 'ended run')} is gone.")
    options.output.facts({f"left {run[:8]}": why for run, why in left.items()})


@group.command("rented")
def rented(*, options: HomeOptions) -> int:
    """What is rented, since when, and what it has cost."""
    output, home, now_us = options.output, options.own_home, time.time_ns() // 1000
    there, others = found(home), elsewhere(home)
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
