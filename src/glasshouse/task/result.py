"""A workload's end, and how its numbers travel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glasshouse.wire.canonical import Json

__all__ = ["Result", "decimal"]


def decimal(value: Any) -> str | None:
    """Return a number (or a tensor of one element) as a decimal string, or None when it is not finite."""
    number = float(value)
    return f"{number:.6g}" if math.isfinite(number) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The end of a workload, as the receipt has it.

    Attributes:
        unit: what `done` counts, `step` or `epoch`.
        elapsed_us: time in the training loop, in microseconds.
        stop_reason: `steps`, `time`, `stopped` or `finished`.
        loss_first, loss_final: decimal strings, where a loss was reported.
        trainable: number of trained parameters, where known.
        digests: SHA-256 in hex, by a short name.
    """

    unit: str
    done: int
    elapsed_us: int
    stop_reason: str
    loss_first: str | None = None
    loss_final: str | None = None
    trainable: int | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

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
