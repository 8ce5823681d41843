"""The forest plot: sessions, overall, null, published rows, one scale, the margin behind them."""

from __future__ import annotations

import math

from glasshouse.bench.overhead.estimate import Estimate
from glasshouse.bench.overhead.interval import Interval
from glasshouse.bench.report.figures.picture import (
    Missing,
    Picture,
    Row,
    draw_guides,
    draw_rows,
    no_blocks,
    rows_height,
)
from glasshouse.bench.report.numbers import between, percent
from glasshouse.bench.report.published import Published, published
from glasshouse.bench.report.theme import Drawing, Sheet
from glasshouse.bench.report.view import View

__all__ = ["forest"]

MOST_SESSIONS = 24
TITLE = "Slowdown by session, beside the margin, the null run and published figures"


def forest(view: View) -> Picture | Missing:
    """Return the forest plot of slowdowns, or what is missing for it."""
    rows = _rows(view)
    if not rows:
        return Missing(name="forest", title=TITLE, why=no_blocks(view))
    margin = view.main.design.margin if view.main is not None else 0.0
    band = Interval(low=100 * math.expm1(-margin), high=100 * math.expm1(margin))
    every = rows + _published(view)
    reach = _reach(rows, band)

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes(grid="" if sheet.narrow else "x")
        draw_guides(sheet, axes, every, band=band)
        draw_rows(sheet, axes, every, low=-reach, high=reach)
        axes.set_xlabel(
            "slowdown, % more time per step" if sheet.narrow else "slowdown δ: % more time per training step"
        )

    numbers = tuple((row.label, row.shown) for row in every if not row.heading)
    return Picture(
        name="forest",
        title=TITLE,
        caption=(
            f"Green: the equivalence margin of ±{percent(margin, 2, sign=False)} (on the log ratio), fixed before the "
            "run. Bars are 95 % intervals; an open mark has no interval, because one process pair or one published "
            "pair gives none here. The null run compares raw with raw and has to hold 0. Published figures are single "
            "pairs on other machines, turned from throughput loss into slowdown; an arrow means that the figure lies "
            "beyond the axis."
        ),
        alt="Forest plot of slowdowns. " + "; ".join(f"{label}: {shown}" for label, shown in numbers[:4]) + ".",
        headers=("Row", "Slowdown"),
        rows=numbers,
        drawing=Drawing(
            draw=draw,
            height_px=rows_height(every, narrow=False),
            narrow_px=rows_height(every, narrow=True),
        ),
    )


def _rows(view: View) -> list[Row]:
    rows: list[Row] = []
    main = None if view.interleaved is None else view.interleaved.analysis.result
    if main is not None:
        rows.append(_overall("this measurement", main, "protected"))
    if view.null is not None and (found := view.null.analysis.result) is not None:
        rows.append(_overall("null run: raw against raw", found, "null", marker="D"))
    return rows + (_sessions(view, main) if main is not None and main.sessions > 1 else [])


def _overall(label: str, found: Estimate, colour: str, *, marker: str = "s") -> Row:
    interval = found.slowdown_interval()
    shown = percent(found.slowdown) if interval is None else f"{percent(found.slowdown)}  [{_ends(interval)}]"
    scaled = None if interval is None else Interval(low=100 * interval.low, high=100 * interval.high)
    return Row(
        label=label,
        value=100 * found.slowdown,
        shown=shown,
        interval=scaled,
        colour=colour,
        marker=marker,
        strong=colour == "protected",
    )


def _ends(interval: Interval) -> str:
    return between(interval, 2).replace("\u00a0%", "").replace(" to ", ", ")


def _sessions(view: View, found: Estimate) -> list[Row]:
    if view.interleaved is None:
        return []
    used = [session.number for session in view.usable]
    every = math.ceil(len(used) / MOST_SESSIONS)
    shown = list(zip(used, found.session_means, strict=True))[::every]
    name = "sessions (each a process pair)" if every == 1 else f"sessions, every {every}th of {len(used)}"
    return [Row(label=name, heading=True)] + [
        Row(
            label=f"session {number}, {view.interleaved.design.launched_first(number).name.lower()} launched first",
            value=100 * math.expm1(value),
            shown=percent(math.expm1(value)),
        )
        for number, value in shown
    ]


def _published(view: View) -> list[Row]:
    like = [row for row in published() if row.kind == view.kind] or list(published())
    return [Row(label="published single pairs, other machines", heading=True)] + [_single(row) for row in like]


def _single(row: Published) -> Row:
    return Row(
        label=row.label,
        value=100 * row.slowdown,
        shown=percent(row.slowdown, 2),
        colour="published",
        marker="o" if row.first is None else "^" if row.first.value == "R" else "v",
    )


def _reach(rows: list[Row], band: Interval) -> float:
    values = [band.low, band.high]
    for row in rows:
        if not row.heading:
            values += [row.value] if row.interval is None else [row.interval.low, row.interval.high]
    # An interval from two sessions can be enormous; the axis then shows what can be told apart.
    return min(1.15 * max(abs(value) for value in values), 60.0)
