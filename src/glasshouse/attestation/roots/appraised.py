"""What a root of trust is given to appraise, and what it finds: trustworthiness vectors and their tiers.

Source: draft-ietf-rats-ar4si, section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from glasshouse.wire.canonical import Json
from glasshouse.wire.record import Identifier, Record, octets

MAX_HARDWARE_BYTES = 64 * 1024
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
    return min(map(_tier, vector.values()), key=order.index)


def _tier(value: int) -> EarStatus:
    if -1 <= value <= 1:
        return EarStatus.NONE
    if -32 <= value <= 31:
        return EarStatus.AFFIRMING
    return EarStatus.WARNING if -96 <= value <= 95 else EarStatus.CONTRAINDICATED


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob(Record, name="evidence.hardware"):
    """Evidence of one hardware root, as its maker wrote it."""

    kind: Identifier  # names the root's module, e.g. ``tpm``
    data: Annotated[bytes, octets(max_length=MAX_HARDWARE_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Appraised:
    """What the evidence of a root amounts to."""

    status: EarStatus  # its tier, that of the vector
    vector: Mapping[str, int]  # AR4SI trustworthiness claims
    claims: Mapping[str, Json] = field(default_factory=dict)  # what the root states about the machine
