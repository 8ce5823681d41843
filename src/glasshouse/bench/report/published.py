"""Figures that others published, kept as data beside this module, for comparison and nothing else."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib.resources import files

from glasshouse.bench.overhead.design import Arm

__all__ = ["Published", "published"]

_FIRST = {"raw-first": Arm.RAW, "protected-first": Arm.PROTECTED, None: None}


@dataclass(frozen=True, slots=True)
class Published:
    """One published pair of legs.

    Args:
        kind: the workload kind that it can be laid beside, `mlp` or `lora`.
        name, gpu, target: what ran, where, and until when.
        first: the leg that ran first; None where the source does not say.
        throughput_loss: 1 − X_p/X_r.
    """

    _: KW_ONLY
    kind: str
    name: str
    gpu: str
    target: str
    first: Arm | None
    throughput_loss: float

    @property
    def slowdown(self) -> float:
        """The same pair as δ = T_p/T_r − 1."""
        return self.throughput_loss / (1 - self.throughput_loss)

    @property
    def label(self) -> str:
        return f"{self.name}, {self.gpu}, {self.target}"


@cache
def published() -> tuple[Published, ...]:
    """Return all rows, in the order of the file."""
    text = files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    return tuple(
        Published(
            kind=row["kind"],
            name=row["name"],
            gpu=row["gpu"],
            target=row["target"],
            first=_FIRST[row["order"]],
            throughput_loss=float(row["overhead_pct"]) / 100,
        )
        for row in json.loads(text)["rows"]
    )
