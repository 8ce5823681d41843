"""A run's steps for the functions of a program that uses the Python API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.evidence.events import Event
from glasshouse.jobs.define.package_records import Sealed
from glasshouse.jobs.places.rental_journal import Rental
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.supervise.launching import Prepared
from glasshouse.jobs.supervise.run_request import Listener, Renting


class Callbacks(Listener):
    """Calls a program's own functions: `event` with each event, `say` with each step; `yes` agrees to renting."""

    def __init__(
        self, event: Callable[[Event], None] | None, say: Callable[[str], None] | None, *, yes: bool = False
    ) -> None:
        self._event, self._say, self._yes = event, say or (lambda _text: None), yes

    def agree(self, renting: Renting, package: Path) -> None:
        if not self._yes:
            raise UsageError(Code.USAGE, "nothing is rented without a yes", hint="yes=True agrees to it")

    def event(self, event: Event, seen: Seen) -> None:
        if self._event is not None:
            self._event(event)

    def away(self, machine: int, problem: str) -> None:
        self._say(f"machine {machine} {'cannot be followed: ' + problem if problem else 'can be followed again'}")

    def step(self, text: str) -> None:
        self._say(text)

    warn = leg = step

    def sealed(self, sealed: Sealed) -> None:
        self._say(f"sealed {sealed.name}: {sealed.files} file(s), {sealed.package_bytes} bytes")

    def prepared(self, prepared: Prepared, seconds: float, cost: Callable[[], str] | None) -> None:
        self._say(f"run {prepared.record.run_id} is prepared")

    def returned(self, rental: Rental) -> None:
        self._say(f"{rental.place} is given back, and shown to be gone")
