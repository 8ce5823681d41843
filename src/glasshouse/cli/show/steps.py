"""A run's steps on the terminal: what is sealed, rented, prepared and given back, and the view of its lifecycle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from glasshouse.cli.show.offered import agreed, cost_words
from glasshouse.cli.show.output import Output
from glasshouse.cli.show.terminal import is_reader_gone
from glasshouse.cli.show.words import bytes_text, left_out_words
from glasshouse.jobs.supervise.run_job import Listener, Renting

if TYPE_CHECKING:
    from glasshouse.cli.show.live_view import View
    from glasshouse.errors import Code
    from glasshouse.evidence.events import Event
    from glasshouse.jobs.define.seal_job import Sealed
    from glasshouse.jobs.places.rental_journal import Rental
    from glasshouse.jobs.supervise.follow import Seen
    from glasshouse.jobs.supervise.prepare import Prepared
    from glasshouse.wire.group import Group

__all__ = ["Shown"]


class Shown(Listener):
    """Shows a run's steps on the terminal.

    Args:
        output: where.
        view: draws the lifecycle of a run that is followed; None with `--json`, and where none is.
        yes: whether renting is agreed to.
    """

    def __init__(self, output: Output, view: View | None = None, *, yes: bool = False) -> None:
        self._output, self._view, self._yes = output, view, yes
        self.left_out: tuple[str, ...] | None = None

    def agree(self, renting: Renting, package: Path) -> None:
        agreed(self._output, renting.provider.name, renting.offers, renting.machine, package, yes=self._yes)

    def warn(self, text: str) -> None:
        self._output.warn(text)

    def sealed(self, sealed: Sealed) -> None:
        self.left_out = sealed.left_out
        if self._view is not None:
            files = "1 file" if sealed.files == 1 else f"{sealed.files} files"
            packed = f"{sealed.name}: {files}, {bytes_text(sealed.package_bytes)} sealed"
            self._view.done("packed", packed, sealed.seconds)
            if (words := left_out_words(sealed.left_out)) is not None:
                self._view.done("left out", words, None)

    def step(self, text: str) -> None:
        self._output.say(f"  · {text}", style="dim")

    def prepared(self, prepared: Prepared, seconds: float, cost: Callable[[], str] | None) -> None:
        if self._view is None:
            return
        record = prepared.record
        machines = 1 if record.group is None else record.group.machines
        self._view.expect(assurance=record.assurance, profile=record.profile, machines=machines, cost=cost)
        done = f"run {record.run_id[:8]}; broker told of package and policy" + _in_ranks(record.group)
        self._view.done("prepared", done, seconds)

    def showing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._view is None else self._view

    def sending(self, sent: int, size: int) -> None:
        if self._view is not None:
            self._view.sending(sent, size)

    def returned(self, rental: Rental) -> None:
        self._output.say(f"  ✓ {rental.place} is gone, by id and in two listings; {cost_words(rental)}")

    def keeps_giving_back(self) -> None:
        with contextlib.suppress(OSError):  # not by the streams, which the handler may have come upon in a write
            os.write(2, b"The machine is being given back. Ctrl-C again leaves it, and it may go on to cost money.\n")

    def has_lost(self, error: OSError) -> bool:
        return is_reader_gone(error)

    def away(self, machine: int, problem: str) -> None:
        if self._view is not None:
            self._view.away(machine, problem)

    def event(self, event: Event, seen: Seen) -> None:
        if self._view is not None:
            self._view.event(event, seen)

    def tick(self, seen: Seen) -> None:
        if self._view is not None:
            self._view.tick(seen)

    def stopping(self, times: int) -> None:
        if self._view is not None:
            self._view.stopping(times)

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        if self._view is not None:
            self._view.machine(machine, code, completed=completed)


def _in_ranks(group: Group | None) -> str:
    if group is None:
        return ""
    each = f"{group.ranks} rank" + ("" if group.ranks == 1 else "s")
    return f"; {each}" if group.machines == 1 else f"; {each} on each of {group.machines} machines"
