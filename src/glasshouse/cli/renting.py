"""What the command line shows of a rental: the preview before money, its steps, and what it came to."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from glasshouse.cli.output import Output
from glasshouse.cli.words import bytes_text
from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.durations import format_s

if TYPE_CHECKING:
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.jobfile import Job
    from glasshouse.jobs.processes import ProcessName
    from glasshouse.jobs.rentals import Rental
    from glasshouse.jobs.run import Ranks
    from glasshouse.jobs.rundir import RunFolder
    from glasshouse.jobs.wanted import Wanted
    from glasshouse.providers.base import Place
    from glasshouse.providers.rental import Offer, Provider
    from glasshouse.wire.policy import Profile

__all__ = [
    "Asked",
    "Renting",
    "agreed",
    "cost_so_far",
    "cost_words",
    "gave_back",
    "hand_over",
    "rental_of",
    "return_left",
    "say_offers",
]

_SHOWN_OFFERS = 20
SLURM = "slurm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What `glasshouse run` was asked for.

    Attributes:
        what: the job file or package.
        job: the job file's job; None for a package.
        ranks: in how many processes; None for one without a group.
        detach: whether it goes on by itself.
        given: the state home that was named.
        on: where.
        gate: the name of the gate that releases its key; None for a broker on this machine.
        yes: whether renting is agreed to.
        accept: whether a rented machine will do that does not print its host key.
    """

    what: Path
    job: Job | None
    ranks: Ranks | None
    detach: bool
    given: Path | None
    on: list[str]
    gate: str | None
    yes: bool
    accept: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Renting:
    """A run on a machine that is to be rented.

    Attributes:
        asked: what the command line asks for.
        profile: how much hardening the job's policy demands.
        machine: what the job says of its machine.
        provider: from whom.
        offers: what it may be, the cheapest first.
    """

    asked: Asked
    profile: Profile
    machine: Wanted
    provider: Provider
    offers: list[Offer]

    @classmethod
    def of(cls, asked: Asked, home: Home) -> Renting | None:
        """Return what could be rented for a run; None where it is not on a rented machine.

        Raises:
            UsageError: what was asked for cannot be rented for.
            PlatformError, PeerError: nothing that fits is offered, or the provider does not answer.
        """
        from glasshouse.jobs.accounts import PROVIDERS, provider_of
        from glasshouse.jobs.gates import Standing
        from glasshouse.jobs.rented import offers_of

        if not set(asked.on) & set(PROVIDERS):
            return None
        if asked.job is None or asked.job.machine is None:
            raise UsageError(
                Code.USAGE,
                "a sealed package does not say what a machine may cost",
                hint="run the job file, whose [machine] does",
            )
        machine, nodes = asked.job.machine, 1 if asked.ranks is None else asked.ranks.machines
        if len(asked.on) > 1 or (nodes > 1 and asked.on != [SLURM]):
            raise UsageError(
                Code.USAGE,
                "machines that are rented one by one do not reach each other",
                hint="take one with more GPUs: gpus in [machine], and --ranks",
            )
        if asked.detach and (asked.gate is None or not Standing(home, asked.gate).stores()):
            raise UsageError(
                Code.USAGE,
                "a rented machine is given back when its run has ended, and what the run made would go with it",
                hint="name a gate that stores (glasshouse broker serve --store): --gate NAME; or leave --detach out",
            )
        machine = replace(machine, cluster=replace(machine.cluster, nodes=nodes))
        provider = provider_of(home, asked.on[0], machine.cluster, python=machine.python)
        return cls(
            asked=asked,
            profile=asked.job.floor.profile,
            machine=machine,
            provider=provider,
            offers=offers_of(provider, machine),
        )

    @contextlib.contextmanager
    def rented(self, output: Output, home: Home, run: RunFolder, package: Path) -> Iterator[list[Place]]:
        """Ask for a yes, and rent while the block lasts, or another process keeps it; yield the places there.

        Raises:
            UsageError: that was no yes.
            PeerError: `rental-left`: the machine is not shown to be gone.
            GlasshouseError: as `jobs.rented.take`.
        """
        from glasshouse.jobs import runner
        from glasshouse.jobs.rented import begin, take

        agreed(output, self.provider.name, self.offers, self.machine, package, yes=self.asked.yes)
        begun_s = time.monotonic()

        def say(text: str) -> None:
            with contextlib.suppress(OSError):  # the terminal is closed: the machine is given back all the same
                output.say(f"  · {text} ({format_s(time.monotonic() - begun_s)})", style="dim")

        journal = begin(home, run, self.provider.name, self.machine)
        # The supervisor of a detached run claims it for itself; until then this process is named as its keeper.
        claim = contextlib.nullcontext() if self.asked.detach else journal.claimed()
        with claim, _giving_back(output, home, run, say):
            with runner.stoppable():
                places = take(
                    home,
                    journal,
                    self.provider,
                    self.offers,
                    self.machine,
                    profile=self.profile,
                    interrupt=runner.interrupt,
                    accept=self.asked.accept,
                    say=say,
                )
            yield places


@contextlib.contextmanager
def _giving_back(output: Output, home: Home, run: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Give a run's machine back at the end of the block, unless another process keeps it or a person left it."""
    from glasshouse.jobs import runner
    from glasshouse.jobs.placing import LeftError
    from glasshouse.jobs.rented import return_machine

    try:
        yield
    except LeftError:
        raise
    except BaseException as error:
        try:
            with runner.giving_back(_heard):
                if not _is_kept_elsewhere(home, run):
                    gave_back(output, return_machine(home, run, say=say))
        except GlasshouseError as left:
            if isinstance(error, GlasshouseError):
                with contextlib.suppress(OSError):
                    output.warn(str(error))
            raise left from None
        raise
    with runner.giving_back(_heard):
        if not _is_kept_elsewhere(home, run):
            gave_back(output, return_machine(home, run, say=say))


def say_offers(output: Output, found: Sequence[tuple[str, Offer]]) -> None:
    """Print offers as a table, in their order."""
    from rich.table import Table

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
    output: Output, provider: str, offers: Sequence[Offer], machine: Wanted, package: Path, *, yes: bool
) -> None:
    """Show what renting will cost and what leaves this machine, and ask; raises `UsageError` without a yes."""
    first = offers[0]
    if provider == SLURM:
        asked = " ".join(machine.cluster.sbatch)
        output.facts(
            {
                "rent": f"{machine.cluster.nodes} node(s) of partition {first.region} at "
                f"{machine.cluster.login or 'this login node'}{asked and ', '}{asked}",
                "at most": f"{format_s(machine.caps.seconds)}, waiting included; then the run ends in order",
                "leaves": f"the sealed package ({bytes_text(package.stat().st_size)}) and Glasshouse itself",
            }
        )
        _ask(output, "Submit it?", yes=yes)
        return
    gpu = f"{first.gpus} × {first.gpu} ({first.gpu_memory_gb} GB)" if first.gpus else "no GPU"
    where = f", {first.region}" if first.region else ""
    kind = "; the provider may take it back at any moment" if first.spot else ""
    others = f"; if that is gone, {len(offers) - 1} others" if len(offers) > 1 else ""
    output.facts(
        {
            "rent": f"{gpu} of {provider}{where}, {first.usd_per_hour:.3f} $ an hour{kind}{others}",
            "at most": f"{machine.options.most_per_hour_usd} $ an hour, {machine.caps.usd} $ and "
            f"{format_s(machine.caps.seconds)} together; then the run ends in order and the machine is given back",
            "leaves": f"the sealed package ({bytes_text(package.stat().st_size)}) and Glasshouse itself; the key only "
            "to a runtime that was attested",
            "sees": "the host can read the memory of what trains there: assurance software (docs/security)",
        }
    )
    _ask(output, "Rent it?", yes=yes)


def _ask(output: Output, question: str, *, yes: bool) -> None:
    if yes:
        return
    if output.as_json or not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError(Code.USAGE, "nothing is rented without a yes", hint="--yes agrees to it, for scripts")
    if not typer.confirm(question, default=False):
        raise UsageError(Code.USAGE, "nothing was rented: that was no yes")


def gave_back(output: Output, rental: Rental | None) -> None:
    """Say what a rental came to."""
    if rental is not None:
        with contextlib.suppress(OSError):
            output.say(f"  ✓ {rental.place} is gone, by id and in two listings; {cost_words(rental)}")


def hand_over(home: Home, run: RunFolder, keeper: ProcessName) -> None:
    """Have another process give a run's machine back, where it has a rented one."""
    from glasshouse.jobs.rentals import Journal

    if (journal := Journal.of(home, run.run_id)).exists:
        journal.update(keeper=keeper)


def return_left(output: Output, home: Home, run: RunFolder) -> None:
    """Give back what was rented for a run whose supervisor, which would have done it, was ended.

    Raises:
        PeerError: `rental-left`.
        UsageError: a damaged journal, or no key of the provider's account.
    """
    from glasshouse.jobs import runner
    from glasshouse.jobs.rentals import Journal
    from glasshouse.jobs.rented import return_machine

    journal = Journal.of(home, run.run_id)
    if not journal.exists:
        return

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            output.say(f"  · {text}", style="dim")

    with runner.giving_back(_heard), journal.claimed() as ours:
        rental = journal.load()
        if rental.over:
            return
        if not ours or (rental.kept and not rental.kept_elsewhere):
            say(f"{rental.place} is looked after by another process, which gives it back")
            return
        gave_back(output, return_machine(home, run, say=say))


def rental_of(home: Home, run: RunFolder) -> Rental | None:
    """Return what was rented for a run; None where nothing was; raises `UsageError` for a damaged journal."""
    from glasshouse.jobs.rentals import Journal

    journal = Journal.of(home, run.run_id)
    return journal.load() if journal.exists else None


def _heard() -> None:
    with contextlib.suppress(OSError):  # not by the streams, which the handler may have come upon in a write
        os.write(2, b"The machine is being given back. Ctrl-C again leaves it, and it may go on to cost money.\n")


def cost_so_far(home: Home, run: RunFolder) -> Callable[[], str] | None:
    """Return what tells what a run's rented machine has cost until now; None where none is rented."""
    if (rental := rental_of(home, run)) is None:
        return None

    def told() -> str:
        most = "" if rental.caps.usd is None else f" of {rental.caps.usd}"
        return f"{rental.cost_usd(time.time_ns() // 1000):.2f}{most} $"

    return told


def cost_words(rental: Rental) -> str:
    """Return what a rental cost, by its price and by the provider's bill."""
    now_us = time.time_ns() // 1000
    billed = "" if rental.billed_usd is None else f", billed {rental.billed_usd:.3f} $"
    stopped = f"; the cap of {rental.stopped_by} ended the run" if rental.stopped_by else ""
    return f"{rental.cost_usd(now_us):.3f} $ by its price{billed}{stopped}"


def _is_kept_elsewhere(home: Home, run: RunFolder) -> bool:
    from glasshouse.jobs.processes import ProcessName

    rental = rental_of(home, run)
    return rental is not None and rental.keeper is not None and rental.keeper != ProcessName.of()
