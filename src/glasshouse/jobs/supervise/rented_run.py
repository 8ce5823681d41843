"""Rents a machine for one run, and gives it back when the run has ended.

Law: a machine that was rented is given back when the block that rented it ends, unless another process has taken it
over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.define.seal_job import Sealed
from glasshouse.jobs.define.wanted import Wanted
from glasshouse.jobs.gates.run_broker import GateBroker
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places import rented_machine
from glasshouse.jobs.places.accounts import provider_of
from glasshouse.jobs.places.placing import LeftError
from glasshouse.jobs.places.rent import unless_closed
from glasshouse.jobs.places.rental_journal import Journal, Rental
from glasshouse.jobs.supervise import runner
from glasshouse.jobs.supervise.prepare import Prepared
from glasshouse.jobs.supervise.run_request import RunRequest
from glasshouse.jobs.supervise.supervision import Watcher
from glasshouse.providers.place.base import Place
from glasshouse.providers.rental.known import PROVIDERS
from glasshouse.providers.rental.provider import Offer, Provider
from glasshouse.wire.policy import Profile

SLURM = "slurm"


class Listener(Watcher):
    """Follows a run from its job file on; each method may be overridden and does nothing here.

    A method may raise `OSError` when what it writes to has gone; see `has_lost`.
    """

    def agree(self, renting: Renting, package: Path) -> None:
        """Agree to a machine's price and to the package leaving this machine, or raise `UsageError`."""
        raise UsageError(Code.USAGE, "nothing is rented without a yes", hint="--yes agrees to it, for scripts")

    def warn(self, text: str) -> None:
        """Something should not be overlooked."""

    def sealed(self, sealed: Sealed) -> None:
        """The job was sealed."""

    def step(self, text: str) -> None:
        """A step of renting, or of giving back."""

    def sending(self, sent: int, size: int) -> None:
        """So many bytes of the package, of so many, are at a machine."""

    def prepared(self, prepared: Prepared, seconds: float, cost: Callable[[], str] | None) -> None:
        """The broker has package and policy. `cost` returns what a rented machine has cost until now."""

    def showing(self) -> contextlib.AbstractContextManager[object]:
        """Return the block within which steps come quickly."""
        return contextlib.nullcontext()

    def returned(self, rental: Rental) -> None:
        """A machine was given back, and shown to be gone."""

    def keeps_giving_back(self) -> None:
        """A first Ctrl-C while a machine is given back did not end that; called by a signal's handler."""

    def has_lost(self, error: OSError) -> bool:
        """Return whether an error means that what this writes to has gone, and no more than that."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Renting:
    """A run on a machine that is to be rented."""

    request: RunRequest
    profile: Profile  # how much hardening the job's policy demands
    machine: Wanted  # the job's table `machine`
    provider: Provider  # from whom
    offers: list[Offer]  # what it may be, the cheapest first

    @classmethod
    def of(cls, request: RunRequest, home: Home) -> Renting | None:
        """Return what could be rented for a run; None where it is not on a rented machine.

        Raises:
            UsageError: what is asked for cannot be rented for.
            PlatformError, PeerError: nothing that fits is offered, or the provider does not answer.
        """
        if not set(request.on) & set(PROVIDERS):
            return None
        if request.job is None or request.job.machine is None:
            raise UsageError(
                Code.USAGE,
                "a sealed package does not say what a machine may cost",
                hint="run the job file, whose [machine] does",
            )
        machine, nodes = request.job.machine, 1 if request.ranks is None else request.ranks.machines
        if len(request.on) > 1 or (nodes > 1 and request.on != (SLURM,)):
            raise UsageError(
                Code.USAGE,
                "machines that are rented one by one do not reach each other",
                hint="take one with more GPUs: gpus in [machine], and --ranks",
            )
        if request.detach and (request.gate is None or not GateBroker(home, request.gate).stores()):
            raise UsageError(
                Code.USAGE,
                "a rented machine is given back when its run has ended, and what the run made would go with it",
                hint="name a gate that stores (glasshouse broker serve --store): --gate NAME; or leave --detach out",
            )
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(Code.USAGE, "only the main thread rents: it takes the signals that end a rental in order")
        machine = replace(machine, cluster=replace(machine.cluster, nodes=nodes))
        provider = provider_of(home, request.on[0], machine.cluster, python=machine.python)
        return cls(
            request=request,
            profile=request.job.floor.profile,
            machine=machine,
            provider=provider,
            offers=rented_machine.offers_of(provider, machine),
        )

    @contextlib.contextmanager
    def rented(self, listener: Listener, home: Home, run: RunFolder, package: Path) -> Iterator[list[Place]]:
        """Have it agreed to, and rent while the block lasts, or another process keeps it; yield the places there.

        Raises:
            UsageError: it was not agreed to.
            PeerError: `rental-left`: the machine is not shown to be gone.
            GlasshouseError: as `rented_machine.take`.
        """
        listener.agree(self, package)
        begun_s = time.monotonic()
        say = unless_closed(lambda text: listener.step(f"{text} ({format_s(time.monotonic() - begun_s)})"))
        journal = rented_machine.begin(home, run, self.provider.name, self.machine)
        # The supervisor of a detached run claims it for itself; until then this process is named as its keeper.
        claim = contextlib.nullcontext() if self.request.detach else journal.claimed()
        with claim, _giving_back(listener, home, run, say):
            with runner.stoppable():
                places = rented_machine.take(
                    home,
                    journal,
                    self.provider,
                    self.offers,
                    self.machine,
                    profile=self.profile,
                    interrupt=runner.interrupt,
                    accept=self.request.accept,
                    say=say,
                )
            yield places


@contextlib.contextmanager
def _giving_back(listener: Listener, home: Home, run: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Give a run's machine back at the end of the block, unless another process keeps it or a person left it."""
    try:
        yield
    except LeftError:
        raise
    except BaseException as error:
        try:
            _give_back(listener, home, run, say)
        except GlasshouseError as left:
            if isinstance(error, GlasshouseError):
                with contextlib.suppress(OSError):
                    listener.warn(str(error))
            raise left from None
        raise
    _give_back(listener, home, run, say)


def _give_back(listener: Listener, home: Home, run: RunFolder, say: Callable[[str], None]) -> None:
    with runner.giving_back(listener.keeps_giving_back):
        rental = rented_machine.rental_of(home, run)
        if rental is None or rental.keeper in (None, ProcessName.of()):
            _returned(listener, rented_machine.return_machine(home, run, say=say))


def _returned(listener: Listener, rental: Rental | None) -> None:
    if rental is not None:
        with contextlib.suppress(OSError):
            listener.returned(rental)


def return_left(listener: Listener, home: Home, run: RunFolder) -> None:
    """Give back what was rented for a run whose supervisor, which would have done it, was ended.

    Raises:
        PeerError: `rental-left`.
        UsageError: a damaged journal, or no key of the provider's account.
    """
    journal = Journal.of(home, run.run_id)
    if not journal.exists:
        return

    say = unless_closed(listener.step)
    with runner.giving_back(listener.keeps_giving_back), journal.claimed() as ours:
        rental = journal.load()
        if rental.over:
            return
        if not ours or (rental.kept and not rental.kept_elsewhere):
            say(f"{rental.place} is looked after by another process, which gives it back")
            return
        _returned(listener, rented_machine.return_machine(home, run, say=say))
