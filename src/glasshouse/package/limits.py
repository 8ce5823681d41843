"""How much a job may return: sealed with it, and held to where outputs are sealed (spec/sealed-package.md 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields

__all__ = ["DEFAULT_BYTES", "MAX_BYTES", "MAX_COUNT", "OutputLimits"]

MAX_COUNT = 256
MAX_BYTES = 1 << 44
DEFAULT_BYTES = 64 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLimits:
    """The most that the outputs of a run may be.

    Attributes:
        count: how many.
        bytes: of the plaintext of all together.
    """

    count: int = MAX_COUNT
    bytes: int = DEFAULT_BYTES

    @classmethod
    def of(cls, job: Mapping[str, Json]) -> OutputLimits:
        """Return the limits that a job's parameters name, or the defaults; raises `FormatError`."""
        named = {name: job[name] for name in ("max_outputs", "max_output_bytes") if name in job}
        fields = Fields(named, "index.job")
        return cls(
            count=fields.integer("max_outputs", low=1, high=MAX_COUNT) if "max_outputs" in named else MAX_COUNT,
            bytes=fields.integer("max_output_bytes", low=1, high=MAX_BYTES)
            if "max_output_bytes" in named
            else DEFAULT_BYTES,
        )
