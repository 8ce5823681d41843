"""What order does: sequential pairs of either order beside the interleaved result and published pairs."""

from __future__ import annotations

import math

from glasshouse.bench.overhead.artifact import Part
from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.interval import Interval
from glasshouse.bench.overhead.sequential import Pair
from glasshouse.bench.report.figures.picture import Missing, Picture, Row, draw_guides, draw_rows, rows_height
from glasshouse.bench.report.numbers import between, percent
from glasshouse.bench.report.published import Published, published
from glasshouse.bench.report.theme import Drawing, Sheet
from glasshouse.bench.report.view import View

__all__ = ["order"]

MOST_PAIRS = 8
_MARKERS = {Arm.RAW: "^", Arm.PROTECTED: "v", None: "o"}
_ORDERS = {Arm.RAW: "raw leg first", Arm.PROTECTED: "protected leg first", None: "order not stated"}
_TITLE = "One leg after the other, beside interleaved slices: how much is order"


def order(view: View) -> Picture | Missing:
    """Return the comparison of sequential and interleaved figures, all as throughput loss."""
    ours = _interleaved(view) + _sequential(view)
    if not ours:
        return Missing(
            name="order",
            title=_TITLE,
            why=("Not measured: neither interleaved nor sequential results are in this measurement."),
        )
    theirs = _published(view.kind)
    rows = ours + theirs
    values = [row.value for row in rows if not row.heading]
    low, high = min(*values, -5.0), max(*values, 5.0)
    room = 0.04 * (high - low)

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes(grid="" if sheet.narrow else "x")
        draw_guides(sheet, axes, rows)
        draw_rows(sheet, axes, rows, low=low - room, high=high + room)
        axes.set_xlabel("throughput loss, %" if sheet.narrow else "throughput loss: % fewer steps per second than raw")

    missing = "" if view.sequential is not None else " No sequential pair was measured here."
    numbers = tuple((row.label, row.shown) for row in rows if not row.heading)
    return Picture(
        name="order",
        title=_TITLE,
        caption=(
            "All rows use the definition of the published figures: throughput loss, 1 − protected rate / raw rate. "
            "▲ raw leg first, ▼ protected leg first, ○ order not stated. A pair of legs measures warm-up, drift and "
            "order "
            "along with protection: published pairs for the same code reach from "
            f"{percent(min(row.throughput_loss for row in published()), 2)} to "
            f"{percent(max(row.throughput_loss for row in published()), 2)}. Published pairs ran on other "
            f"machines, and nothing is claimed about them.{missing}"
        ),
        alt="Throughput losses of interleaved, sequential and published measurements on one axis. "
        + "; ".join(f"{label}: {shown}" for label, shown in numbers[:3])
        + ".",
        headers=("Row", "Throughput loss"),
        rows=numbers,
        drawing=Drawing(draw=draw, height_px=rows_height(rows, narrow=False), narrow_px=rows_height(rows, narrow=True)),
    )


def _interleaved(view: View) -> list[Row]:
    rows = []
    named: tuple[tuple[str, Part | None, str, str], ...] = (
        ("interleaved, this measurement", view.interleaved, "protected", "s"),
        ("null run: raw against raw", view.null, "null", "D"),
    )
    for label, part, colour, marker in named:
        if part is None or (found := part.analysis.result) is None:
            continue
        interval = found.throughput_loss_interval()
        ends = "" if interval is None else f"  [{_short(interval)}]"
        rows.append(
            Row(
                label=label,
                value=100 * found.throughput_loss,
                shown=percent(found.throughput_loss, 2) + ends,
                interval=None if interval is None else _scaled(interval),
                colour=colour,
                marker=marker,
                strong=colour == "protected",
            )
        )
    return rows


def _short(interval: Interval) -> str:
    return between(interval, 2).replace("\u00a0%", "").replace(" to ", ", ")


def _scaled(interval: Interval) -> Interval:
    return Interval(low=100 * interval.low, high=100 * interval.high)


def _sequential(view: View) -> list[Row]:
    if view.sequential is None or (found := view.sequential.analysis.sequential) is None:
        return []
    log_interval = found.interval()
    interval = None if log_interval is None else Interval(low=_loss(log_interval.low), high=_loss(log_interval.high))
    value = _loss(found.log_ratio)
    rows = [Row(label="sequential, this measurement", heading=True)]
    rows.append(
        Row(
            label="mean of both orders" if found.order_effect is not None else "one order only",
            value=100 * value,
            shown=percent(value, 2)
            + (f"  [{_short(interval)}]" if interval is not None else "  (n=1)" if found.units == 1 else ""),
            interval=None if interval is None else _scaled(interval),
            colour="protected",
            marker="s",
        )
    )
    for first in (Arm.RAW, Arm.PROTECTED):
        pairs = [pair for pair in found.pairs if pair.first is first]
        rows += [_pair(pair) for pair in pairs[:: max(1, math.ceil(len(pairs) / MOST_PAIRS))]]
    return rows


def _pair(pair: Pair) -> Row:
    loss = _loss(pair.log_ratio)
    return Row(
        label=_ORDERS[pair.first],
        value=100 * loss,
        shown=percent(loss, 2),
        colour="protected",
        marker=_MARKERS[pair.first],
    )


def _loss(log_ratio: float) -> float:
    return -math.expm1(-log_ratio)


def _published(kind: str) -> list[Row]:
    rows = [Row(label="published single pairs, other machines", heading=True)]
    return rows + [
        _theirs(row) for row in sorted(published(), key=lambda row: (row.kind != kind, row.kind, -row.throughput_loss))
    ]


def _theirs(row: Published) -> Row:
    return Row(
        label=row.label,
        value=100 * row.throughput_loss,
        shown=percent(row.throughput_loss, 2),
        colour="published",
        marker=_MARKERS[row.first],
    )
