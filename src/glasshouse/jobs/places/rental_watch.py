"""Looks after a rented machine while a run is on it: ends the run before its caps, gives the machine back at them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from glasshouse.jobs.owner.durations import SystemClock
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.places.accounts import provider_of
from glasshouse.jobs.places.rental_journal import POLL_S, RESERVE_S, Journal, Rental, deadline_us
from glasshouse.providers.rental.provider import Provider, RentedState
from glasshouse.providers.rental.start_script import started_anew

_WATCH_S = 120.0


class RentalWatch(threading.Thread):
    """A thread that calls `stop` once shortly before a cap of the run, and at the cap gives the machine back.

    Attributes:
        gone: set when the provider stopped the machine, started it anew, or took it back at the cap.
        stopped_by: the cap that was reached; empty before.
    """

    def __init__(
        self, journal: Journal, provider: Provider, stop: Callable[[], None], clock: SystemClock | None = None
    ) -> None:
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
        cap_us = self._deadline_us + RESERVE_S * 1_000_000
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


@contextlib.contextmanager
def watched(
    home: Home, run_id: str, stop: Callable[[], None], *, clock: SystemClock | None = None
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


def provider_for(home: Home, rental: Rental) -> Provider:
    """Return the provider of a rental; raises as `provider_of`."""
    return provider_of(home, rental.provider, rental.cluster, python=rental.python)
