"""Looks after a rented machine while a run is on it: ends the run before its caps, gives the machine back at them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Protocol

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.places.rental_journal import Journal, Rental
from glasshouse.providers.rental.provider import Provider, RentedState
from glasshouse.providers.rental.start_script import started_anew

POLL_S = 15.0
"""Between two questions about a machine that is awaited, or shall be gone."""
HOUR_S = 3600

_WATCH_S = 120.0
# Between the order to stop and the cap: for sealing, wiping, fetching and giving back.
_RESERVE_S = 300


class Clock(Protocol):
    """The time, and waiting."""

    def now_us(self) -> int:
        """Return microseconds since 1970."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's clock at the start of this process, and the time since: sleep counts, setting the clock does not.

    A clock that is set meanwhile ends no run early and stretches no cap.
    """

    def now_us(self) -> int:
        return _BEGAN_US + _passed_us()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _passed_us() -> int:
    # Linux's counts while the machine sleeps; on macOS the other one does.
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1000


_BEGAN_US = time.time_ns() // 1000 - _passed_us()


def deadline_us(rental: Rental) -> tuple[int, str]:
    """Return when a run on a rented machine is asked to end, in time to give it back, and by which cap."""
    by_time_us = rental.created_us + (rental.caps.seconds - _RESERVE_S) * 1_000_000
    attempt = next(one for one in reversed(rental.attempts) if not one.step.over)
    price = attempt.offer.usd_per_hour
    if rental.caps.usd is None or not price:
        return by_time_us, "time"
    spent = sum((one.cost_usd(attempt.asked_us) for one in rental.attempts if one.tag != attempt.tag), Decimal(0))
    by_money_us = attempt.asked_us + (int((rental.caps.usd - spent) / price * HOUR_S) - _RESERVE_S) * 1_000_000
    return min((by_time_us, "time"), (by_money_us, "money"))


def cap_reached(cap: str) -> UsageError:
    """Return the error of a run whose cap was reached before it was placed."""
    return UsageError(
        Code.CAP_REACHED,
        f"the cap of {cap} was reached before a runtime was placed: no key was released",
        hint="raise most_usd or most_time in [machine]",
    )


class RentalWatch(threading.Thread):
    """A thread that asks the run to end shortly before its cap, and at the cap gives the machine back.

    Args:
        stop: called once shortly before a cap is reached.

    Attributes:
        gone: set when the provider stopped the machine, started it anew, or took it back at the cap.
        stopped_by: the cap that was reached; empty before.
    """

    def __init__(self, journal: Journal, provider: Provider, stop: Callable[[], None], clock: Clock | None = None):
        super().__init__(daemon=True, name="rental-watch")
        self._provider, self._ask_to_end, self._clock = provider, stop, clock or SystemClock()
        rental = journal.load()
        self._deadline_us, self._cap = deadline_us(rental)
        self._up = rental.up
        self._machine = rental.up.machine if rental.up is not None else None
        self._over = threading.Event()
        self.gone = threading.Event()
        self.stopped_by = ""

    def __enter__(self) -> RentalWatch:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        missed, next_us = 0, self._clock.now_us() + int(_WATCH_S * 1e6)
        cap_us = self._deadline_us + _RESERVE_S * 1_000_000
        while not self._over.wait(0.5):
            now_us = self._clock.now_us()
            if now_us > self._deadline_us and not self.stopped_by:
                self.stopped_by = self._cap
                with contextlib.suppress(Exception):  # it is given back at the cap all the same
                    self._ask_to_end()
            if self._machine is None or self.gone.is_set():
                continue
            if now_us > cap_us:
                with contextlib.suppress(Exception):  # tried again at the next look
                    self._provider.give_back(self._machine)
                    self.gone.set()
                cap_us = now_us + int(POLL_S * 1e6)
            elif now_us > next_us:
                missed = missed + 1 if self._lost(self._machine) else 0
                next_us = now_us + int((POLL_S if missed else _WATCH_S) * 1e6)
                if missed > 1:  # one listing may be wrong
                    self.gone.set()

    def _lost(self, machine: str) -> bool:
        try:
            found = self._provider.find(machine)
            if found is None or found.state is RentedState.STOPPED:
                return True
            # A machine that boots in a loop is listed as running, and has another host key after each start.
            key, nonce = (None, "") if self._up is None else (self._up.host_key, self._up.nonce)
            return key is not None and started_anew(self._provider.output(machine), nonce, key)
        except Exception:
            return False  # a provider that is away does not end a run
