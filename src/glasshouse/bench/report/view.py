"""A measurement as the report reads it: the parts by their mode, the time axis, and what follows from growing prefixes.

Nothing is estimated here by other means than `glasshouse.bench.overhead`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from glasshouse.bench.overhead.artifact import Measurement, Part
from glasshouse.bench.overhead.blocks import Block, Session
from glasshouse.bench.overhead.combine import JobCost
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.estimate import Estimate, Word, block_contrast, contrasts, estimate, usable
from glasshouse.bench.overhead.lifecycle import Lifecycle

__all__ = ["Point", "Prefix", "View"]

MOST_PREFIXES = 240


@dataclass(frozen=True, slots=True)
class Point:
    """A block on the time axis of the whole run.

    Args:
        block: what ran.
        start_s: when its session began on that axis; slices count from there.
        contrast: its log ratio; None where a slice is missing or has no duration.
    """

    _: KW_ONLY
    block: Block
    start_s: float
    contrast: float | None

    @property
    def middle_s(self) -> float:
        slices = self.block.slices
        return self.start_s + (slices[0].t0_ns + slices[-1].t1_ns) / 2e9


@dataclass(frozen=True, slots=True)
class Prefix:
    """The estimate as it stood after some of the time."""

    _: KW_ONLY
    elapsed_s: float
    found: Estimate


@dataclass(frozen=True)
class View:
    """Everything that the page and the figures read."""

    measurement: Measurement

    @cached_property
    def interleaved(self) -> Part | None:
        return self.measurement.part(Mode.INTERLEAVED)

    @cached_property
    def null(self) -> Part | None:
        return self.measurement.part(Mode.NULL)

    @cached_property
    def sequential(self) -> Part | None:
        return self.measurement.part(Mode.SEQUENTIAL)

    @cached_property
    def main(self) -> Part | None:
        """The part whose slices are drawn: the interleaved one, else the null run."""
        return self.interleaved or self.null

    @property
    def estimate(self) -> Estimate | None:
        """The headline's estimate."""
        return None if self.interleaved is None else self.interleaved.analysis.result

    @property
    def workload(self) -> str:
        return str(self.measurement.workload.get("name") or self.measurement.workload.get("kind") or "unnamed")

    @property
    def kind(self) -> str:
        return str(self.measurement.workload.get("kind"))

    @cached_property
    def protected(self) -> Part | None:
        """The part whose protected runs stand for all: the interleaved one, else the sequential one."""
        return self.interleaved or self.sequential

    @cached_property
    def lifecycle(self) -> Lifecycle | None:
        return None if self.protected is None else self.protected.lifecycle

    @cached_property
    def jobs(self) -> tuple[JobCost, ...]:
        """What whole jobs cost, from the headline's estimate; empty without it, without F, or if it is "
        "biased."""
        if self.interleaved is None or self.biased:
            return ()
        return self.interleaved.jobs or ()

    @property
    def biased(self) -> bool:
        """Whether the headline's number must not be used, so that nothing may be derived from it either."""
        said = None if self.interleaved is None else self.interleaved.analysis.claim
        return said is not None and said.word is Word.BIAS_SUSPECTED

    @cached_property
    def usable(self) -> tuple[Session, ...]:
        """The sessions that are in the main part's estimate."""
        return () if self.main is None else usable(self.main.design, self.main.analysis.sessions)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """All blocks of the main part that have a slice, warm-ups among them, in the order in which they ran."""
        return () if self.main is None else tuple(_points(self.main))

    @cached_property
    def starts_s(self) -> tuple[float, ...]:
        """When each session of the main part began on the time axis."""
        return () if self.main is None else tuple(start for start, _ in _starts(self.main))

    @cached_property
    def prefixes(self) -> tuple[Prefix, ...]:
        """The estimate recomputed from growing prefixes of what is in the main part's estimate."""
        if self.main is None:
            return ()
        if len(self.usable) == 1:
            return tuple(self._within(self.usable[0].number))
        starts = dict(zip((one.number for one in self.main.analysis.sessions), _starts(self.main), strict=True))
        sets = [contrasts(session.blocks) for session in self.usable]
        return tuple(
            Prefix(elapsed_s=starts[self.usable[number - 1].number][1], found=estimate(sets[:number]))
            for number in range(2, len(sets) + 1)
        )

    def _within(self, session: int) -> Iterator[Prefix]:
        points = [
            (point.start_s + point.block.slices[-1].t1_ns / 1e9, point.contrast)
            for point in self.points
            if point.block.session == session and point.block.included and point.contrast is not None
        ]
        every = max(1, math.ceil(len(points) / MOST_PREFIXES))
        for number in range(2, len(points) + 1):
            if number % every == 0 or number == len(points):
                values = [value for _, value in points[:number]]
                yield Prefix(elapsed_s=points[number - 1][0], found=estimate([values]))


def _starts(part: Part) -> Iterator[tuple[float, float]]:
    """Yield when each session begins and ends on an axis of running time: sessions are laid end to end."""
    now = 0.0
    for session in part.analysis.sessions:
        ends = [one.t1_ns for block in (*session.warmup, *session.blocks) for one in block.slices]
        end = now + max(ends, default=0) / 1e9
        yield now, end
        now = end


def _points(part: Part) -> Iterator[Point]:
    for session, (start, _) in zip(part.analysis.sessions, _starts(part), strict=True):
        for block in (*session.warmup, *session.blocks):
            if block.slices:
                yield Point(block=block, start_s=start, contrast=_contrast(block))


def _contrast(block: Block) -> float | None:
    if not block.complete or min(block.step_times_ns) <= 0:
        return None
    return block_contrast(block.sequence, block.step_times_ns)
