"""How a job ends: with a result, by its owner, or by a script that ends its process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from glasshouse.errors import RunError
from glasshouse.wire.canonical import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The end of a workload, as the receipt has it."""

    unit: str  # of `done`: `step` or `epoch`
    done: int
    elapsed_us: int  # in the training loop
    stop_reason: str  # `steps`, `time`, `stopped` or `finished`
    loss_first: str | None = None  # decimal, where a loss was reported
    loss_final: str | None = None
    trainable: int | None = None  # number of trained parameters, where known
    digests: Mapping[str, str] = field(default_factory=dict)  # SHA-256 in hex, by a short name

    def to_json(self) -> dict[str, Json]:
        """Return the worker's last message to the agent."""
        loss: Json = None
        if self.loss_first is not None and self.loss_final is not None:
            loss = {"first": self.loss_first, "final": self.loss_final}
        work: Json = {name: getattr(self, name) for name in ("unit", "done", "elapsed_us", "stop_reason")}
        return {
            "type": "finished",
            "work": work,
            "loss": loss,
            "trainable": self.trainable,
            "digests": dict(self.digests),
        }


class JobControl:
    """What a workload registers for the owner's stop; each action is done once, however early the stop comes."""

    def __init__(self, conclude: Callable[[Result | RunError], int]) -> None:
        self.conclude = conclude  # reports the end of a script that ends its process itself; returns the exit status
        self._actions: list[Callable[[], None]] = []
        self._stopped = False

    def on_stop(self, action: Callable[[], None]) -> None:
        """Have an action done, in any thread, when the owner stops the job."""
        self._actions.append(action)
        if self._stopped:
            self._act()

    def stop(self) -> None:
        """Do every registered action, and those to come."""
        self._stopped = True
        self._act()

    def _act(self) -> None:
        # Called from another thread or a signal handler between two lines: the thread that takes an action does it.
        with contextlib.suppress(IndexError):
            while True:
                self._actions.pop()()
