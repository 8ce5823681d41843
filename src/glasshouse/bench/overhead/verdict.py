"""What `verify` found of a measurement, in words for people and for machines; never without the assurance level."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import NamedTuple

from glasshouse.bench.overhead.artifact import Measurement, Part
from glasshouse.bench.overhead.design import Design, Mode
from glasshouse.bench.overhead.estimate import Claim, Estimate, Word
from glasshouse.bench.overhead.interval import Interval
from glasshouse.bench.overhead.parity import Same
from glasshouse.bench.overhead.receipts import Backing
from glasshouse.errors import ExitCode
from glasshouse.jobs.durations import utc
from glasshouse.jobs.verdict import Status
from glasshouse.wire.canonical import Json

__all__ = ["Lack", "Link", "MeasurementVerdict"]


class Lack(StrEnum):
    """Why a genuine measurement is not a good one."""

    NULL = "null"
    NULL_DESIGN = "null-design"
    NULL_INTERVAL = "null-interval"
    NULL_ZERO = "null-zero"
    RECEIPTS = "receipts"
    RUNS = "runs"


_LACKS = {
    Lack.NULL: "it lacks a null run, without which its word does not stand",
    Lack.NULL_DESIGN: "its null run has slices, guards or a warm-up of another length, and its word does not stand",
    Lack.NULL_INTERVAL: "its null run has too few blocks for an interval, and its word does not stand",
    Lack.NULL_ZERO: "its null run does not hold 0, and its word does not stand",
    Lack.RECEIPTS: "it lacks the receipt of a protected run that was timed",
    Lack.RUNS: "no protected run that was timed completed, and no receipt says how many steps one took",
}


class Link(NamedTuple):
    """One thing that was checked: what it says, and whether that speaks for the measurement."""

    name: str
    says: str
    holds: bool = True


@dataclass(frozen=True, slots=True)
class MeasurementVerdict:
    """A measurement that the owner signed, all of whose numbers follow from its slices and receipts.

    Args:
        measurement: with the numbers as they were computed here.
        backings: the receipts of each part, in order.
    """

    _: KW_ONLY
    measurement: Measurement
    backings: tuple[Backing, ...]

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """What keeps it from being good."""
        found = []
        measured = self.measurement.part(Mode.INTERLEAVED)
        if measured is not None:
            null = self.measurement.part(Mode.NULL)
            if null is not None and not _alike(measured.design, null.design):
                found.append(Lack.NULL_DESIGN)
            interval = None if null is None or null.analysis.result is None else null.analysis.result.interval()
            if null is None:
                found.append(Lack.NULL)
            elif interval is None:
                found.append(Lack.NULL_INTERVAL)
            elif not interval.holds(0.0):
                found.append(Lack.NULL_ZERO)
        if any(backing.unbacked for backing in self.backings):
            found.append(Lack.RECEIPTS)
        if any(backing.timed and backing.timed == backing.broken_off for backing in self.backings):
            found.append(Lack.RUNS)
        return tuple(found)

    @property
    def status(self) -> Status:
        return Status.INCOMPLETE if self.lacks else Status.GOOD

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.INCOMPLETE if self.lacks else ExitCode.DONE

    @property
    def assurance(self) -> str:
        """The lowest level of its protected runs, or `none` where none was timed."""
        return self.measurement.assurance or "none"

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the level and with whose word the times are."""
        level = f"assurance {self.assurance}; the times are the owner's word"
        if self.lacks:
            why = "; ".join(_LACKS[lack] for lack in self.lacks)
            said = f"Incomplete ({level}): nothing contradicts it, but {why}; its own word: {self._found}."
        else:
            said = f"Signed by its owner, and every number follows from the slices ({level}): {self._found}."
        return f"{said} Signed {utc(self.measurement.created_us)} by the owner's clock. {self.proves}"

    @property
    def proves(self) -> str:
        """To whom it proves what; a receipt at `software` binds its owner to nothing."""
        return (
            "To its owner it shows what was measured; to others it is the owner's word: "
            "an owner can make up slices, and at this level the receipts of runs that never happened."
        )

    @property
    def links(self) -> tuple[Link, ...]:
        """What was checked, in order."""
        parts, lacks = self.measurement.parts, self.lacks
        found = [Link("statement", "signed by the owner")]
        found += [Link(part.mode.value, _slices(part)) for part in parts]
        if self.measurement.part(Mode.INTERLEAVED) is not None:
            null = self.measurement.part(Mode.NULL)
            result = None if null is None else null.analysis.result
            says = "missing" if null is None else "no interval" if result is None else _slowdown(result)
            found.append(
                Link("null holds 0", says, holds=not {Lack.NULL, Lack.NULL_INTERVAL, Lack.NULL_ZERO} & {*lacks})
            )
            if Lack.NULL_DESIGN in lacks:
                found.append(Link("null like it", "slices, guards or warm-up of another length", holds=False))
        if restless := [_unsteady(part) for part in parts if part.analysis.unsteady]:
            found.append(Link("steady state", ", ".join(restless), holds=False))
        if any(part.mode is not Mode.NULL for part in parts):
            number = sum(len(backing.receipts) for backing in self.backings)
            says = f"{number} of them, lowest assurance {self.assurance}"
            if broken_off := sum(len(backing.broken_off) for backing in self.backings):
                says += f"; {broken_off} of runs that did not complete"
            found.append(Link("receipts", says, holds=not {Lack.RECEIPTS, Lack.RUNS} & {*lacks}))
            found += [link for part in parts if (link := _once(part)) is not None]
        words = ", ".join(f"{part.mode.value}: {part.parity.word.value}" for part in parts)
        if parts:
            found.append(Link("work parity", words, holds=all(part.parity.word is Same.SAME for part in parts)))
        if self.measurement.phases is not None:
            found.append(Link("phases", f"{len(self.measurement.phases.slices)} slices"))
        return tuple(found)

    @property
    def _found(self) -> str:
        planted = self.measurement.planted_ppm
        note = f", with an overhead of {planted} ppm planted on purpose" if planted else ""
        part = self.measurement.part(Mode.INTERLEAVED) or self.measurement.part(Mode.NULL)
        if part is None:
            what = "sequential legs" if self.measurement.parts else "the phases of a step"
            return f"{what} only, of which no word is claimed{note}"
        claim, result = part.analysis.claim, part.analysis.result
        if claim is None or result is None:
            return "no block counts, and nothing is claimed" + note
        arms = "raw against raw, " if part.mode is Mode.NULL else ""
        return f"{arms}{_word(claim, result)}, {_slowdown(result)}" + self._room + note

    @property
    def _room(self) -> str:
        """How large a bias of the harness itself the null run leaves possible: a coarse one holds 0 easily."""
        null = self.measurement.part(Mode.NULL)
        interval = None if null is None or null.analysis.result is None else null.analysis.result.slowdown_interval()
        if interval is None or self.measurement.part(Mode.INTERLEAVED) is None:
            return ""
        return f"; its null run leaves room for a bias of {max(abs(interval.low), abs(interval.high)) * 100:.2g} %"

    def to_json(self) -> dict[str, Json]:
        """Return the verdict for `verify --json`."""
        measurement = self.measurement
        return {
            "assurance": self.assurance,
            "created_us": measurement.created_us,
            "kind": "overhead",
            "lacks": [lack.value for lack in self.lacks],
            "links": [{"holds": link.holds, "link": link.name, "says": link.says} for link in self.links],
            "parts": [
                {"design_sha256": part.design.sha256.hex(), "mode": part.mode.value} | part.to_json()
                for part in measurement.parts
            ],
            "phases": None if measurement.phases is None else measurement.phases.to_json(),
            "planted_ppm": measurement.planted_ppm,
            "proves": self.proves,
            "status": self.status.value,
            "system": dict(measurement.system),
            "unbacked_sessions": {backing.mode.value: list(backing.unbacked) for backing in self.backings},
            "verdict": self.sentence,
            "workload": dict(measurement.workload),
        }


def _alike(one: Design, other: Design) -> bool:
    """Return whether two parts were measured in the same way; their seeds, sizes and margins may differ."""
    return (one.slice_steps, one.guard_steps, one.guard_ns, one.warmup) == (
        other.slice_steps,
        other.guard_steps,
        other.guard_ns,
        other.warmup,
    )


def _unsteady(part: Part) -> str:
    return f"{part.mode.value}: {len(part.analysis.unsteady)} of {len(part.notes)} sessions never came to rest"


def _once(part: Part) -> Link | None:
    """Return what a run pays once, and how much of it is the receipts' word."""
    cost = part.lifecycle
    if cost is None:
        return None
    says = f"F {cost.seconds:.3g} s, of it lifecycle by the receipts {cost.in_receipts_s:.3g} s"
    return Link(f"once a run, {part.mode.value}", says)


def _word(claim: Claim, result: Estimate) -> str:
    """Return the word with what a reader is owed beside it: the margin, or the smallest effect that could be seen."""
    if claim.word is Word.EQUIVALENT:
        return f"equivalent within ±{claim.margin * 100:.3g} %"
    least = result.minimum_detectable
    if claim.word is Word.INCONCLUSIVE and least is not None:
        return f"inconclusive (it could have seen {least * 100:.2g} %)"
    return claim.word.value.replace("_", " ")


def _slowdown(result: Estimate) -> str:
    interval: Interval | None = result.slowdown_interval()
    if interval is None:
        return f"{result.slowdown * 100:+.3f} % without an interval"
    ends = f"95 % interval {interval.low * 100:+.3f} % to {interval.high * 100:+.3f} %"
    label = f", {result.label}" if result.label else ""
    return f"{result.slowdown * 100:+.3f} % ({ends}{label})"


def _slices(part: Part) -> str:
    attempts = part.analysis.attempts
    blocks = "pairs of legs" if part.mode is Mode.SEQUENTIAL else "blocks"
    return (
        f"{attempts.included} of {attempts.started} {blocks} count; "
        f"{attempts.sessions_completed} of {attempts.sessions_planned} sessions completed"
    )
