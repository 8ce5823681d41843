"""Finds what a killed owner left at providers, and returns it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from glasshouse.errors import Code, GlasshouseError, PeerError
from glasshouse.jobs.accounts import provider_of, providers_with_keys
from glasshouse.jobs.control import give_up
from glasshouse.jobs.embedded import Embedded
from glasshouse.jobs.home import Home
from glasshouse.jobs.places import place_of
from glasshouse.jobs.placing import see_out
from glasshouse.jobs.rentals import Rental, rentals
from glasshouse.jobs.rented import return_machine, tag_prefix
from glasshouse.jobs.renting import Clock
from glasshouse.jobs.rundir import Phase, RunFolder
from glasshouse.providers.rental import Rented

__all__ = ["Found", "Stray", "found", "strays", "sweep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A rental that is not over.

    Attributes:
        rental: as journalled.
        kept: whether a process looks after it.
    """

    rental: Rental
    kept: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stray:
    """A machine of this owner at a provider that no journal here has.

    Attributes:
        provider: where.
        machine: by the provider's word.
    """

    provider: str
    machine: Rented


def found(home: Home) -> list[Found]:
    """Return the rentals that are not over, the oldest first; raises `UsageError` for a damaged journal."""
    open_ones = [rental for journal in rentals(home) if not (rental := journal.load()).over]
    return [
        Found(rental=one, kept=one.keeper is not None and one.keeper.alive)
        for one in sorted(open_ones, key=lambda one: one.created_us)
    ]


def strays(home: Home) -> list[Stray]:
    """Return the machines of this owner, at providers whose key is here, that were rented from another home.

    Raises:
        PeerError, UsageError: a provider cannot be asked.
    """
    known = {attempt.tag for journal in rentals(home) for attempt in journal.load().attempts}
    return [
        Stray(provider=name, machine=one)
        for name in providers_with_keys(home)
        for one in provider_of(home, name).tagged(tag_prefix(home))
        if one.tag not in known
    ]


def sweep(
    home: Home,
    *,
    everything: bool = False,
    say: Callable[[str], None] = lambda _text: None,
    clock: Clock | None = None,
) -> tuple[int, list[str]]:
    """Give back every machine whose process is gone: its run is stopped and fetched first, where it can be reached.

    Args:
        home: whose rentals.
        everything: those too of which no journal here tells: another home of this owner may be using them.
        say: called with each step for people.
        clock: the time.

    Returns:
        How many rentals were ended, and what could not be shown to be gone, in words.

    Raises:
        UsageError: a damaged journal, or no key of a provider's account.
    """
    ended, left = 0, []
    for one in found(home):
        if one.kept:
            say(f"{one.rental.place} is looked after by process {one.rental.keeper and one.rental.keeper.pid}")
            continue
        try:
            _end(home, one.rental, say, clock)
            ended += 1
        except PeerError as error:
            left.append(error.message)
    if everything:
        for stray in strays(home):
            say(f"{stray.provider}: {stray.machine.tag} is of no rental here")
            try:
                _return_stray(home, stray, say, clock)
                ended += 1
            except PeerError as error:
                left.append(error.message)
    return ended, left


def _end(home: Home, rental: Rental, say: Callable[[str], None], clock: Clock | None) -> None:
    folder = next((one for one in RunFolder.everywhere(home) if one.run_id == rental.run_id), None)
    if folder is not None and folder.load().phase is Phase.RUNNING and rental.up is not None:
        say(f"stopping run {rental.run_id[:8]}, and fetching what it left")
        with contextlib.suppress(GlasshouseError):  # a machine that does not answer is given back all the same
            _stop(home, folder)
    if folder is not None:
        with contextlib.suppress(GlasshouseError):
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


def _return_stray(home: Home, stray: Stray, say: Callable[[str], None], clock: Clock | None) -> None:
    provider = provider_of(home, stray.provider)
    say(f"giving {stray.machine.id} back")
    provider.give_back(stray.machine.id)
    if provider.find(stray.machine.id) is not None:
        raise PeerError(
            Code.RENTAL_LEFT,
            f"{stray.provider} still has {stray.machine.id} after it was given back",
            hint="sweep again in a minute",
        )
