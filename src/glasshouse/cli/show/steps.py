"""A run's steps as lines: what is rented and given back, and what should not be overlooked."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from glasshouse.cli.show.offered import agreed, cost_words
from glasshouse.cli.show.output import CommandOutput
from glasshouse.jobs.define.seal_job import Sealed
from glasshouse.jobs.places.rental_journal import Rental
from glasshouse.jobs.supervise.rented_run import Listener, Renting


class StepPrinter(Listener):
    """Prints the steps of a run whose lifecycle is not shown.

    Args:
        yes: whether renting is agreed to.
    """

    def __init__(self, output: CommandOutput, *, yes: bool = False) -> None:
        self._output, self._yes = output, yes
        self.left_out: tuple[str, ...] | None = None  # of the inputs' folders; None where nothing was sealed here

    def agree(self, renting: Renting, package: Path) -> None:
        agreed(self._output, renting.provider.name, renting.offers, renting.machine, package, yes=self._yes)

    def warn(self, text: str) -> None:
        self._output.warn(text)

    def sealed(self, sealed: Sealed) -> None:
        self.left_out = sealed.left_out

    def step(self, text: str) -> None:
        self._output.say(f"  · {text}", style="dim")

    def returned(self, rental: Rental) -> None:
        self._output.say(f"  ✓ {rental.place} is gone, by id and in two listings; {cost_words(rental)}")

    def keeps_giving_back(self) -> None:
        with contextlib.suppress(OSError):  # not by the streams, which the handler may have come upon in a write
            os.write(2, b"The machine is being given back. Ctrl-C again leaves it, and it may go on to cost money.\n")

    def has_lost(self, error: OSError) -> bool:
        return isinstance(error, BrokenPipeError) or error.errno == errno.EIO  # a closed pipe, a closed terminal
