"""A run on a rented machine, from the decision to its end: journal, machine, place, and giving it back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from glasshouse.errors import GlasshouseError
from glasshouse.jobs.define.wanted import MACHINE, Wanted, wanted
from glasshouse.jobs.owner.durations import SystemClock
from glasshouse.jobs.owner.home import Home, is_there, read_state, write_private, write_state
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.processes import ProcessName, giving_back
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places.placing import LeftError
from glasshouse.jobs.places.rent import Renter, unless_closed
from glasshouse.jobs.places.rental_journal import Journal, Rental
from glasshouse.jobs.places.rental_watch import provider_for
from glasshouse.jobs.places.runtime_bundle import make_bundle
from glasshouse.providers.rental.provider import Offer, Provider
from glasshouse.workloads.job_keys import read

NO_MACHINE = wanted(read(MACHINE, {}, "machine"), Path())
"""The machine of a job file without `[machine]`."""


def tag_prefix(home: Home) -> str:
    """Return the prefix of the names of all machines of an owner at a provider."""
    fingerprint = read_public(home.owner_public).fingerprint
    return f"gh-{''.join(char for char in fingerprint.lower() if char.isalnum())[-10:]}-"


def begin(home: Home, run: RunFolder, provider: str, machine: Wanted, *, clock: SystemClock | None = None) -> Journal:
    """Begin the journal of a rental, with its login key; nothing is asked for yet. Raises `UsageError`."""
    Journal.of(home, run.run_id).ssh_files()  # refuses a home whose path ssh cannot take
    rental = Rental(
        run_id=run.run_id,
        provider=provider,
        created_us=(clock or SystemClock()).now_us(),
        caps=machine.caps,
        python=machine.python,
        keeper=ProcessName.of(),
        cluster=machine.cluster if provider == "slurm" else None,
    )
    journal = Journal.create(home, replace(rental, account=provider_for(home, rental).account(run.run_id)))
    private = Ed25519PrivateKey.generate()
    openssh = serialization.PrivateFormat.OpenSSH
    write_private(journal.key, private.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption()))
    if machine.bundle is None:
        make_bundle(journal.bundle)
    else:
        write_private(journal.bundle, machine.bundle.read_bytes())
    return journal


def take(
    home: Home,
    journal: Journal,
    provider: Provider,
    offers: Sequence[Offer],
    machine: Wanted,
    *,
    accept: bool = False,
    say: Callable[[str], None] = lambda _text: None,
    clock: SystemClock | None = None,
) -> None:
    """Rent a machine, which is to be logged in to and examined before anything is sent; raises as `Renter.take`."""
    public = serialization.load_ssh_private_key(journal.key.read_bytes(), None).public_key()
    line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    renter = Renter(journal, provider, clock=clock, say=say)
    renter.take(offers, machine.options, owner=tag_prefix(home), ssh_public=line, accept=accept)


def return_machine(
    home: Home, run: RunFolder, *, say: Callable[[str], None] = lambda _text: None, clock: SystemClock | None = None
) -> Rental | None:
    """Give back what was rented for a run, write its cost to the run's folder, and return the rental, if any.

    Raises:
        PeerError: `rental-left`: it is not shown to be gone.
        UsageError: no key of the provider's account.
    """
    journal, clock = Journal.of(home, run.run_id), clock or SystemClock()
    if not journal.exists:
        return None
    if not journal.load().over:
        provider = provider_for(home, journal.load())
        Renter(journal, provider, clock=clock, say=say).give_back()
    journal.forget_key()
    rental = journal.load()
    if is_there(run.path):
        write_state(run.rental, statement(rental, clock.now_us()))
    return rental


def rental_of(home: Home, run: RunFolder) -> Rental | None:
    """Return what was rented for a run; None where nothing was; raises `UsageError` for a damaged journal."""
    journal = Journal.of(home, run.run_id)
    return journal.load() if journal.exists else None


def hand_over(home: Home, run: RunFolder, keeper: ProcessName) -> None:
    """Name the process that gives a run's machine back, if it is rented."""
    if (journal := Journal.of(home, run.run_id)).exists:
        journal.update(keeper=keeper)


def cost_so_far(home: Home, run: RunFolder) -> Callable[[], str] | None:
    """Return a function of the cost so far of a run's rented machine; None where none is rented."""
    if (rental := rental_of(home, run)) is None:
        return None
    most = "" if rental.caps.usd is None else f" of {rental.caps.usd}"
    return lambda: f"{rental.cost_usd(SystemClock().now_us()):.2f}{most} $"


def statement(rental: Rental, now_us: int) -> dict[str, object]:
    """Return a rental as an object; by the provider's account, which no receipt vouches for."""
    return {
        "provider": rental.provider,
        "created_us": rental.created_us,
        "most_usd": None if rental.caps.usd is None else f"{rental.caps.usd:f}",
        "most_s": rental.caps.seconds,
        "cost_usd": f"{rental.cost_usd(now_us):.4f}",
        "billed_usd": None if rental.billed_usd is None else f"{rental.billed_usd:.4f}",
        "over": rental.over,
        "stopped_by": rental.stopped_by or None,
        "machines": [
            {
                "machine": one.machine,
                "tag": one.tag,
                "state": one.step.value,
                "gpu": one.offer.gpu,
                "gpus": one.offer.gpus,
                "region": one.offer.region,
                "usd_per_hour": f"{one.offer.usd_per_hour}",
                "asked_us": one.asked_us,
                "up_us": one.up_us,
                "gone_us": one.gone_us,
                "host_key": "printed by its start command" if one.host_key else "accepted" if one.up_us else None,
                "why": one.why or None,
            }
            for one in rental.attempts
        ],
    }


def statement_of(home: Home, run: RunFolder, now_us: int) -> dict[str, Any] | None:
    """Return the statement of a run's rental, if any, from its journal or, when it is over, the run's folder."""
    journal = Journal.of(home, run.run_id)
    if journal.exists and (not (rental := journal.load()).over or not is_there(run.rental)):
        return statement(rental, now_us)
    return read_state(run.rental, what="rental") if is_there(run.rental) else None


class RentalListener:
    """Gets the steps of renting and giving back; each method may be overridden and does nothing here."""

    def warn(self, text: str) -> None:
        """Something should not be overlooked."""

    def step(self, text: str) -> None:
        """A step of renting, or of giving back."""

    def returned(self, rental: Rental) -> None:
        """A machine was given back, and shown to be gone."""

    def keeps_giving_back(self) -> None:
        """A first Ctrl-C while a machine is given back did not end that; called by a signal's handler."""


@contextlib.contextmanager
def given_back(listener: RentalListener, home: Home, run: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
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


def _give_back(listener: RentalListener, home: Home, run: RunFolder, say: Callable[[str], None]) -> None:
    with giving_back(listener.keeps_giving_back):
        rental = rental_of(home, run)
        if rental is None or rental.keeper in (None, ProcessName.of()):
            _returned(listener, return_machine(home, run, say=say))


def _returned(listener: RentalListener, rental: Rental | None) -> None:
    if rental is not None:
        with contextlib.suppress(OSError):
            listener.returned(rental)


def return_left(listener: RentalListener, home: Home, run: RunFolder) -> None:
    """Give back what was rented for a run whose supervisor, which would have done it, was ended.

    Raises:
        PeerError: `rental-left`.
        UsageError: a damaged journal, or no key of the provider's account.
    """
    journal = Journal.of(home, run.run_id)
    if not journal.exists:
        return
    say = unless_closed(listener.step)
    with giving_back(listener.keeps_giving_back), journal.claimed() as ours:
        rental = journal.load()
        if rental.over:
            return
        if not ours or (rental.kept and not rental.kept_elsewhere):
            say(f"{rental.place} is looked after by another process, which gives it back")
            return
        _returned(listener, return_machine(home, run, say=say))
