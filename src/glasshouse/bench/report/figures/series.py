"""What was timed: every slice by arm over the run, and the contrast that each block gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from matplotlib.axes import Axes

from glasshouse.bench.overhead.design import Arm, Mode, Phase
from glasshouse.bench.overhead.interval import TRIM
from glasshouse.bench.report.figures.picture import Missing, Picture, no_blocks
from glasshouse.bench.report.numbers import between, count, percent, step_time
from glasshouse.bench.report.theme import LIGHT, Drawing, Sheet
from glasshouse.bench.report.view import Point, View

__all__ = ["contrasts", "series"]

MOST_BLOCKS = 400
_SERIES = "Time per step of every slice, by arm"
_CONTRASTS = "Difference between the arms, block by block"


@dataclass(frozen=True, slots=True)
class _Scale:
    """A unit for times per step, and the part of the axis that is drawn."""

    _: KW_ONLY
    unit: str
    size_ns: float
    low: float
    high: float

    def clip(self, value_ns: float) -> float:
        return min(max(value_ns / self.size_ns, self.low), self.high)


def series(view: View) -> Picture | Missing:
    """Return the slice series of the main part."""
    points = view.points
    if view.main is None or not any(_times([point]) for point in points):
        return Missing(name="series", title=_SERIES, why=no_blocks(view))
    kept, every = _thin(points)
    scale = _scale(points)
    names = _arm_names(view)

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes(grid="y")
        _shade(axes, view, points)
        for arm in (Arm.RAW, Arm.PROTECTED):
            _scatter(axes, kept, arm, names[arm], scale, narrow=sheet.narrow)
        _crosses(axes, kept, scale)
        axes.set_ylim(scale.low, scale.high)
        axes.margins(x=0.01)
        axes.set_ylabel(f"time per step, {scale.unit}")
        axes.set_xlabel(
            "running time, minutes (sessions end to end)" if len(view.starts_s) > 1 else "running time, minutes"
        )
        sheet.legend(axes)

    beyond = sum(not scale.low <= time / scale.size_ns <= scale.high for time in _times(kept))
    rows = tuple(_arm_row(points, arm, names[arm]) for arm in (Arm.RAW, Arm.PROTECTED))
    return Picture(
        name="series",
        title=_SERIES + (" (null run)" if view.main.mode is Mode.NULL else ""),
        caption=" ".join(
            [
                "Each mark is one slice: a fixed number of training steps between two synchronisations. Shaded: "
                "warm-up, which never counts. A cross marks a slice of a block that a rule excluded, whichever arm "
                "broke "
                "it; a dotted line starts a session, that is, a fresh pair of processes.",
                f"One block in {every} is drawn, and every excluded one." if every > 1 else "",
                f"{count(beyond, 'slice')} outside the axis stand at its edge." if beyond else "",
            ]
        ).strip(),
        alt=f"Time per step over the run. {rows[0][0]}: median {rows[0][2]}; {rows[1][0]}: median {rows[1][2]}.",
        headers=("Arm", "Slices that count", "Median per step", "Fastest", "Slowest"),
        rows=rows,
        drawing=Drawing(draw=draw, height_px=360, narrow_px=340),
    )


def contrasts(view: View) -> Picture | Missing:
    """Return the block contrasts with the trimmed mean of each session."""
    counted = [point for point in view.points if point.block.included and point.contrast is not None]
    used = {session.number for session in view.usable}
    if view.main is None or not counted or (found := view.main.analysis.result) is None:
        return Missing(name="contrasts", title=_CONTRASTS, why=no_blocks(view))
    groups = [[point for point in counted if point.block.session == number] for number in sorted(used)]
    unused = [point for point in counted if point.block.session not in used]
    interval = found.slowdown_interval()

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes(grid="y")
        axes.axhline(0, color=LIGHT["ink"], linewidth=1)
        if interval is not None:
            axes.axhspan(100 * interval.low, 100 * interval.high, color=LIGHT["protected"], alpha=0.2, linewidth=0)
        for start in view.starts_s[1:]:
            axes.axvline(start / 60, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (1, 3)))
        for group, mean in zip(groups, found.session_means, strict=True):
            _blocks(axes, group, mean, narrow=sheet.narrow)
        if unused:
            axes.plot(
                [point.middle_s / 60 for point in unused],
                [100 * math.expm1(point.contrast or 0.0) for point in unused],
                "x",
                color=LIGHT["excluded"],
                markersize=4,
                label="session with too few",
            )
        axes.axhline(100 * found.slowdown, color=LIGHT["protected"], linewidth=1.4, label="overall, 95 % band")
        axes.set_ylabel("slowdown δ of a block, %")
        axes.set_xlabel("running time, minutes")
        sheet.legend(axes)

    rows = tuple(
        (f"session {number}", str(len(group)), str(2 * math.floor(TRIM * len(group) + 1e-9)), percent(math.expm1(mean)))
        for number, group, mean in zip(sorted(used), groups, found.session_means, strict=True)
    )
    overall = ("overall", str(found.blocks), "", f"{percent(found.slowdown)} ({between(interval)})")
    return Picture(
        name="contrasts",
        title=_CONTRASTS + (" (null run)" if view.main.mode is Mode.NULL else ""),
        caption=(
            "A block holds two slices of each arm in a drawn order, so that a drift of the machine cancels. Each "
            "mark is "
            "one block. Open marks are the tenth at either end that the trimmed mean of a session leaves out; the "
            "short "
            "line is that mean."
        ),
        alt=f"Block contrasts around {percent(found.slowdown)}, 95 % interval {between(interval)}.",
        headers=("Session", "Blocks that count", "Trimmed", "Trimmed mean, as slowdown"),
        rows=(*rows, overall),
        drawing=Drawing(draw=draw, height_px=320, narrow_px=310),
    )


def _arm_names(view: View) -> dict[Arm, str]:
    if view.main is not None and view.main.mode is Mode.NULL:
        return {Arm.RAW: "raw, first process", Arm.PROTECTED: "raw, second process"}
    return {Arm.RAW: "raw", Arm.PROTECTED: "protected"}


def _times(points: Iterable[Point], arm: Arm | None = None, *, counted: bool = False) -> list[float]:
    return [
        one.duration_ns / one.steps
        for point in points
        if point.block.included or not counted
        for one in point.block.slices
        if (arm is None or one.arm is arm) and one.duration_ns > 0
    ]


def _thin(points: Sequence[Point]) -> tuple[list[Point], int]:
    """Keep whole blocks evenly, and every one that a rule excluded."""
    every = max(1, math.ceil(len(points) / MOST_BLOCKS))
    excluded = {number for number, point in enumerate(points) if point.block.broken}
    # A machine that breaks a rule in every block must not make the page endless.
    also = excluded if len(excluded) <= MOST_BLOCKS else set()
    return [point for number, point in enumerate(points) if number % every == 0 or number in also], every


def _scale(points: Sequence[Point]) -> _Scale:
    times = np.array(_times(points, counted=True) or _times(points))
    size, unit = next(
        (size, unit)
        for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
        if np.median(times) >= size or size == 1
    )
    low, high = (float(value) for value in np.quantile(times, [0.005, 0.995]))
    room = 0.25 * (high - low) or 0.02 * high
    return _Scale(unit=unit, size_ns=size, low=max(low - room, 0) / size, high=(high + room) / size)


def _shade(axes: Axes, view: View, points: Sequence[Point]) -> None:
    for number, start in enumerate(view.starts_s):
        warm = [point for point in points if point.block.phase is Phase.WARMUP and point.start_s == start]
        if warm:
            ends = [one.t1_ns for point in warm for one in point.block.slices]
            axes.axvspan(
                start / 60, (start + max(ends) / 1e9) / 60, color=LIGHT["warm"], linewidth=0, label="warm-up", zorder=0
            )
        if number:
            axes.axvline(start / 60, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (1, 3)))


def _scatter(axes: Axes, points: Sequence[Point], arm: Arm, label: str, scale: _Scale, *, narrow: bool) -> None:
    found = [
        ((point.start_s + (one.t0_ns + one.t1_ns) / 2e9) / 60, scale.clip(one.duration_ns / one.steps))
        for point in points
        for one in point.block.slices
        if one.arm is arm and one.duration_ns > 0
    ]
    raw = arm is Arm.RAW
    colour = LIGHT["raw" if raw else "protected"]
    dense = len(found) > (150 if narrow else 500)
    axes.plot(
        [x for x, _ in found],
        [y for _, y in found],
        "o" if raw else "^",
        color=colour,
        markerfacecolor=colour if raw else LIGHT["paper"],
        markeredgewidth=0.9,
        markersize=(2.2 if dense else 3.4) + (0.0 if raw else 1.2),
        label=label,
    )


def _crosses(axes: Axes, points: Sequence[Point], scale: _Scale) -> None:
    found = [
        ((point.start_s + (one.t0_ns + one.t1_ns) / 2e9) / 60, scale.clip(one.duration_ns / one.steps))
        for point in points
        if point.block.broken
        for one in point.block.slices
    ]
    if found:
        axes.plot(
            [x for x, _ in found],
            [y for _, y in found],
            "x",
            color=LIGHT["excluded"],
            markersize=6,
            markeredgewidth=1.4,
            label="excluded block",
        )


def _arm_row(points: Sequence[Point], arm: Arm, name: str) -> tuple[str, ...]:
    times = _times(points, arm, counted=True)
    if not times:
        return (name, "0", "none", "none", "none")
    return (name, str(len(times)), step_time(float(np.median(times))), step_time(min(times)), step_time(max(times)))


def _blocks(axes: Axes, group: Sequence[Point], mean: float, *, narrow: bool) -> None:
    every = max(1, math.ceil(len(group) / MOST_BLOCKS))
    cut = math.floor(TRIM * len(group) + 1e-9)
    ranked = sorted(range(len(group)), key=lambda number: group[number].contrast or 0.0)
    trimmed = {*ranked[:cut], *ranked[len(ranked) - cut :]}
    for outside in (False, True):
        shown = [point for number, point in enumerate(group) if (number in trimmed) is outside and number % every == 0]
        axes.plot(
            [point.middle_s / 60 for point in shown],
            [100 * math.expm1(point.contrast or 0.0) for point in shown],
            "o",
            color=LIGHT["muted"],
            markerfacecolor=LIGHT["paper"] if outside else LIGHT["muted"],
            markersize=3.0 if narrow else 4.0,
            label="block, trimmed" if outside else "block",
        )
    ends = [group[0].middle_s / 60, group[-1].middle_s / 60]
    axes.plot(ends, [100 * math.expm1(mean)] * 2, color=LIGHT["ink"], linewidth=2, label="session's trimmed mean")
