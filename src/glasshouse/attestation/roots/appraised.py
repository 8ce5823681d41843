"""What a root of trust is given to appraise, and what it finds: trustworthiness vectors and their tiers.

Source: draft-ietf-rats-ar4si, section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from glasshouse.attestation.roots.kinds import KINDS, MAX_BLOB_BYTES
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import sha256
from glasshouse.wire.record import Member, Record, Sha256, choice, integer

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

CHAINED_VECTOR: Mapping[str, int] = MappingProxyType({"configuration": 2, "executables": 2})
"""The vector of the runtime where hardware evidence leads to it: approved executables and configuration."""


class EarStatus(StrEnum):
    """The tiers, best first."""

    AFFIRMING = "affirming"
    WARNING = "warning"
    CONTRAINDICATED = "contraindicated"
    NONE = "none"


def status_of(vector: Mapping[str, int]) -> EarStatus:
    """Return the worst tier in a vector, which is not empty."""
    return worst_of(map(_tier, vector.values()))


def worst_of(statuses: Iterable[EarStatus]) -> EarStatus:
    """Return the worst of some tiers, of which there is one at least."""
    order = (EarStatus.CONTRAINDICATED, EarStatus.WARNING, EarStatus.NONE, EarStatus.AFFIRMING)
    return min(statuses, key=order.index)


def _tier(value: int) -> EarStatus:
    if -1 <= value <= 1:
        return EarStatus.NONE
    if -32 <= value <= 31:
        return EarStatus.AFFIRMING
    return EarStatus.WARNING if -96 <= value <= 95 else EarStatus.CONTRAINDICATED


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob(Record, name="evidence.hardware"):
    """A piece of hardware evidence, as the signed evidence names it; its bytes follow the envelope."""

    kind: Annotated[str, choice(KINDS)]  # a row of `levels.KINDS`
    size: Annotated[int, integer(1, MAX_BLOB_BYTES), Member("bytes")]
    sha256: Sha256

    @classmethod
    def of(cls, kind: str, data: bytes) -> Blob:
        """Name a blob."""
        return cls(kind=kind, size=len(data), sha256=sha256(data))


@dataclass(frozen=True, kw_only=True, slots=True)
class Appraised:
    """What the evidence of a root amounts to."""

    vector: Mapping[str, int]  # AR4SI trustworthiness claims
    not_after_us: int  # when the first of the certificates and dates that it rests on ends; exclusive
    claims: Mapping[str, Json] = field(default_factory=dict)  # small facts about the machine, for people

    @property
    def status(self) -> EarStatus:
        """Its tier, that of the vector."""
        return status_of(self.vector)
