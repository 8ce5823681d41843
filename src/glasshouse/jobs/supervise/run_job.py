"""Takes a job from its file to the end of its run: seals it, rents or looks at machines, prepares, supervises.

Laws: a machine that was rented is given back when the block that rented it ends, unless another process has taken it
over; a run that fails before it is placed leaves no folder without a record.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.define.job_content import script_warnings
from glasshouse.jobs.define.jobfile import Job, load
from glasshouse.jobs.define.seal_job import Sealed, seal
from glasshouse.jobs.define.wanted import PROVIDERS, Wanted
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.gates.known_gates import gate_name
from glasshouse.jobs.gates.run_broker import Broker, Standing
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places import rented_machine
from glasshouse.jobs.places.accounts import provider_of
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.places.placing import LeftError
from glasshouse.jobs.places.rental_journal import Journal, Rental
from glasshouse.jobs.places.rental_watch import cap_reached
from glasshouse.jobs.supervise import runner
from glasshouse.jobs.supervise.prepare import Prepared, Ranks, prepare
from glasshouse.jobs.supervise.supervision import Ended, Interrupts, Silent
from glasshouse.providers.place.base import Place
from glasshouse.providers.rental.provider import Offer, Provider
from glasshouse.wire.policy import Profile

__all__ = ["Listener", "Renting", "Request", "load_job", "return_left", "run_job", "shape_of"]

SLURM = "slurm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A run that is asked for.

    Attributes:
        what: the job file or package.
        job: the job file's job; None for a package.
        on: names of machines, `local`, or the provider to rent from.
        gate: the name of the gate that releases its key; None for a broker on this machine.
        ranks: in how many processes; None for one without a group.
        detach: whether it goes on by itself.
        accept: whether a rented machine will do that does not print its host key.
    """

    what: Path
    job: Job | None
    on: tuple[str, ...] = ("local",)
    gate: str | None = None
    ranks: Ranks | None = None
    detach: bool = False
    accept: bool = False

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
    ) -> Request:
        """Check what a run is asked for; what is not said here is as the job file says.

        Args:
            what: the job file, or a sealed package.
            home: whose gates may be named.
            on: one name, or several with commas for a group.
            gate: a name or URL of a gate that was added.
            ranks, machines: in how many processes on how many machines.
            detach, accept: as of the class.

        Raises:
            UsageError: as `jobs.jobfile.load` and `Ranks.check`; `usage`.
        """
        shape = shape_of(ranks, machines)
        job = load_job(what)
        machine = None if job is None else job.machine
        where = (on or (machine.on if machine is not None else None) or "local").split(",")
        if machines is None and len(where) > 1:
            shape = shape_of(ranks, len(where))
        gate = gate if gate is not None or job is None else job.gate
        named = None if gate is None else gate_name(home, gate)
        if job is not None and shape is not None:
            shape.check(job.workload, job.floor)
        return cls(what=what, job=job, on=tuple(where), gate=named, ranks=shape, detach=detach, accept=accept)


def load_job(what: Path) -> Job | None:
    """Return a job file's job, None for a sealed package; raises as `jobs.jobfile.load`."""
    return load(what) if what.suffix == ".toml" else None


def shape_of(ranks: int | None, machines: int | None) -> Ranks | None:
    """Return in how many ranks a job runs, None for one process without a group; raises `UsageError`."""
    if ranks is None and machines is None:
        return None
    return Ranks(each=1 if ranks is None else ranks, machines=1 if machines is None else machines)


class Listener(Silent):
    """Hears of a run's steps, besides what a `Watcher` does; each method may be overridden and does nothing here.

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
        """Return whether an error says that what this writes to has gone, and no more than that."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Renting:
    """A run on a machine that is to be rented.

    Attributes:
        request: what is asked for.
        profile: how much hardening the job's policy demands.
        machine: what the job says of its machine.
        provider: from whom.
        offers: what it may be, the cheapest first.
    """

    request: Request
    profile: Profile
    machine: Wanted
    provider: Provider
    offers: list[Offer]

    @classmethod
    def of(cls, request: Request, home: Home) -> Renting | None:
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
        if request.detach and (request.gate is None or not Standing(home, request.gate).stores()):
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
            GlasshouseError: as `jobs.rented.take`.
        """
        listener.agree(self, package)
        begun_s = time.monotonic()

        def say(text: str) -> None:
            with contextlib.suppress(OSError):  # the terminal is closed: the machine is given back all the same
                listener.step(f"{text} ({format_s(time.monotonic() - begun_s)})")

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

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            listener.step(text)

    with runner.giving_back(listener.keeps_giving_back), journal.claimed() as ours:
        rental = journal.load()
        if rental.over:
            return
        if not ours or (rental.kept and not rental.kept_elsewhere):
            say(f"{rental.place} is looked after by another process, which gives it back")
            return
        _returned(listener, rented_machine.return_machine(home, run, say=say))


def run_job(request: Request, *, home: Home, identity: Identity, listener: Listener) -> Ended | RunFolder:
    """Run what is asked for, until it has ended; return a detached run's folder once its supervisor has it.

    SIGINT, SIGTERM and SIGHUP stop it, where this is the main thread.

    Raises:
        GlasshouseError: as `jobs.seal.seal`, `jobs.run.prepare`, `Renting` and `jobs.runner.run_here`;
            `interrupted` before a runtime was placed.
    """
    rents = Renting.of(request, home)
    where = _places(request, home) if rents is None else []
    for line in () if request.job is None else script_warnings(request.job):
        listener.warn(line)
    folder = RunFolder.create(home)
    gate = request.gate
    broker: Broker = Embedded(home) if gate is None else Standing(home, gate, identity.signing)
    interrupts = Interrupts()
    with contextlib.ExitStack() as until_ended:
        until_ended.enter_context(_removed_if_unused(folder))
        until_ended.enter_context(runner.settled(folder, broker))
        if rents is not None:  # a signal between two of the blocks below ends no command that has a machine
            until_ended.enter_context(runner.counted(interrupts))
        try:
            with runner.stoppable():
                package = _sealed(request, home, identity, folder, listener)
                if rents is not None:
                    where = until_ended.enter_context(rents.rented(listener, home, folder, package))
                # Its caps hold while the package is sent, too.
                with rented_machine.watched(home, folder.run_id, runner.interrupt):
                    prepared = _prepared(request, package, home, identity, folder, broker, where, listener)
        except (KeyboardInterrupt, OSError) as error:
            if isinstance(error, OSError) and not listener.has_lost(error):
                raise
            rental = rented_machine.rental_of(home, folder)
            if rental is not None and rental.stopped_by:
                raise cap_reached(rental.stopped_by) from None
            raise UsageError(
                Code.INTERRUPTED, "interrupted before a runtime was placed: the key was not released"
            ) from None
        if request.detach:
            supervisor = runner.detach(
                folder,
                prepared.launch,
                home=home,
                others=prepared.others,
                hand_over=partial(rented_machine.hand_over, home, folder),
            )
            if interrupts.count:
                supervisor.send(signal.SIGTERM)
            return folder
        with listener.showing():
            return runner.run_here(
                folder,
                prepared.launch,
                home=home,
                broker=broker,
                watcher=listener,
                others=prepared.others,
                places=where,
                interrupts=interrupts,
            )


def _places(request: Request, home: Home) -> list[Place]:
    """Return where a run shall be, each looked at before anything is sealed."""
    where = [place_of(home, name) for name in request.on]
    for one in dict(zip(request.on, where, strict=True)).values():
        one.check()
    return where


def _sealed(request: Request, home: Home, identity: Identity, folder: RunFolder, listener: Listener) -> Path:
    """Seal a job file; return the package."""
    if request.job is None:
        return request.what
    sealed = seal(request.job, out=folder.package, home=home, identity=identity)
    for note in sealed.notes:
        listener.warn(note)
    listener.sealed(sealed)
    return folder.package


def _prepared(
    request: Request,
    package: Path,
    home: Home,
    identity: Identity,
    folder: RunFolder,
    broker: Broker,
    where: list[Place],
    listener: Listener,
) -> Prepared:
    started = time.monotonic()
    with listener.showing():
        prepared = prepare(
            package,
            home=home,
            identity=identity,
            folder=folder,
            broker=broker,
            places=where,
            gate=request.gate,
            ranks=request.ranks,
            sending=listener.sending,
        )
    listener.prepared(prepared, time.monotonic() - started, rented_machine.cost_so_far(home, folder))
    return prepared


@contextlib.contextmanager
def _removed_if_unused(folder: RunFolder) -> Iterator[None]:
    """Take away the folder of a run that never had a record: nothing of it happened."""
    try:
        yield
    except BaseException:
        if not folder.recorded:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
