"""What a job of a given length pays, and how the interval narrowed with time."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.ticker import LogLocator

from glasshouse.bench.report.figures.picture import Missing, Picture, no_blocks
from glasshouse.bench.report.numbers import between, count, duration, percent, seconds
from glasshouse.bench.report.theme import LIGHT, Drawing, Sheet
from glasshouse.bench.report.view import View

__all__ = ["job_length", "width"]

_JOB = "What a job pays in all, by its length"
_WIDTH = "Width of the 95 % interval as the measurement went on"
_TICKS_S = {60: "1 min", 900: "15 min", 3_600: "1 h", 86_400: "24 h", 604_800: "1 week"}
_ROWS_SHOWN = 12


def job_length(view: View) -> Picture | Missing:
    """Return the relative cost δ + F/D over the length D of a job."""
    found, lifecycle, jobs = view.estimate, view.lifecycle, view.jobs
    if found is None or lifecycle is None or not jobs:
        why = (
            "Not given: the result is suspected of bias, and no cost of a job follows from it."
            if view.biased
            else "Not measured: it needs an interleaved result and what a protected run pays once."
        )
        return Missing(name="job-length", title=_JOB, why=why)
    steady, ends = found.slowdown_interval(), lifecycle.interval

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes()
        lengths = np.geomspace(60, 604_800, 120)
        if steady is not None:
            f_low, f_high = (lifecycle.seconds,) * 2 if ends is None else (ends.low, ends.high)
            low, high = 100 * (steady.low + f_low / lengths), 100 * (steady.high + f_high / lengths)
            axes.fill_between(lengths, low, high, color=LIGHT["protected"], alpha=0.2, linewidth=0, label="95 % band")
        axes.plot(
            lengths, 100 * (found.slowdown + lifecycle.seconds / lengths), color=LIGHT["protected"], label="δ + F/D"
        )
        axes.axhline(
            100 * found.slowdown,
            color=LIGHT["ink"],
            linewidth=1,
            linestyle=(0, (5, 3)),
            label="δ alone, an endless job",
        )
        for cost in jobs:
            axes.plot(cost.duration_s, 100 * cost.relative, "s", color=LIGHT["protected"], markersize=7)
            axes.annotate(
                f"{duration(cost.duration_s)}: {percent(cost.relative, 2)}",
                (cost.duration_s, 100 * cost.relative),
                # Above, below, above, so that neighbours do not run into each other.
                xytext=(4, -17) if cost.duration_s == 3_600 else (4, 9),
                textcoords="offset points",
                ha="left" if cost.duration_s < 86_400 else "center",
                weight="bold",
                bbox={"facecolor": LIGHT["paper"], "edgecolor": "none", "alpha": 0.7, "pad": 1.0},
            )
        axes.set_xscale("log")
        axes.set_xticks(list(_TICKS_S), list(_TICKS_S.values()))
        axes.minorticks_off()
        axes.set_xlim(60, 604_800)
        top = 100 * (max(found.slowdown, 0) + lifecycle.seconds / 200)
        reach = [0.0, 100 * jobs[0].relative] + ([] if steady is None else [100 * steady.low, 100 * steady.high * 1.15])
        axes.set_ylim(min(reach) * 1.15, max(top, *reach, 100 * jobs[0].relative * 1.3))
        axes.set_ylabel("extra time, % of the job")
        axes.set_xlabel("length of the job without protection, D")
        sheet.legend(axes)

    rows = tuple(
        (duration(cost.duration_s), seconds(cost.extra_s), percent(cost.relative), between(cost.interval))
        for cost in jobs
    )
    return Picture(
        name="job-length",
        title=_JOB,
        caption=(
            f"T(D) = F + (1 + δ)·D. F = {seconds(lifecycle.seconds)} is paid once, whatever the job trains: harden, "
            "attest, release, open, seal, wipe, and a slower start. "
            f"δ = {percent(found.slowdown)} is paid with every step. Very short jobs leave the axis at the top."
        ),
        alt="Relative cost against job length: "
        + "; ".join(f"{duration(cost.duration_s)}: {percent(cost.relative)}" for cost in jobs)
        + ".",
        headers=("Job without protection", "Extra time", "Relative", "95 % band"),
        rows=rows,
        drawing=Drawing(draw=draw, height_px=330, narrow_px=330),
    )


def width(view: View) -> Picture | Missing:
    """Return how wide the 95 % interval was after each prefix of the run."""
    prefixes = [
        (prefix.elapsed_s / 60, 100 * interval.width, prefix.found)
        for prefix in view.prefixes
        if (interval := prefix.found.slowdown_interval()) is not None and interval.width > 0
    ]
    if view.main is None or len(prefixes) < 2:
        why = (
            no_blocks(view)
            if view.main is None
            else ("Too short: it takes three sessions, or three blocks of a single one.")
        )
        return Missing(name="width", title=_WIDTH, why=why)
    margin = 100 * 2 * math.sinh(view.main.design.margin)
    whole = prefixes[-1][2].sessions > 1
    drawn = [margin, *(wide for _, wide, _ in prefixes)]
    subs = (1.0, 2.0, 5.0) if max(drawn) > 8 * min(drawn) else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes()
        style = "s-" if len(prefixes) <= 30 else "-"
        axes.plot(
            [time for time, _, _ in prefixes],
            [wide for _, wide, _ in prefixes],
            style,
            color=LIGHT["protected"],
            markersize=5,
            label="width of the interval",
        )
        axes.axhline(
            margin, color=LIGHT["margin-edge"], linestyle=(0, (4, 3)), linewidth=1.2, label="width of the margin band"
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.set_ylabel("width, percentage points")
        axes.set_xlabel("running time, minutes")
        sheet.legend(axes)

    every = max(1, math.ceil(len(prefixes) / _ROWS_SHOWN))
    chosen = prefixes[::every] + ([prefixes[-1]] if (len(prefixes) - 1) % every else [])
    rows = tuple(
        (f"{time:.1f} min", count(found.sessions, "session") if whole else count(found.blocks, "block"), f"{wide:.3f}")
        for time, wide, found in chosen
    )
    last = prefixes[-1]
    return Picture(
        name="width",
        title=_WIDTH,
        caption=(
            f"The estimate computed again from the first {'sessions' if whole else 'blocks'} alone. An interval wider "
            "than the margin band can never say equivalent. The number of blocks was fixed before the run; "
            "a run that broke off before them says so under Attempts."
            + (
                ""
                if whole
                else " One process pair: its own effect is not in this width, and no amount of time removes it."
            )
        ),
        alt=(
            f"Interval width falls from {prefixes[0][1]:.3f} to {last[1]:.3f} percentage points in {last[0]:.1f} "
            "minutes."
        ),
        headers=("After", "From", "Width, percentage points"),
        rows=rows,
        drawing=Drawing(draw=draw, height_px=290, narrow_px=290),
    )
