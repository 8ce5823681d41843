"""A workload's end, and how its numbers travel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glasshouse.wire.canonical import Json


def decimal(value: Any) -> str | None:
    """Return a number (or a tensor of one element) as a decimal string, or None when it is not finite."""
    number = float(value)
    return f"{number:.6g}" if math.isfinite(number) else None


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
