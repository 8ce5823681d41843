"""How much a job may return: sealed with it, and held to where outputs are sealed (spec/sealed-package.md 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from glasshouse.wire.canonical import Json
from glasshouse.wire.record import LEFT_OUT, Member, Record, integer

MAX_COUNT = 256
MAX_BYTES = 1 << 44
DEFAULT_BYTES = 64 << 30


LEAST_INTERVAL_S = 10

_NAMES = ("max_outputs", "max_output_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLimits(Record, name="index.job"):
    """The most that the outputs of a run may be."""

    count: Annotated[int, integer(1, MAX_COUNT), Member("max_outputs"), LEFT_OUT] = MAX_COUNT
    # Of the plaintext of all together.
    bytes: Annotated[int, integer(1, MAX_BYTES), Member("max_output_bytes"), LEFT_OUT] = DEFAULT_BYTES

    @classmethod
    def of(cls, job: Mapping[str, Json]) -> OutputLimits:
        """Return the limits that a job's parameters name, or the defaults; raises `FormatError`."""
        return cls.from_json({name: job[name] for name in _NAMES if name in job})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLimits(Record, name="index.job.checkpoints"):
    """How often and how large the checkpoints of a line may be: they are a way out of the sandbox."""

    every_s: Annotated[int, integer(LEAST_INTERVAL_S, 30 * 86400)]  # the least time between two
    most: Annotated[int, integer(1, 100_000)]  # of a leg
    bytes: Annotated[int, integer(4096, MAX_BYTES)]  # of the plaintext of one part

    @classmethod
    def of(cls, job: Mapping[str, Json]) -> CheckpointLimits | None:
        """Return the limits that a job's parameters have; None for a job without a line. Raises `FormatError`."""
        found = job.get("checkpoints")
        return None if found is None else cls.from_json(found)
