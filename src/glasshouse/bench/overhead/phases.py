"""Where a step's time goes: `phases.jsonl`, and what follows from it (spec/overhead-artifact.md section 10).

Phase slices run in blocks of their own, some with stamps and some without, so that what the stamps themselves cost is
measured and no headline slice carries one. Laws: ``parse(s.encode()) == s``; ``analyse_phases(slices)`` depends on
nothing else. The phases are those of Lee et al., arXiv:2501.11771; their names are the workload's.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from glasshouse.bench.overhead.design import SLICES_PER_BLOCK, Arm
from glasshouse.bench.overhead.interval import Interval, decimal, mean_of
from glasshouse.bench.overhead.slices import whole_lines
from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields

__all__ = [
    "WAITING_SHARE",
    "ArmPhases",
    "Bound",
    "PhaseSlice",
    "Phases",
    "analyse_phases",
    "parse",
    "read_phase_slices",
]

MAX_LINE_BYTES = 4096
MAX_PHASES = 16
# A host that waits for its device for less than this is what keeps the device waiting.
WAITING_SHARE = 0.1
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class PhaseSlice:
    """One slice of a phase measurement. None means that this machine could not look.

    Args:
        arm, block, position: where it ran.
        stamped: whether the phases were stamped.
        steps: between t0 and t1.
        t0_ns, t1_ns: after the synchronisations, since one origin for all slices.
        phases: nanoseconds of each phase, summed over the slice; None exactly if not stamped, empty for a job that
            stamps nothing.
        cpu_ns: CPU time of the arm's worker between t0 and t1.
        rss_bytes, device_bytes: the most memory that it held, on the host and on the device; without a device None.
        energy_mj: what the device used between t0 and t1.
        wait_ppm: how much of a step's time, in millionths, passes on the device after the host has told it everything;
            probed before slices with stamps.

    Raises:
        FormatError: `schema-invalid`, values that contradict each other.
    """

    _: KW_ONLY
    arm: Arm
    block: int
    position: int
    stamped: bool
    steps: int
    t0_ns: int
    t1_ns: int
    phases: Mapping[str, int] | None
    cpu_ns: int | None = None
    rss_bytes: int | None = None
    device_bytes: int | None = None
    energy_mj: int | None = None
    wait_ppm: int | None = None

    def __post_init__(self) -> None:
        if self.stamped != (self.phases is not None):
            raise FormatError(Code.SCHEMA, "a phase slice with stamps and no phases, or the reverse")
        if self.t1_ns <= self.t0_ns:
            raise FormatError(Code.SCHEMA, "a phase slice that took no time")
        if self.phases is not None and len(self.phases) > MAX_PHASES:
            raise FormatError(Code.SCHEMA, f"a phase slice with {len(self.phases)} phases")

    @property
    def duration_ns(self) -> int:
        return self.t1_ns - self.t0_ns

    def to_json(self) -> dict[str, Json]:
        """Return the closed object of spec/overhead-artifact.md section 10."""
        return {
            "arm": self.arm.value,
            "block": self.block,
            "cpu_ns": self.cpu_ns,
            "device_bytes": self.device_bytes,
            "energy_mj": self.energy_mj,
            "kind": "phase-slice",
            "phases": None if self.phases is None else dict(self.phases),
            "position": self.position,
            "rss_bytes": self.rss_bytes,
            "stamped": self.stamped,
            "steps": self.steps,
            "t0_ns": self.t0_ns,
            "t1_ns": self.t1_ns,
            "wait_ppm": self.wait_ppm,
        }

    def encode(self) -> bytes:
        return encode(self.to_json())


class Bound(StrEnum):
    """What limits the speed."""

    HOST = "host"
    GPU = "gpu"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ArmPhases:
    """One arm's step, taken apart. Times are medians over slices, in nanoseconds per step.

    Args:
        phases_ns: of each phase, from stamped slices.
        residual_ns: what no stamp covers, from the same slices.
        stamped_step_ns: a whole step with stamps.
        step_ns: a whole step without; None where no slice ran without.
        cpu_share: CPU time over wall time, 1 for one busy core.
        rss_bytes, device_bytes: the most over all slices.
        energy_mj: per step, in millijoules.
        perturbation: what the stamps do: the mean over blocks of ln(stamped step / unstamped step).
        perturbation_interval: its 95 % Student interval over blocks; None with fewer than two.
        blocks: how many have both kinds of slices.
    """

    _: KW_ONLY
    phases_ns: Mapping[str, float]
    residual_ns: float
    stamped_step_ns: float
    step_ns: float | None
    cpu_share: float | None
    rss_bytes: int | None
    device_bytes: int | None
    energy_mj: float | None
    perturbation: float | None
    perturbation_interval: Interval | None
    blocks: int

    @property
    def steps_per_s(self) -> float:
        """Throughput without stamps, or with them where there is no other."""
        return 1e9 / (self.stamped_step_ns if self.step_ns is None else self.step_ns)

    def to_json(self) -> dict[str, Json]:
        return {
            "blocks": self.blocks,
            "cpu_share": _decimal(self.cpu_share),
            "device_bytes": self.device_bytes,
            "energy_mj": _decimal(self.energy_mj),
            "perturbation": _decimal(self.perturbation),
            "perturbation_95": None if self.perturbation_interval is None else self.perturbation_interval.to_json(),
            "phases_ns": {name: decimal(self.phases_ns[name]) for name in sorted(self.phases_ns)},
            "residual_ns": decimal(self.residual_ns),
            "rss_bytes": self.rss_bytes,
            "stamped_step_ns": decimal(self.stamped_step_ns),
            "step_ns": _decimal(self.step_ns),
            "steps_per_s": decimal(self.steps_per_s),
        }


@dataclass(frozen=True, slots=True)
class Phases:
    """Everything that follows from the phase slices.

    Args:
        arms: by arm; one of which nothing was stamped is not there.
        bound: whether host or device limits the speed.
        reason: why that is said: `no-device`, `host-waits`, `device-waits` or `not-observed`.
        waiting: the median share of a raw step in which the host has only to wait for its device; None without one.
        slices: the records behind it.
    """

    _: KW_ONLY
    arms: Mapping[Arm, ArmPhases]
    bound: Bound
    reason: str
    waiting: float | None
    slices: tuple[PhaseSlice, ...]

    def to_json(self) -> dict[str, Json]:
        """Return `phases.json`."""
        return {
            "arms": {arm.value: found.to_json() for arm, found in self.arms.items()},
            "bound": {"reason": self.reason, "waiting": _decimal(self.waiting), "word": self.bound.value},
        }


def parse(line: bytes) -> PhaseSlice:
    """Return the record of one line, without its newline.

    Raises:
        FormatError: `too-large`, `not-canonical` or `schema-invalid`.
    """
    fields = Fields(decode(line, max_bytes=MAX_LINE_BYTES), "phase slice")
    fields.choice("kind", ["phase-slice"])
    found = PhaseSlice(
        arm=Arm(fields.choice("arm", [arm.value for arm in Arm])),
        block=fields.integer("block"),
        position=fields.integer("position", high=SLICES_PER_BLOCK - 1),
        stamped=fields.flag("stamped"),
        steps=fields.integer("steps", low=1),
        t0_ns=fields.integer("t0_ns"),
        t1_ns=fields.integer("t1_ns"),
        phases=None if fields.null("phases") else _phases(fields.any("phases")),
        cpu_ns=_count(fields, "cpu_ns"),
        rss_bytes=_count(fields, "rss_bytes"),
        device_bytes=_count(fields, "device_bytes"),
        energy_mj=_count(fields, "energy_mj"),
        wait_ppm=None if fields.null("wait_ppm") else fields.integer("wait_ppm", high=1_000_000),
    )
    fields.end()
    return found


def read_phase_slices(lines: Iterable[bytes]) -> Iterator[PhaseSlice]:
    """Yield the records of whole lines; raises `FormatError` as `whole_lines` and `parse` do."""
    return map(parse, whole_lines(lines, "phases"))


def analyse_phases(slices: Sequence[PhaseSlice]) -> Phases:
    """Compute every number of `phases.json`.

    Raises:
        VerificationError: `artifact-invalid`, slices out of order or at the same time, or none with stamps.
    """
    _check_order(slices)
    arms = {arm: _arm([one for one in slices if one.arm is arm]) for arm in Arm if _stamped(slices, arm)}
    if not arms:
        raise VerificationError(Code.ARTIFACT_INVALID, "phase slices of which none is stamped")
    bound, reason, waiting = _bound(slices)
    return Phases(arms=arms, bound=bound, reason=reason, waiting=waiting, slices=tuple(slices))


def _check_order(slices: Sequence[PhaseSlice]) -> None:
    place, end = (-1, 0), 0
    for one in slices:
        if (one.block, one.position) <= place or one.t0_ns < end:
            raise VerificationError(
                Code.ARTIFACT_INVALID, f"the phase slice at block {one.block}, position {one.position} is out of place"
            )
        place, end = (one.block, one.position), one.t1_ns


def _stamped(slices: Sequence[PhaseSlice], arm: Arm) -> bool:
    return any(one.arm is arm and one.stamped for one in slices)


def _arm(slices: Sequence[PhaseSlice]) -> ArmPhases:
    stamped = [one for one in slices if one.stamped]
    plain = [one for one in slices if not one.stamped]
    names = sorted({name for one in stamped for name in one.phases or {}})
    contrasts = _contrasts(slices)
    energies = [one.energy_mj / one.steps for one in slices if one.energy_mj is not None]
    # What the stamps cost is in a stamped slice's CPU time.
    shares = [one.cpu_ns / one.duration_ns for one in plain or stamped if one.cpu_ns is not None]
    return ArmPhases(
        phases_ns={name: _median((one.phases or {}).get(name, 0) / one.steps for one in stamped) for name in names},
        residual_ns=_median((one.duration_ns - sum((one.phases or {}).values())) / one.steps for one in stamped),
        stamped_step_ns=_median(one.duration_ns / one.steps for one in stamped),
        step_ns=_median(one.duration_ns / one.steps for one in plain) if plain else None,
        cpu_share=_median(shares) if shares else None,
        rss_bytes=max((one.rss_bytes for one in slices if one.rss_bytes is not None), default=None),
        device_bytes=max((one.device_bytes for one in slices if one.device_bytes is not None), default=None),
        energy_mj=_median(energies) if energies else None,
        perturbation=math.fsum(contrasts) / len(contrasts) if contrasts else None,
        perturbation_interval=mean_of(contrasts).interval(0.95) if len(contrasts) > 1 else None,
        blocks=len(contrasts),
    )


def _contrasts(slices: Sequence[PhaseSlice]) -> list[float]:
    """Return ln(stamped step / unstamped step) of every block that has both, each a mean of logarithms."""
    found = []
    for block in sorted({one.block for one in slices}):
        logs = {
            stamped: [
                math.log(one.duration_ns / one.steps) for one in slices if one.block == block and one.stamped is stamped
            ]
            for stamped in (True, False)
        }
        if logs[True] and logs[False]:
            found.append(statistics.fmean(logs[True]) - statistics.fmean(logs[False]))
    return found


def _bound(slices: Sequence[PhaseSlice]) -> tuple[Bound, str, float | None]:
    """Say whether the host waits for the device or the device for the host, without protection."""
    if all(one.device_bytes is None for one in slices):
        return Bound.HOST, "no-device", None
    looked = [one for one in slices if one.arm is Arm.RAW and one.stamped]
    waits = [one.wait_ppm / 1_000_000 for one in looked if one.wait_ppm is not None]
    if not waits or len(waits) < len(looked):
        return Bound.UNKNOWN, "not-observed", None
    waiting = _median(waits)
    if waiting >= WAITING_SHARE:
        return Bound.GPU, "host-waits", waiting
    return Bound.HOST, "device-waits", waiting


def _phases(value: Json) -> dict[str, int]:
    if not isinstance(value, Mapping) or len(value) > MAX_PHASES or not all(map(_NAME.fullmatch, value)):
        raise FormatError(Code.SCHEMA, "phases that are no object of a few named times")
    fields = Fields(dict(value), "phases")
    return {name: fields.integer(name) for name in value}


def _count(fields: Fields, name: str) -> int | None:
    return None if fields.null(name) else fields.integer(name)


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _decimal(value: float | None) -> str | None:
    return None if value is None else decimal(value)
