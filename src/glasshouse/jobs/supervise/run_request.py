"""What a run is asked for, and the machine that is rented for it.

Law: nothing is rented that was not agreed to, and what was rented is given back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.jobfile import Job, Ranks, load
from glasshouse.jobs.define.package_records import Sealed
from glasshouse.jobs.define.wanted import Wanted
from glasshouse.jobs.gates.known_gates import GateBroker, gate_name
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import interrupt, stoppable
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places import rented_machine
from glasshouse.jobs.places.accounts import offers_of, provider_of
from glasshouse.jobs.places.known_machines import log_in
from glasshouse.jobs.places.rent import unless_closed
from glasshouse.jobs.places.rented_machine import RentalListener
from glasshouse.jobs.supervise.follow import Watcher
from glasshouse.jobs.supervise.launching import LaterLeg, Prepared
from glasshouse.providers.place.base import Place
from glasshouse.providers.rental.known import PROVIDERS
from glasshouse.providers.rental.provider import Offer, Provider
from glasshouse.wire.policy import Profile

SLURM = "slurm"


class Listener(Watcher, RentalListener):
    """Follows a run from its job file on; each method may be overridden, and may raise `OSError`: see `has_lost`."""

    def leg(self, text: str) -> None:
        """A run is a later leg of a line: where it goes on from, and where."""

    def agree(self, renting: Renting, package: Path) -> None:
        """Agree to a machine's price and to the package leaving this machine, or raise `UsageError`."""
        raise UsageError(Code.USAGE, "nothing is rented without a yes", hint="--yes agrees to it, for scripts")

    def sealed(self, sealed: Sealed) -> None:
        """The job was sealed."""

    def sending(self, sent: int, size: int) -> None:
        """So many bytes of the package, of so many, are at a machine."""

    def prepared(self, prepared: Prepared, seconds: float, cost: Callable[[], str] | None) -> None:
        """The broker has package and policy. `cost` returns what a rented machine has cost until now."""

    def showing(self) -> contextlib.AbstractContextManager[object]:
        """Return the block within which steps come quickly."""
        return contextlib.nullcontext()

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
        if request.machine is None or request.profile is None:
            raise UsageError(
                Code.USAGE,
                "a sealed package does not say what a machine may cost",
                hint="run the job file, whose [machine] does",
            )
        machine, nodes = request.machine, 1 if request.ranks is None else request.ranks.machines
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
            profile=request.profile,
            machine=machine,
            provider=provider,
            # A machine that was lost is the last that is taken again.
            offers=sorted(offers_of(provider, machine), key=lambda offer: (provider.name, offer.id) in request.lost),
        )

    @contextlib.contextmanager
    def rented(self, listener: Listener, home: Home, run: RunFolder, package: Path) -> Iterator[list[Place]]:
        """Have it agreed to, and rent while the block lasts, or another process keeps it; yield the places there.

        Raises `UsageError` where it was not agreed to, `PeerError` (`rental-left`) where the machine is not shown to be
        gone, and as `rented_machine.take` and `log_in`.
        """
        if not self.request.agreed:
            listener.agree(self, package)
        begun_s = time.monotonic()
        say = unless_closed(lambda text: listener.step(f"{text} ({format_s(time.monotonic() - begun_s)})"))
        journal = rented_machine.begin(home, run, self.provider.name, self.machine)
        # The supervisor of a detached run claims it for itself; until then this process is named as its keeper.
        claim = contextlib.nullcontext() if self.request.detach else journal.claimed()
        with claim, rented_machine.given_back(listener, home, run, say):
            with stoppable():
                rented_machine.take(
                    home, journal, self.provider, self.offers, self.machine, accept=self.request.accept, say=say
                )
                say("logging in")
                places = log_in(home, journal, profile=self.profile, interrupt=interrupt)
            yield places


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """A run that is asked for."""

    what: Path
    job: Job | None  # the job of the job file `what`; None for a package
    on: tuple[str, ...] = ("local",)  # names of machines, `local`, or the provider to rent from
    gate: str | None = None  # the name of the gate that releases its key; None for a broker on this machine
    ranks: Ranks | None = None  # in how many processes; None for one without a group
    detach: bool = False  # whether it goes on by itself
    accept: bool = False  # whether a rented machine will do that does not print its host key
    spare: tuple[str, ...] = ()  # where else, one after the other, if it is not to be had there, or is lost
    machine: Wanted | None = None  # what may be rented; None for a package without its job
    profile: Profile | None = None  # how much hardening its policy demands; None where nothing is rented
    later: LaterLeg | None = None  # of a leg of a line after the first
    agreed: bool = False  # whether what it may cost was agreed to before
    lost: frozenset[tuple[str, str]] = frozenset()  # provider and offer of machines that this line has lost

    @classmethod
    def of(
        cls,
        what: Path,
        *,
        home: Home,
        on: str | None = None,
        gate: str | None = None,
        ranks: int | None = None,
        machines: int | None = None,
        detach: bool = False,
        accept: bool = False,
    ) -> RunRequest:
        """Check what a run is asked for; what is not given here is as in the job file.

        Args:
            home: whose gates may be named.
            on: one name, or several with commas: for a group, and for where else it may go on. Of several of which one
                rents, and of more than there are `machines`, those behind are for that.
            gate: a name or URL of a gate that was added.

        Raises:
            UsageError: as `jobfile.load` and `Ranks.check`; `usage`.
        """
        shape = shape_of(ranks, machines)
        job = load_job(what)
        machine = None if job is None else job.machine
        where = tuple((on or (machine.on if machine is not None else None) or "local").split(","))
        if machines is None and len(where) > 1 and not set(where) & set(PROVIDERS):
            shape = shape_of(ranks, len(where))
        where, spare = split_places(where, 1 if shape is None else shape.machines)
        gate = gate if gate is not None or job is None else job.gate
        named = None if gate is None else gate_name(home, gate)
        if job is not None and shape is not None:
            shape.check(job.workload, job.floor)
        return cls(
            what=what,
            job=job,
            on=where,
            gate=named,
            ranks=shape,
            detach=detach,
            accept=accept,
            spare=spare,
            machine=machine,
            profile=None if job is None else job.floor.profile,
        )


def split_places(names: tuple[str, ...], machines: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return where a run of so many machines shall be, and where else it may go on."""
    first = 1 if names[0] in PROVIDERS else max(machines, 1)
    return names[:first], names[first:]


def load_job(what: Path) -> Job | None:
    """Return a job file's job, None for a sealed package; raises as `jobfile.load`."""
    return load(what) if what.suffix == ".toml" else None


def shape_of(ranks: int | None, machines: int | None) -> Ranks | None:
    """Return in how many ranks a job runs, None for one process without a group; raises `UsageError`."""
    if ranks is None and machines is None:
        return None
    return Ranks(each=1 if ranks is None else ranks, machines=1 if machines is None else machines)
