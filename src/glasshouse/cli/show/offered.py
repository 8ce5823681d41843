"""What is shown of a rental: offers, the preview before money is spent, and what it came to."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from glasshouse.cli.show.output import CommandOutput
from glasshouse.cli.show.words import bytes_text
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.wanted import Wanted
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.places.rental_journal import Rental
from glasshouse.providers.rental.provider import Offer

_SHOWN_OFFERS = 20
_SLURM = "slurm"


def say_offers(output: CommandOutput, found: Sequence[tuple[str, Offer]]) -> None:
    """Print offers as a table, in their order."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("from", "GPU", "memory", "machine", "where", "$/hour", ""):
        table.add_column(name, no_wrap=True, justify="right" if name == "$/hour" else "left")
    for name, one in found[:_SHOWN_OFFERS]:
        gpu = f"{one.gpus} × {one.gpu}" if one.gpus else "none"
        each = f"{one.gpu_memory_gb} GB" if one.gpus else ""
        kind = "spot" if one.spot else ""
        table.add_row(name, gpu, each, f"{one.memory_gb} GB", one.region, f"{one.usd_per_hour:.3f}", kind)
    output.say(table)
    if len(found) > _SHOWN_OFFERS:
        output.say(f"and {len(found) - _SHOWN_OFFERS} more, dearer: --json has them", style="dim")


def agreed(
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
    if not can_ask(output):
        raise UsageError(Code.USAGE, "nothing is rented without a yes", hint="--yes agrees to it, for scripts")
    if not typer.confirm(question, default=False):
        raise UsageError(Code.USAGE, "nothing was rented: that was no yes")


def can_ask(output: CommandOutput) -> bool:
    """Return whether there is a person at a terminal to answer a question."""
    return not output.as_json and sys.stdin.isatty() and sys.stdout.isatty()


def cost_words(rental: Rental) -> str:
    """Return what a rental cost, by its price and by the provider's bill."""
    now_us = time.time_ns() // 1000
    billed = "" if rental.billed_usd is None else f", billed {rental.billed_usd:.3f} $"
    stopped = f"; the cap of {rental.stopped_by} ended the run" if rental.stopped_by else ""
    return f"{rental.cost_usd(now_us):.3f} $ by its price{billed}{stopped}"
