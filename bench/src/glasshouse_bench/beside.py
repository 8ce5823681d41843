"""What lies beside the parts of a measurement: calibration, work parity, phases (spec/measurement.md, section 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse_bench.artifact import Lifecycle
from glasshouse_bench.documents import COUNT, DIGEST, FLAG, NAME, Document, integer, listed, nullable, record

__all__ = ["BESIDE", "Calibration", "Parity", "Phase", "Phases"]

_STEPS = listed(integer(1), most=65_536)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Document):
    """What was found before the designs were sealed; kept, and never pooled with what was measured.

    Args:
        raw_ns, protected_ns: steps without slots, warm-up left out; the first 65,536 of each.
        start_us: of the slower arm, from sealing or launch to its first step.
        between_ppm: the deviation of a session's contrast that no length takes away, as it was taken.
        device: whether the steps ran on a GPU.
        lifecycle: of the protected run.
        deployment: of the protected run; None where there was none.
    """

    version: Annotated[int, integer(1, 1)] = 1
    raw_ns: Annotated[tuple[int, ...], _STEPS]
    protected_ns: Annotated[tuple[int, ...], _STEPS]
    start_us: Annotated[int, COUNT]
    between_ppm: Annotated[int, COUNT]
    device: Annotated[bool, FLAG]
    lifecycle: Annotated[Lifecycle | None, nullable(record(Lifecycle))] = None
    deployment: Annotated[str | None, nullable(NAME)] = None


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
    raw: Annotated[bytes, DIGEST]
    protected: Annotated[bytes, DIGEST]
    deployment: Annotated[str, NAME]

    @property
    def same(self) -> bool:
        return self.raw == self.protected


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(Document):
    """The mean time of one phase in a step of each arm, in nanoseconds."""

    name: Annotated[str, NAME]
    raw_ns: Annotated[int, COUNT]
    protected_ns: Annotated[int, COUNT]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases(Document):
    """What a profiler found in sessions of its own, which enter no estimate.

    Args:
        steps: profiled, of each arm.
        phases: in the order of a step.
        deployment: of the protected run.
    """

    version: Annotated[int, integer(1, 1)] = 1
    steps: Annotated[int, integer(1)]
    phases: Annotated[tuple[Phase, ...], listed(record(Phase), most=16)]
    deployment: Annotated[str, NAME]

    def _check(self) -> None:
        if not self.phases or len({one.name for one in self.phases}) < len(self.phases):
            raise FormatError(Code.SCHEMA, "phases without one, or one of them twice")


BESIDE: dict[str, type[Calibration | Parity | Phases]] = {
    "calibration": Calibration,
    "parity": Parity,
    "phases": Phases,
}
