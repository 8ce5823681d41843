"""Marks between the phases of a step, for whoever times them; nearly nothing while nobody does."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Stamps"]


class Stamps:
    """Says where a step has got to: `stamps("forward")` begins the phase `forward`, and ends the one before.

    A training loop asks first, so that a step that nobody times pays for one look at an attribute:

        if stamps.on:
            stamps("forward")

    The phases are `data`, `forward`, `backward`, `gradients` (their exchange between machines), `optimizer`,
    `checkpoint` and `residual`, which is what a step is in until it says otherwise.

    Attributes:
        on: whether this step is timed.
        mark: takes the name of the phase that begins; set by whoever times.
    """

    __slots__ = ("mark", "on")

    def __init__(self) -> None:
        self.on = False
        self.mark: Callable[[str], None] | None = None

    def __call__(self, phase: str) -> None:
        """Begin a phase.

        Raises:
            UsageError: `usage` for a name that is none of the phases, when the step is timed.
        """
        if self.on and self.mark is not None:
            self.mark(phase)
