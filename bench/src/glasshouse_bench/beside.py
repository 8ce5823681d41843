"""What lies beside the parts of a measurement: calibration, work parity, phases (spec/measurement.md, section 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.workloads.measurement.measured_steps import PHASES
from glasshouse_bench.calibration import Calibration
from glasshouse_bench.documents import COUNT, NAME, Document, Kind, integer, listed
from glasshouse_bench.records import MAX_PROFILED, loss, too_long

__all__ = ["BESIDE", "Calibration", "Parity", "Phase", "Phases"]

MAX_BESIDE_BYTES = 4 << 20
_PHASE = Kind(lambda found, name: found.choice(name, PHASES))
_LOSSES = listed(Kind(lambda found, name: loss(found.any(name))), most=MAX_PROFILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity(Document):
    """A raw and a protected run with the same target: whether both made the same weights.

    Args:
        steps: of each.
        raw, protected: HMAC-SHA-256 of the weights' SHA-256, under a key that is drawn for this and kept nowhere.
        deployment: of the protected run.
    """

    version: Annotated[int, integer(1, 1)] = 1
    steps: Annotated[int, integer(1)]
    raw: bytes
    protected: bytes
    deployment: Annotated[str, NAME]

    @property
    def same(self) -> bool:
        return self.raw == self.protected


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(Document):
    """What all profiled steps of each arm together spent in one phase, in nanoseconds."""

    name: Annotated[str, _PHASE]
    raw_ns: Annotated[int, COUNT]
    protected_ns: Annotated[int, COUNT]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases(Document):
    """What a profiler found in a session of its own, which enters no estimate.

    Args:
        steps: profiled, of each arm.
        raw_ns, protected_ns: the length of all of them together, by their records.
        raw_losses, protected_losses: of these steps.
        phases: in the order of a step; what is left of its length lies in none.
        deployment: of the protected run.
    """

    version: Annotated[int, integer(1, 1)] = 1
    steps: Annotated[int, integer(1, MAX_PROFILED)]
    raw_ns: Annotated[int, integer(1)]
    protected_ns: Annotated[int, integer(1)]
    raw_losses: Annotated[tuple[str | None, ...], _LOSSES]
    protected_losses: Annotated[tuple[str | None, ...], _LOSSES]
    phases: Annotated[tuple[Phase, ...], listed(Phase, most=len(PHASES))]
    deployment: Annotated[str, NAME]

    def _check(self) -> None:
        names = [one.name for one in self.phases]
        if not names or names != [name for name in PHASES if name in names]:
            raise FormatError(Code.SCHEMA, "no phase, or phases in another order than that of a step")
        if {len(self.raw_losses), len(self.protected_losses)} != {self.steps}:
            raise FormatError(Code.SCHEMA, "phases of another number of losses than of steps")
        for arm in ("raw", "protected"):
            if too_long(sum(getattr(one, f"{arm}_ns") for one in self.phases), getattr(self, f"{arm}_ns")):
                raise FormatError(Code.ARTIFACT_INVALID, f"the phases of the {arm} arm are longer than its steps")

    @property
    def same(self) -> bool:
        """Whether both arms did the same work, as far as their losses show it."""
        return self.raw_losses == self.protected_losses


BESIDE: dict[str, type[Calibration | Parity | Phases]] = {
    "calibration": Calibration,
    "parity": Parity,
    "phases": Phases,
}
