"""What `doctor` finds of a machine: one thing each, what it means for a protected run, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from glasshouse.wire.canonical import Json

__all__ = ["Finding", "Standing", "finding"]


class Standing(StrEnum):
    """What a finding means for a protected run."""

    GOOD = "good"
    WEAKER = "weaker"
    MISSING = "missing"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing about this machine.

    Attributes:
        feature: what was looked at; a fixed word.
        standing: what it means.
        value: what was found.
        consequence: one sentence for a person.
    """

    feature: str
    standing: Standing
    value: str
    consequence: str

    def to_json(self) -> dict[str, Json]:
        return {
            "consequence": self.consequence,
            "feature": self.feature,
            "standing": self.standing.value,
            "value": self.value,
        }


def finding(feature: str, standing: Standing, value: str, consequence: str) -> Finding:
    """Return a finding; as `Finding`."""
    return Finding(feature=feature, standing=standing, value=value, consequence=consequence)
