"""Ends and removes what runs left: machines of a killed owner at providers, files on machines, ended runs here.

Laws: what still runs, whose rented machine is not shown to be gone, or cannot be read, is never removed; a run is taken
from the list in one step, so one that is half removed is not taken for a run. Keys and package records stay.
"""

from __future__ import annotations

import contextlib
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.durations import SystemClock
from glasshouse.jobs.owner.home import Home, is_there
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import GIVEN_UP, Phase, RunFolder, RunRecord
from glasshouse.jobs.places.accounts import provider_of, providers_with_keys
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.places.placing import see_out
from glasshouse.jobs.places.rent import give_back_all, unless_closed
from glasshouse.jobs.places.rental_journal import Journal, Rental, Step, rentals
from glasshouse.jobs.places.rented_machine import return_machine, tag_prefix
from glasshouse.jobs.supervise.control import give_up, look
from glasshouse.providers.place.base import Placed
from glasshouse.providers.place.placed import digest_of
from glasshouse.providers.place.ssh import SshPlace
from glasshouse.providers.rental.provider import Rented


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the journals here record."""

    rentals: tuple[Rental, ...]  # those that are not over, the oldest first
    damaged: tuple[str, ...]  # what could not be read, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class Stray:
    """A machine of this owner at a provider, of no rental here that goes on."""

    provider: str
    machine: Rented  # by the provider's word


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """What providers list."""

    strays: tuple[Stray, ...]  # machines of this owner, of no rental here that goes on
    asked: tuple[str, ...]  # the providers that answered; those without a key here were not asked
    silent: tuple[str, ...]  # those that were asked and did not answer, in words


@dataclass(kw_only=True, slots=True)
class Swept:
    """What a sweep did."""

    rentals: int = 0  # how many were ended, machines from another home among them
    machines: int = 0  # how many of their machines are shown to be gone; of a request that made none there is none
    forgotten: int = 0  # how many records were removed of rentals that were over before, and belong to no run here
    left: list[str] = field(default_factory=list)  # what could not be shown to be gone or not be read, in words


def found(home: Home) -> Found:
    """Return the rentals that are not over."""
    open_ones, damaged = [], []
    for journal in rentals(home):
        try:
            rental = journal.load()
        except (GlasshouseError, OSError) as error:
            damaged.append(_words(error))
        else:
            open_ones += [] if rental.over else [rental]
    return Found(rentals=tuple(sorted(open_ones, key=lambda one: one.created_us)), damaged=tuple(damaged))


def elsewhere(home: Home) -> Elsewhere:
    """Return the machines of this owner, at providers whose key is here, that no rental here has that goes on."""
    listed, asked, silent = [], [], []
    for name in providers_with_keys(home):
        try:
            listed += [Stray(provider=name, machine=one) for one in provider_of(home, name).tagged(tag_prefix(home))]
            asked.append(name)
        except GlasshouseError as error:
            silent.append(_words(error))
    # Read after the listings: what was asked for meanwhile was journalled before.
    known = {one.tag for rental in found(home).rentals for one in rental.attempts if not one.step.over}
    strays = tuple(one for one in listed if one.machine.tag not in known)
    return Elsewhere(strays=strays, asked=tuple(asked), silent=tuple(silent))


def sweep(
    home: Home,
    *,
    everything: bool = False,
    say: Callable[[str], None] = lambda _text: None,
    clock: SystemClock | None = None,
) -> Swept:
    """Give back every machine whose process is gone: its run is stopped and fetched first, where it can be reached.

    One that cannot be given back, or whose journal is damaged, keeps no other. With `everything`, also those whose
    process is, or was, on another machine, or of which there is no journal here: another home may be using them.
    """
    clock, there = clock or SystemClock(), found(home)
    swept = Swept(left=list(there.damaged), forgotten=_forget(home))

    say = unless_closed(say)
    for rental in there.rentals:
        try:
            _sweep_one(home, rental, swept, everything, say, clock)
        except (GlasshouseError, OSError) as error:
            swept.left.append(_words(error))
    for stray in elsewhere(home).strays if everything else ():
        say(f"{stray.provider}: {stray.machine.tag} is of no rental here; giving {stray.machine.id} back")
        try:
            give_back_all(provider_of(home, stray.provider), stray.machine.id, stray.machine.tag, clock)
            swept.rentals, swept.machines = swept.rentals + 1, swept.machines + 1
        except (GlasshouseError, OSError) as error:
            swept.left.append(_words(error))
    return swept


def _forget(home: Home) -> int:
    """Remove the records of rentals that are over, looked after by no process, and of no run; return how many."""
    runs, forgotten = {folder.run_id for folder in RunFolder.everywhere(home)}, 0
    for journal in list(rentals(home)):
        with contextlib.suppress(GlasshouseError, OSError), journal.claimed() as ours:
            rental = journal.load()
            if ours and rental.over and not rental.kept and rental.run_id not in runs:
                journal.remove()
                forgotten += 1
    return forgotten


def _sweep_one(
    home: Home, rental: Rental, swept: Swept, everything: bool, say: Callable[[str], None], clock: SystemClock
) -> None:
    journal = Journal.of(home, rental.run_id)
    with journal.claimed() as ours:
        rental = journal.load()  # it may have been ended, or taken over, since it was found
        if rental.over:
            return
        if not ours or (rental.kept and not (everything and rental.kept_elsewhere)):
            named = rental.keeper if rental.kept else None
            who = "another process" if named is None else f"process {named.pid} on {rental.keeper_host}"
            ask = "; --all ends it all the same" if rental.kept_elsewhere and ours else ""
            say(f"{rental.place} is looked after by {who}{ask}")
            return
        with contextlib.suppress(GlasshouseError):  # a disk without room keeps no machine
            journal.update(keeper=ProcessName.of())
        try:
            _end(home, rental, say, clock)
        finally:
            with contextlib.suppress(GlasshouseError):
                journal.update(keeper=None)
        before = {one.tag for one in rental.attempts if not one.step.over}
        swept.rentals += 1
        swept.machines += sum(one.tag in before and one.step is Step.GONE for one in journal.load().attempts)


def _end(home: Home, rental: Rental, say: Callable[[str], None], clock: SystemClock) -> None:
    folder = next((one for one in RunFolder.everywhere(home) if one.run_id == rental.run_id), None)
    if folder is not None and rental.up is not None:
        # A machine that does not answer, or whose run has a damaged record, is given back all the same.
        with contextlib.suppress(GlasshouseError, OSError):
            if folder.load().phase is Phase.RUNNING:
                say(f"stopping run {rental.run_id[:8]}, and fetching what it left")
                _stop(home, folder)
    if folder is not None:
        with contextlib.suppress(GlasshouseError, OSError):
            give_up(folder, home)  # recorded by its receipt, where it left one
    return_machine(home, folder or RunFolder(home.runs / rental.run_id), say=say, clock=clock)


def _stop(home: Home, folder: RunFolder) -> None:
    record = folder.load()
    Embedded(home).ensure()  # signs for its end
    place = place_of(home, record.place)
    with contextlib.closing(place):
        placed = place.run(folder.path, max_bytes=record.max_output_bytes, relayed=record.gate is not None)
        with contextlib.closing(placed):
            placed.connect()
            placed.stop()
            see_out(placed)


def _words(error: GlasshouseError | OSError) -> str:
    return error.message if isinstance(error, GlasshouseError) else f"{error.strerror or type(error).__name__}"


def sweep_machine(home: Home, name: str) -> tuple[int, dict[str, str]]:
    """Remove from a machine what is left there of this home's runs that have ended.

    A run that was given up is interrupted and fetched first; any other that still runs there is stopped, unread.
    Return how many runs were removed, and for each other run there, by its id, why it is left.

    Raises:
        UsageError: no such machine.
        PeerError, PlatformError: it cannot be reached.
    """
    place = place_of(home, name)
    if not isinstance(place, SshPlace):
        raise UsageError(Code.USAGE, f"{name} is this machine: glasshouse prune removes what is here of ended runs")
    with contextlib.closing(place):
        there = place.runs()
        left = dict.fromkeys(there, "is no run of yours")
        for folder in RunFolder.everywhere(home):
            for one in folder.machines():
                record = one.load()
                run = record.run_id
                # A run whose command was killed before it was placed has a package there at most.
                over = record.phase is Phase.ENDED or (record.phase is Phase.PREPARING and not record.alive)
                if record.place == name and over:
                    with contextlib.closing(place.run(one.path, max_bytes=record.max_output_bytes)) as placed:
                        why = _cleared(home, one, record, placed, there.get(run))
                else:
                    why = "goes on" if record.place == name else f"was placed by another name: {record.place}"
                if why is None:
                    left.pop(run, None)
                elif run in left:
                    left[run] = why
    Embedded(home).give_back()
    return len(there) - len(left), dict(sorted(left.items()))


def _cleared(home: Home, folder: RunFolder, record: RunRecord, placed: Placed, goes_on: bool | None) -> str | None:
    """Remove what a machine has of a run that is over here, if only a package; return None, or why it is left."""
    # To any other run nothing is added here: what is there is the machine's claim alone.
    if goes_on is not None and record.code == GIVEN_UP.value and not is_there(folder.receipt):
        if goes_on:
            Embedded(home).ensure()  # signs for its end
            placed.interrupt()
        if not see_out(placed):  # what is removed there has to be here first; the next sweep fetches the rest
            return "is not here whole yet" + (f": {placed.problem}" if placed.problem else "")
    elif goes_on:
        placed.connect()
        placed.stop()
    try:
        placed.remove(record.sent or (digest_of(record.package) if record.package.exists() else None))
    except UsageError:
        if not goes_on:
            raise
        return "is stopping, and still wipes itself"  # the next sweep removes it
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Removable:
    """A run that may be removed."""

    folder: RunFolder
    record: RunRecord
    journal: Journal  # of its rental, which is over; it may not be there
    freed_bytes: int  # what its removal frees; what another name still holds, as a package's own, frees nothing


def removable(folder: RunFolder, home: Home) -> Removable:
    """Return an ended run; raises `UsageError` if it goes on, may still cost money, or its record is damaged."""
    record = look(folder, home, deep=False).record
    if record.phase is not Phase.ENDED or folder.active():
        raise UsageError(
            Code.USAGE, f"run {folder.run_id[:8]} has not ended", hint=f"glasshouse stop {folder.run_id[:8]} ends it"
        )
    journal = Journal.of(home, folder.run_id)
    if journal.exists and not journal.load().over:
        raise UsageError(
            Code.USAGE,
            f"the machine that was rented for run {folder.run_id[:8]} is not shown to be gone",
            hint="glasshouse sweep gives it back; or wait until the run's own command has",
        )
    return Removable(folder=folder, record=record, journal=journal, freed_bytes=_freed_bytes(folder.path))


def ended_before(home: Home, *, us: int) -> list[Removable]:
    """Return the runs that ended before a time, in µs, the oldest first; what goes on or is damaged is left out."""
    found: list[Removable] = []
    for folder in RunFolder.all(home):
        try:
            one = removable(folder, home)
        except UsageError:
            continue
        if one.record.ended_us is not None and one.record.ended_us < us:
            found.append(one)
    return sorted(found, key=lambda one: one.record.created_us)


def remove(runs: Sequence[Removable]) -> None:
    """Remove runs; raises OSError for a folder that cannot be removed."""
    for run in runs:
        # Under another name first: what a crash leaves of it is no run, and the next removal takes it away.
        gone = run.folder.path.with_name(f".{run.folder.run_id}.removed")
        run.folder.path.rename(gone)
    for run in runs:
        if run.journal.exists:
            run.journal.remove()
        for left in run.folder.path.parent.glob(".*.removed"):
            if left.is_symlink():  # an earlier version took a link for a run
                left.unlink()
            else:
                shutil.rmtree(left)


def _freed_bytes(folder: Path) -> int:
    found = (path.lstat() for path in folder.rglob("*"))
    return sum(file.st_blocks * 512 for file in found if stat.S_ISREG(file.st_mode) and file.st_nlink == 1)
