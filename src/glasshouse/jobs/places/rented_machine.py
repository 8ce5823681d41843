"""A run on a rented machine, from the decision to its end: journal, machine, place, and giving it back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from glasshouse.errors import Code, PeerError, PlatformError, UsageError
from glasshouse.jobs.define.wanted import MACHINE, Wanted, wanted
from glasshouse.jobs.owner.files import is_there, read_state, write_private, write_state
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places import rental_watch
from glasshouse.jobs.places.accounts import provider_for
from glasshouse.jobs.places.known_machines import examine, files_of, place_of
from glasshouse.jobs.places.rent import Renter
from glasshouse.jobs.places.rental_journal import Journal, Rental
from glasshouse.jobs.places.rental_watch import Clock, RentalWatch, SystemClock
from glasshouse.jobs.places.runtime_bundle import make_bundle
from glasshouse.providers.place.base import Place
from glasshouse.providers.rental.provider import Offer, Provider
from glasshouse.wire.policy import Profile
from glasshouse.workloads.job_keys import read

NO_MACHINE = wanted(read(MACHINE, {}, "machine"), Path())
"""The machine of a job file without `[machine]`."""
# For the login to a machine that is up only near its boot deadline.
_LOGIN_US = 60_000_000


def tag_prefix(home: Home) -> str:
    """Return the prefix of the names of all machines of an owner at a provider."""
    fingerprint = read_public(home.owner_public).fingerprint
    return f"gh-{''.join(char for char in fingerprint.lower() if char.isalnum())[-10:]}-"


def offers_of(provider: Provider, machine: Wanted) -> list[Offer]:
    """Return what a job may rent, the cheapest first.

    Raises:
        UsageError: `job-invalid`: the job lacks the most that it may cost, or its image; `usage` for a kind of GPU
            that the provider does not have.
        PlatformError: `no-offer`.
        PeerError: as `Provider`.
    """
    missing = provider.has_sshd and [
        f"{key} = {example}"
        for key, example, given in (
            ("most_per_hour", "0.80", machine.options.most_per_hour_usd),
            ("most_usd", "5", machine.caps.usd),
            ("image", '"pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"', machine.options.image),
        )
        if not given
    ]
    if missing:
        keys = ", ".join(line.split(" ")[0] for line in missing)
        why = f"the job file limits no cost of a machine, or names no image: [machine] lacks {keys}"
        raise UsageError(Code.JOB_INVALID, why, hint="for example: " + "; ".join(missing))
    found = [one for one in provider.offers(machine.options) if one.usd_per_hour <= machine.options.most_per_hour_usd]
    if not found:
        kinds = " or ".join(machine.options.gpu) or "any kind"
        raise PlatformError(
            Code.NO_OFFER,
            f"{provider.name} offers no machine with {machine.options.gpus} × {kinds}"
            + (f" for at most {machine.options.most_per_hour_usd} $ an hour" if provider.has_sshd else ""),
            hint="glasshouse offers --any-price shows what there is",
        )
    return sorted(found, key=lambda one: one.usd_per_hour)


def begin(home: Home, run: RunFolder, provider: str, machine: Wanted, *, clock: Clock | None = None) -> Journal:
    """Begin the journal of a rental, with its login key; nothing is asked for yet. Raises `UsageError`."""
    files_of(Journal.of(home, run.run_id))
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
    profile: Profile,
    interrupt: Callable[[], None],
    accept: bool = False,
    say: Callable[[str], None] = lambda _text: None,
    clock: Clock | None = None,
) -> list[Place]:
    """Rent a machine and return the places on it, examined; nothing of the job is sent yet.

    Args:
        profile: the hardening that the job's policy demands.
        interrupt: called when a cap is reached during login and examination; ends this call.

    Raises:
        GlasshouseError: as `Renter.take`; or the machine cannot be reached, or cannot meet the policy.
    """
    clock = clock or SystemClock()
    public = serialization.load_ssh_private_key(journal.key.read_bytes(), None).public_key()
    line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    renter = Renter(journal, provider, clock=clock, say=say)
    renter.take(offers, machine.options, owner=tag_prefix(home), ssh_public=line, accept=accept)
    say("logging in")
    rental = journal.load()
    places = [place_of(home, name) for name in rental.places]
    # One deadline from the request to the login; a machine that came up late in it is tried for a minute.
    asked_us = clock.now_us() if rental.up is None else rental.up.asked_us
    until_us = max(asked_us + machine.caps.boot_s * 1_000_000, clock.now_us() + _LOGIN_US)
    with watched(home, rental.run_id, interrupt, clock=clock):
        for place in places:
            _reach(place, until_us=until_us, clock=clock)
            place.close()
            _look(home, place.name, profile)
    return places


def _reach(place: Place, *, until_us: int, clock: Clock) -> None:
    """Wait until a machine that printed its host key answers; raises `PeerError`, `PlatformError`."""
    while True:
        try:
            return place.check()
        except PeerError as error:
            if error.code is not Code.PLACE_UNREACHABLE:
                raise
            if clock.now_us() > until_us:
                raise PlatformError(
                    Code.BOOT_FAILED,
                    f"{place.name} was rented, and cannot be logged in to: {error.message}",
                    hint="its image may end and start over and over: see its log on the provider's page, or take "
                    "another image",
                ) from None
        clock.sleep(rental_watch.POLL_S)


def _look(home: Home, name: str, profile: Profile) -> None:
    """Refuse a machine that cannot meet the policy, before anything is sent; raises `PlatformError`."""
    offered = next((one.value for one in examine(home, name) if one.feature == "profile"), Profile.OFF.value)
    order = [Profile.OFF.value, Profile.STANDARD.value, Profile.STRICT.value]
    if offered not in order or order.index(offered) < order.index(profile.value):
        raise PlatformError(
            Code.HARDENING_MISSING,
            f"{name} offers the profile {offered!r}, and the job's policy demands {profile.value!r}",
            hint='most rented containers offer "standard": set policy.profile, or take another provider',
        )


def return_machine(
    home: Home, run: RunFolder, *, say: Callable[[str], None] = lambda _text: None, clock: Clock | None = None
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


@contextlib.contextmanager
def watched(
    home: Home, run_id: str, stop: Callable[[], None], *, clock: Clock | None = None
) -> Iterator[Callable[[], bool]]:
    """Watch a run's rented machine, and call `stop` before its cap; yield a function for whether it is gone."""
    journal = Journal.of(home, run_id)
    if not journal.exists or journal.load().up is None:
        yield lambda: False
        return
    journal.update(keeper=ProcessName.of())
    watch = RentalWatch(journal, provider_for(home, journal.load()), stop, clock)
    try:
        with watch:
            yield watch.gone.is_set
    finally:
        if watch.stopped_by:
            journal.update(stopped_by=watch.stopped_by)
        up = journal.load().up
        if watch.gone.is_set() and up is not None:
            journal.note(up.tag, why="its provider does not run it any more")
