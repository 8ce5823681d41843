"""What is asked before money is spent or runs are removed, and a run's steps as lines."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from glasshouse.cli.show.output import CommandOutput, bytes_text, printable
from glasshouse.errors import Code, ExitCode, UsageError
from glasshouse.jobs.define.package_records import Sealed
from glasshouse.jobs.define.wanted import Wanted
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.places.rental_journal import Rental
from glasshouse.jobs.supervise.run_request import Listener, Renting
from glasshouse.jobs.supervise.sweeping import Removable, remove
from glasshouse.providers.rental.provider import Offer

_SLURM = "slurm"


class StepPrinter(Listener):
    """Prints the steps of a run whose lifecycle is not shown; `yes` agrees to renting."""

    def __init__(self, output: CommandOutput, *, yes: bool = False) -> None:
        self._output, self._yes = output, yes
        self.left_out: tuple[str, ...] | None = None  # of the inputs' folders; None where nothing was sealed here

    def agree(self, renting: Renting, package: Path) -> None:
        _agree(self._output, renting.provider.name, renting.offers, renting.machine, package, yes=self._yes)

    def warn(self, text: str) -> None:
        self._output.warn(text)

    def sealed(self, sealed: Sealed) -> None:
        self.left_out = sealed.left_out

    def leg(self, text: str) -> None:
        self._output.say(printable(text), style="bold")

    def step(self, text: str) -> None:
        self._output.say(f"  · {text}", style="dim")

    def returned(self, rental: Rental) -> None:
        self._output.say(f"  ✓ {rental.place} is gone, by id and in two listings; {cost_words(rental)}")

    def keeps_giving_back(self) -> None:
        with contextlib.suppress(OSError):  # not by the streams, which the handler may have come upon in a write
            os.write(2, b"The machine is being given back. Ctrl-C again leaves it, and it may go on to cost money.\n")

    def has_lost(self, error: OSError) -> bool:
        return isinstance(error, BrokenPipeError) or error.errno == errno.EIO  # a closed pipe, a closed terminal


def _agree(
    output: CommandOutput, provider: str, offers: Sequence[Offer], machine: Wanted, package: Path, *, yes: bool
) -> None:
    """Show what renting will cost and what leaves this machine, and ask; raises `UsageError` without a yes."""
    first, longest = offers[0], format_s(machine.caps.seconds)
    leaves = f"the sealed package ({bytes_text(package.stat().st_size)}) and Glasshouse itself"
    if provider == _SLURM:
        question, asked = "Submit it?", " ".join(machine.cluster.sbatch)
        facts = {
            "rent": f"{machine.cluster.nodes} node(s) of partition {first.region} at "
            f"{machine.cluster.login or 'this login node'}{asked and ', '}{asked}",
            "at most": f"{longest}, waiting included; then the run ends in order",
            "leaves": leaves,
        }
    else:
        question = "Rent it?"
        gpu = f"{first.gpus} × {first.gpu} ({first.gpu_memory_gb} GB)" if first.gpus else "no GPU"
        where = f", {first.region}" if first.region else ""
        kind = "; the provider may take it back at any moment" if first.spot else ""
        others = f"; if that is gone, {len(offers) - 1} others" if len(offers) > 1 else ""
        facts = {
            "rent": f"{gpu} of {provider}{where}, {first.usd_per_hour:.3f} $ an hour{kind}{others}",
            "at most": f"{machine.options.most_per_hour_usd} $ an hour, {machine.caps.usd} $ and {longest} together; "
            "then the run ends in order and the machine is given back",
            "leaves": f"{leaves}; the key only to a runtime that was attested",
            "sees": "the host can read the memory of what trains there: assurance software (docs/security)",
        }
    output.facts(facts)
    if yes:
        return
    if not output.can_ask:
        raise UsageError(Code.USAGE, "nothing is rented without a yes", hint="--yes agrees to it, for scripts")
    if not typer.confirm(question, default=False):
        raise UsageError(Code.USAGE, "nothing was rented: that was no yes")


def cost_words(rental: Rental) -> str:
    """Return what a rental cost, by its price and by the provider's bill."""
    now_us = time.time_ns() // 1000
    billed = "" if rental.billed_usd is None else f", billed {rental.billed_usd:.3f} $"
    stopped = f"; the cap of {rental.stopped_by} ended the run" if rental.stopped_by else ""
    return f"{rental.cost_usd(now_us):.3f} $ by its price{billed}{stopped}"


def remove_agreed(output: CommandOutput, runs: list[Removable], *, yes: bool) -> int:
    """List runs and how much room their removal makes, and remove them if that is agreed to; return the exit code."""
    freed = sum(run.freed_bytes for run in runs)
    listed = []
    for run in runs:
        one = {"run_id": run.record.run_id, "name": run.record.name, "outcome": run.record.outcome}
        listed.append(one | {"freed_bytes": run.freed_bytes})
        name = printable(run.record.name, keep="")
        output.say(f"{run.record.run_id[:8]}  {name}  {run.record.outcome}  {bytes_text(run.freed_bytes)}")
    question = f"Remove {len(runs)} run(s) with their sealed outputs, logs and receipts ({bytes_text(freed)})?"
    agreed = bool(runs) and (yes or (output.can_ask and typer.confirm(question, default=False)))
    if agreed:
        remove(runs)
    output.result({"removed": agreed, "runs": listed, "freed_bytes": freed})
    if agreed:
        output.say(f"Removed {len(runs)} run(s), {bytes_text(freed)}. The keys of their packages stay.", style="bold")
    elif runs:
        output.say("Nothing is removed; --yes agrees to it.")
    else:
        output.say("There is nothing to remove.")
    return ExitCode.DONE if agreed or not runs else ExitCode.USAGE
