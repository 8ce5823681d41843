"""What `verify` found of a measurement, in words for people and for machines; never without the assurance level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.durations import utc
from glasshouse.jobs.verify.verdict import Status, Verdict
from glasshouse.wire.canonical import Json
from glasshouse.wire.policy import Assurance
from glasshouse_bench.design import Design, Mode
from glasshouse_bench.statement import Measured, Measurement

__all__ = ["LACKS", "Backing", "Lack", "Link", "MeasurementVerdict", "found_of", "percent", "range_of"]

UNATTESTED = "unattested"
_LEVELS = (UNATTESTED, *(level.value for level in Assurance))


class Lack(StrEnum):
    """Why the word of a genuine measurement does not stand."""

    ATTEMPTS = "attempts"
    NULL = "null"
    NULL_DESIGN = "null-design"
    NULL_INTERVAL = "null-interval"
    NULL_ZERO = "null-zero"
    RECEIPTS = "receipts"
    ASSURANCE = "assurance"


LACKS = {
    Lack.ATTEMPTS: "it ended before all sessions of its design were attempted",
    Lack.NULL: "it lacks a null part",
    Lack.NULL_DESIGN: "its null part has slots, sessions or a workload of another kind",
    Lack.NULL_INTERVAL: "its null part has no interval",
    Lack.NULL_ZERO: "its null part does not hold 0",
    Lack.RECEIPTS: "the receipt of a protected run that was timed does not lie beside it",
    Lack.ASSURANCE: "a receipt shows a lower level than its design names",
}


class Link(NamedTuple):
    """One thing that was checked: what it says, and whether that speaks for the measurement."""

    name: str
    says: str
    holds: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Backing:
    """The receipts behind a part.

    Args:
        verdicts: of the receipts that lie there, all genuine, by session.
        needed: sessions whose protected run was timed and counts.
    """

    mode: Mode
    verdicts: Mapping[int, Verdict]
    needed: tuple[int, ...]

    @property
    def assurance(self) -> str | None:
        """The lowest level of the runs that count; None where none does."""
        levels = [
            self.verdicts[number].assurance
            if number in self.verdicts and self.verdicts[number].status is Status.GOOD
            else UNATTESTED
            for number in self.needed
        ]
        return min(levels, key=_LEVELS.index, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementVerdict:
    """A measurement that the owner signed, all of whose numbers follow from its records.

    Args:
        backings: the receipts of each part with protected runs.
        created_us: when it was signed, by the owner's clock.
    """

    measurement: Measurement
    backings: tuple[Backing, ...]
    created_us: int

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """What keeps its word from standing."""
        parts, null = self.measurement.parts, self.measurement.part(Mode.NULL)
        found = set()
        if any(one.analysis["attempts"]["made"] < one.part.design.sessions for one in parts):
            found.add(Lack.ATTEMPTS)
        if (main := self.measurement.part(Mode.INTERLEAVED)) is not None:
            found |= {Lack.NULL} if null is None else _lacks_of_null(main, null)
        for backing in self.backings:
            design = next(one.part.design for one in parts if one.mode is backing.mode)
            if backing.assurance == UNATTESTED:
                found.add(Lack.RECEIPTS)
            elif backing.assurance is not None and design.assurance is not None:
                below = _LEVELS.index(backing.assurance) < _LEVELS.index(design.assurance.value)
                found |= {Lack.ASSURANCE} if below else set()
        return tuple(one for one in Lack if one in found)

    @property
    def status(self) -> Status:
        return Status.INCOMPLETE if self.lacks else Status.GOOD

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.INCOMPLETE if self.lacks else ExitCode.DONE

    @property
    def assurance(self) -> str:
        """The lowest level that receipts show of its protected runs, or `none` where none was timed."""
        found = [one.assurance for one in self.backings if one.assurance is not None]
        return min(found, key=_LEVELS.index, default="none")

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the level and with whose word the times are."""
        level = f"assurance {self.assurance}; the times are the word of the owner, who controls both arms"
        said, signed = found_of(self.measurement), f"Signed {utc(self.created_us)} by the owner's clock."
        if self.lacks:
            why = "; ".join(LACKS[lack] for lack in self.lacks)
            return f"Incomplete ({level}): nothing contradicts it, but {why}; its own word: {said}. {signed}"
        return f"Signed by its owner, and every number follows from the records ({level}): {said}. {signed}"

    @property
    def links(self) -> tuple[Link, ...]:
        """What was checked, in order."""
        follows = all(one.part.design.calibration_sha256 is not None for one in self.measurement.parts)
        slots = "as they follow from the calibration"
        if not follows:
            slots = "chosen by the owner: a design names no calibration"
        found, lacks = [Link("statement", "signed by the owner"), Link("slots", slots, holds=follows)], self.lacks
        for one in self.measurement.parts:
            attempts = one.analysis["attempts"]
            complete = attempts["outcomes"].get("complete", 0)
            says = f"{complete} of {attempts['planned']} sessions count, {attempts['made']} attempted"
            found.append(Link(one.mode.value, says, holds=attempts["made"] == attempts["planned"]))
            if one.mode is Mode.NULL:
                found.append(_null(one))
        if self.backings:
            shown = sum(number in one.verdicts for one in self.backings for number in one.needed)
            says = f"{shown} of {sum(len(one.needed) for one in self.backings)}, lowest level {self.assurance}"
            found.append(Link("receipts", says, holds=not {Lack.RECEIPTS, Lack.ASSURANCE} & {*lacks}))
        parity = self.measurement.parity
        if parity is not None:
            same = "the same weights" if parity.same else "different weights"
            found.append(Link("work parity", f"{same} after {parity.steps} steps of each arm", holds=parity.same))
        phases = self.measurement.phases
        if phases is not None:
            deterministic = self.measurement.main.part.design.workload.deterministic
            says = f"{phases.steps} profiled steps of each arm, {'the same' if phases.same else 'other'} losses"
            found.append(Link("phases", says, holds=phases.same or not deterministic))
        return tuple(found)

    def to_json(self) -> dict[str, Json]:
        """Return the verdict for `verify --json`."""
        measurement = self.measurement
        return {
            "assurance": self.assurance,
            "created_us": self.created_us,
            "deployments": list(measurement.deployments),
            "kind": "measurement",
            "lacks": [lack.value for lack in self.lacks],
            "links": [{"holds": link.holds, "link": link.name, "says": link.says} for link in self.links],
            "parts": [
                {"design": one.part.design.to_json(), "design_sha256": one.part.design.sha256.hex(), **one.analysis}
                for one in measurement.parts
            ],
            "status": self.status.value,
            "verdict": self.sentence,
        }


def found_of(measurement: Measurement) -> str:
    """Return what a measurement found, in the words that its claim allows."""
    one = measurement.main
    result, claim = one.analysis["result"], one.analysis["claim"]
    if result is None:
        return "no session counts, and nothing is claimed"
    arms = "raw against raw, " if one.mode is Mode.NULL else ""
    planted = ", with a cost planted on purpose" if one.part.design.planted is not None else ""
    number = f"{percent(result['slowdown'])} {range_of(one)}"
    return f"{arms}{_word(claim, result)}{number}{planted}"


def range_of(one: Measured) -> str:
    """Return the interval of a part in words."""
    ends = _ends(one)
    if ends is None:
        return "(n=1, no interval)" if one.analysis["result"] is not None else "no session counts"
    return f"(95 % interval {percent(ends[0])} to {percent(ends[1])})"


def percent(value: str | float, digits: int = 2) -> str:
    return f"{float(value) * 100:+.{digits}f} %"


def _word(claim: Any, result: Any) -> str:
    """Return the word with what a reader is owed beside it: the margin, or the smallest effect that could be seen."""
    if claim is None:
        return ""
    if claim["word"] == "equivalent":
        return f"equivalent within ±{float(claim['margin']) * 100:.3g} %, "
    if claim["word"] == "inconclusive" and result["minimum_detectable"] is not None:
        return f"inconclusive (it could have seen {float(result['minimum_detectable']) * 100:.2g} %), "
    return f"{claim['word'].replace('_', ' ')}, "


def _lacks_of_null(main: Measured, null: Measured) -> set[Lack]:
    found = set()
    if _form(main.part.design) != _form(null.part.design):
        found.add(Lack.NULL_DESIGN)
    if _ends(null) is None:
        found.add(Lack.NULL_INTERVAL)
    elif not _holds(null, 0.0):
        found.add(Lack.NULL_ZERO)
    return found


def _null(one: Measured) -> Link:
    """Return whether raw against raw finds what is there: nothing, or the cost that was planted."""
    planted = one.part.design.planted
    if planted is None:
        return Link("null holds 0", range_of(one), holds=_holds(one, 0.0))
    cost = planted.step_ppm / 1e6 + planted.bunched_ns / 1e9
    return Link("null holds what was planted", f"{percent(cost)} {range_of(one)}", holds=_holds(one, cost))


def _ends(one: Measured) -> tuple[float, float] | None:
    """Return the ends of a part's interval; None where there is none."""
    result = one.analysis["result"]
    ends = None if result is None else result["slowdown_95"]
    return None if ends is None else (float(ends["low"]), float(ends["high"]))


def _holds(one: Measured, slowdown: float) -> bool:
    ends = _ends(one)
    return ends is not None and ends[0] <= slowdown <= ends[1]


def _form(design: Design) -> tuple[object, ...]:
    """What two parts have to have in common; seeds, numbers of sessions and margins may differ."""
    slots = (design.slot_ns, design.steps, design.uncounted, design.warmup_steps, design.length_ns)
    return (*slots, design.workload.kind, design.workload.threads, design.workload.cpus, design.machine.cpu)
