"""Rents a machine, and gives it back: each step is journalled before it is taken, and the end is shown, not assumed.

Laws: what was asked for is given back, whatever fails in between, such as a lost terminal or a full disk; a machine is
gone when its provider neither finds it by its id nor lists it in two listings some time apart; times come from a clock
that is passed in.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Sequence
from decimal import Decimal

from glasshouse.errors import Code, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.jobs.owner.durations import SystemClock
from glasshouse.jobs.owner.home import write_private
from glasshouse.jobs.places.rental_journal import HOUR_S, POLL_S, Attempt, Journal, Rental, Step, deadline_us
from glasshouse.providers.rental.provider import Offer, Options, Provider, Rented, RentedState, Start, UncertainError
from glasshouse.providers.rental.start_script import host_key

# Listings without a machine before it counts as never made, however soon a provider calls them complete.
_LEAST_LOOKS = 3
_PROOF_GAP_S = 20.0
_PROOF_S = 900.0
_LEAST_S = 600
_MOST_ATTEMPTS = 5
# What a provider may round.
_SAME_PRICE = Decimal("1.01")


def unless_closed(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for a terminal or log that may be closed: a machine is given back all the same."""

    def say_if_open(text: str) -> None:
        with contextlib.suppress(OSError):
            say(text)

    return say_if_open


def give_back_all(provider: Provider, machine: str, tag: str, clock: SystemClock, *, seen: bool = True) -> int:
    """Give back a machine and all others of its tag, and return since when they are shown to be gone.

    Args:
        seen: whether the provider has shown the machine before; one that it has not may still be shown later.

    Raises:
        PeerError: one of them is still there, or the provider away, after a quarter of an hour.
        UsageError: `provider-key`, as `Provider`.
    """
    known, ask = {machine}, True
    until_us, absent_us, waited_s = clock.now_us() + int(_PROOF_S * 1e6), 0, 0.0
    while True:
        try:
            seen = seen or provider.find(machine) is not None
            for one in sorted(known) if ask else ():
                provider.give_back(one)
            listed = {one.id for one in provider.tagged(tag) if one.tag == tag or one.id == machine}
            known |= listed
            ask = bool(listed) or any(provider.find(one) is not None for one in sorted(known))
            if ask:
                seen, absent_us = True, 0
            elif not absent_us:
                absent_us, waited_s = clock.now_us(), 0.0
            elif waited_s >= (_PROOF_GAP_S if seen else provider.settles_s):
                return absent_us
            ask = ask or not seen
            problem = f"{provider.name} lists it {_PROOF_S / 60:.0f} minutes after it was given back"
        except PeerError as error:
            problem = error.message
        if clock.now_us() > until_us:
            raise PeerError(Code.PROVIDER_PROTOCOL, problem)
        clock.sleep(POLL_S)
        waited_s += POLL_S


class Renter:
    """Takes a machine for one rental, and gives back all that were asked for; `say` is called with each step."""

    def __init__(
        self,
        journal: Journal,
        provider: Provider,
        *,
        clock: SystemClock | None = None,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._journal, self._provider, self._say = journal, provider, unless_closed(say)
        self._clock = clock or SystemClock()

    def take(
        self, offers: Sequence[Offer], options: Options, *, owner: str, ssh_public: str, accept: bool = False
    ) -> Attempt:
        """Rent the first of some offers that comes up in time.

        Args:
            owner: the prefix of every tag of this owner, see `tag_prefix`.
            ssh_public: the key that may log in.
            accept: whether a machine will do that does not print its host key.

        Raises:
            PlatformError: `no-offer`: none is to be had any more; `boot-failed`: none came up.
            UsageError: `cap-reached`, also while it boots; `provider-key`, `provider-money`.
            PeerError: the provider is away, or it is uncertain whether a machine was made.
        """
        reasons: list[str] = []
        for offer in offers[:_MOST_ATTEMPTS]:
            attempt = self._ask(offer, options, owner, ssh_public, reasons)
            if attempt is None:
                continue
            problem = self._boot(attempt, accept=accept)
            if problem is None:
                return next(one for one in self._journal.load().attempts if one.tag == attempt.tag)
            reasons.append(problem)
            self._say(f"{problem}: it is given back")
            self._note(attempt, why=problem)
            self.give_back()
        made = any(one.machine for one in self._journal.load().attempts)
        raise PlatformError(
            Code.BOOT_FAILED if made and reasons else Code.NO_OFFER,
            f"no machine of {self._provider.name} could be had: " + ("; ".join(reasons) or "none is offered that fits"),
            hint="ask for less, for more kinds of GPU or for a higher price in [machine]; see: glasshouse offers",
        )

    def give_back(self) -> None:
        """Give back every machine that was asked for; raises `PeerError` (`rental-left`) if one may still be there."""
        for attempt in self._journal.load().attempts:
            if attempt.step.over:
                continue
            try:
                self._return(attempt)
            except (Exception, KeyboardInterrupt) as error:
                # A defect's kind alone: its text may hold anything.
                defect = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
                why = error.message if isinstance(error, GlasshouseError) else defect
                raise PeerError(
                    Code.RENTAL_LEFT,
                    f"the machine {attempt.machine or attempt.tag} of {self._provider.name} is not shown to be gone, "
                    f"and may cost {attempt.offer.usd_per_hour:.2f} $ an hour: {why}",
                    hint="glasshouse sweep with the key it was rented with, until it finds nothing; or end it on the "
                    "provider's own page",
                ) from None
        self._journal.forget_key()

    def _ask(self, offer: Offer, options: Options, owner: str, ssh_public: str, reasons: list[str]) -> Attempt | None:
        """Ask for a machine; return None, and add to `reasons`, where certainly none was made."""
        rental, now_us = self._journal.load(), self._clock.now_us()
        seconds = self._seconds_left(rental, offer, now_us)
        tag = f"{owner}{rental.run_id[:8]}-{len(rental.attempts) + 1}"
        attempt = Attempt(tag=tag, nonce=secrets.token_hex(16), offer=offer, asked_us=now_us)
        start = Start(
            tag=tag,
            nonce=attempt.nonce,
            ssh_public=ssh_public,
            ends_s=seconds,
            ends_at_s=now_us // 1_000_000 + seconds,
            options=options,
        )
        self._say(f"asking for {offer.gpus} × {offer.gpu or 'no GPU'} at {offer.usd_per_hour:.3f} $ an hour")
        self._journal.add(attempt)
        try:
            machine: str | None = self._provider.rent(offer, start)
        except UncertainError as error:
            if error.machine is not None:  # and not as it was asked for
                self._journal.note(tag, step=Step.MADE, machine=error.machine, why=error.message)
                reasons.append(error.message)
                self.give_back()
                return None
            self._say(f"{error.message}; it is looked for")
            machine = self._settle(attempt)
            if machine is None:
                reasons.append("an answer was lost, and no machine was made")
                return None
        except GlasshouseError as error:
            self._journal.note(tag, step=Step.NEVER, why=error.message)
            if error.code is not Code.NO_OFFER:
                raise
            reasons.append(error.message)
            self._say(error.message)
            return None
        return self._journal.note(tag, step=Step.MADE, machine=machine)

    def _seconds_left(self, rental: Rental, offer: Offer, now_us: int) -> int:
        """Return for how long a machine can be had within the caps; raises `UsageError` where it is not worth it."""
        left_s = rental.caps.seconds - (now_us - rental.created_us) // 1_000_000
        if rental.caps.usd is not None and offer.usd_per_hour:
            money = rental.caps.usd - rental.cost_usd(now_us)
            left_s = min(left_s, int(money / offer.usd_per_hour * HOUR_S))
        if left_s < _LEAST_S:
            raise UsageError(
                Code.CAP_REACHED,
                f"the caps of the job leave {max(0, left_s) // 60} minutes of a machine at {offer.usd_per_hour:.2f} $ "
                f"an hour, and a run needs at least {_LEAST_S // 60}",
                hint="raise most_usd or most_time in [machine]",
            )
        return left_s

    def _settle(self, attempt: Attempt) -> str | None:
        """Find the machine of a request that was not answered; None once it would be listed if it were there.

        The time is counted in waits from now on: a clock may be set, and the request may be old.
        """
        looks = max(_LEAST_LOOKS, 1 + math.ceil(self._provider.settles_s / POLL_S))
        self._say(f"looking for {attempt.tag} in listings, for {(looks - 1) * POLL_S:.0f} s at most")
        for look in range(looks):
            if look:
                self._clock.sleep(POLL_S)
            found = [one for one in self._provider.tagged(attempt.tag) if one.tag == attempt.tag]
            if found:
                self._note(attempt, step=Step.MADE, machine=found[0].id)
                return found[0].id
        self._journal.note(attempt.tag, step=Step.NEVER, why="an answer was lost, and no machine was made")
        return None

    def _note(self, attempt: Attempt, **changes: object) -> None:
        """Journal what giving back does not depend on, so that a full disk keeps no machine."""
        with contextlib.suppress(GlasshouseError, OSError):
            self._journal.note(attempt.tag, **changes)

    def _boot(self, attempt: Attempt, *, accept: bool) -> str | None:
        """Wait until a machine can be logged in to; return why it cannot, None where it can."""
        assert attempt.machine is not None  # noqa: S101 - it was made
        begun_us, rental = self._clock.now_us(), self._journal.load()
        boot_us, (cap_us, cap) = rental.caps.boot_s * 1_000_000, deadline_us(rental)
        while True:
            found = self._provider.find(attempt.machine)
            now_us = self._clock.now_us()
            if now_us > cap_us:
                with contextlib.suppress(GlasshouseError):
                    self._journal.update(stopped_by=cap)
                raise cap_reached(cap)
            waited_us = now_us - begun_us
            if problem := self._unfit(found, attempt, waited_us):
                return problem
            if found is not None and found.state is RentedState.RUNNING and not self._provider.has_sshd:
                if places := self._provider.places(attempt.machine):
                    self._up(attempt, found, None, places)
                    return None
            elif found is not None and found.state is RentedState.RUNNING and found.host is not None:
                try:
                    key = host_key(self._provider.output(attempt.machine), attempt.nonce)
                except ValueError:
                    return "its image has no sshd, by which a run is placed there"
                # A machine without a printed host key is awaited for half of its time, where it will do at all.
                if key is not None or (accept and waited_us > boot_us // 2):
                    self._up(attempt, found, key)
                    return None
            if waited_us > boot_us:
                return f"{attempt.machine} was not up within {boot_us // 1_000_000} s"
            self._clock.sleep(POLL_S)

    def _unfit(self, found: Rented | None, attempt: Attempt, waited_us: int) -> str | None:
        if found is None:  # one that was made a moment ago may not be listed yet
            late = waited_us > self._provider.settles_s * 1e6
            return f"{self._provider.name} does not find {attempt.machine} any more" if late else None
        if found.state is RentedState.STOPPED:
            return f"{attempt.machine} stopped before it was up" + (f": {found.why}" if found.why else "")
        price = attempt.offer.usd_per_hour
        if price and found.usd_per_hour is None and found.state is RentedState.RUNNING:
            return f"{self._provider.name} lists no price of {attempt.machine}, and {price:.3f} $ were shown"
        if found.usd_per_hour is not None and found.usd_per_hour > price * _SAME_PRICE:
            return f"{attempt.machine} costs {found.usd_per_hour:.3f} $ an hour, and {price:.3f} were shown"
        return None

    def _up(self, attempt: Attempt, found: Rented, key: str | None, places: tuple[str, ...] = ()) -> None:
        if key is not None:
            write_private(self._journal.known_hosts, f"{attempt.tag} {key}\n".encode())
        self._journal.note(
            attempt.tag,
            step=Step.UP,
            host=found.host,
            port=found.port,
            host_key=key,
            places=places,
            up_us=self._clock.now_us(),
        )

    def _return(self, attempt: Attempt) -> None:
        machine = attempt.machine
        rental = self._journal.load()
        if rental.account != self._provider.account(rental.run_id) and not self._finds(attempt):
            raise UsageError(
                Code.PROVIDER_KEY,
                f"another account or address of {self._provider.name} is given here than it was rented with, and that "
                "one does not find it",
            )
        if attempt.step is Step.ASKED:
            machine = self._settle(attempt)
            if machine is None:
                return
        assert machine is not None  # noqa: S101 - it was made
        self._note(attempt, step=Step.RETURNING)
        self._say(f"giving {machine} back")
        seen = attempt.up_us is not None
        absent_us, bill = give_back_all(self._provider, machine, attempt.tag, self._clock, seen=seen), None
        with contextlib.suppress(Exception):  # a machine that is gone needs no bill
            bill = self._provider.bill(machine)
        self._journal.note(attempt.tag, step=Step.GONE, gone_us=absent_us, bill_usd=bill)

    def _finds(self, attempt: Attempt) -> bool:
        """Return whether the provider has a machine now, which only the account has that rented it."""
        by_id = attempt.machine is not None and self._provider.find(attempt.machine) is not None
        return by_id or any(one.tag == attempt.tag for one in self._provider.tagged(attempt.tag))


def cap_reached(cap: str) -> UsageError:
    """Return the error of a run whose cap was reached before it was placed."""
    return UsageError(
        Code.CAP_REACHED,
        f"the cap of {cap} was reached before a runtime was placed: no key was released",
        hint="raise most_usd or most_time in [machine]",
    )
