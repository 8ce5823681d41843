"""Trustworthiness vectors and the tiers that follow from them (draft-ietf-rats-ar4si, section 2.3)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

ASPECTS = (
    "configuration",
    "executables",
    "file-system",
    "hardware",
    "instance-identity",
    "runtime-opaque",
    "sourced-data",
    "storage-opaque",
)

SOFTWARE_VECTOR: Mapping[str, int] = MappingProxyType({"configuration": 32, "executables": 32})
"""The vector of `software`: recognised executables and configuration, for which the verifier cannot vouch."""


class EarStatus(StrEnum):
    """The tiers, best first."""

    AFFIRMING = "affirming"
    WARNING = "warning"
    CONTRAINDICATED = "contraindicated"
    NONE = "none"


def status_of(vector: Mapping[str, int]) -> EarStatus:
    """Return the worst tier in a vector, which is not empty."""
    order = (EarStatus.CONTRAINDICATED, EarStatus.WARNING, EarStatus.NONE, EarStatus.AFFIRMING)
    tiers = {_tier(value) for value in vector.values()}
    return next(tier for tier in order if tier in tiers)


def _tier(value: int) -> EarStatus:
    if -1 <= value <= 1:
        return EarStatus.NONE
    if -32 <= value <= 31:
        return EarStatus.AFFIRMING
    return EarStatus.WARNING if -96 <= value <= 95 else EarStatus.CONTRAINDICATED
