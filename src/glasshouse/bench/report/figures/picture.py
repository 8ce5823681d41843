"""A picture as a value: words, numbers, and how to draw it; and the row plot that several of them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from matplotlib.axes import Axes

from glasshouse.bench.overhead.interval import Interval
from glasshouse.bench.report.theme import LIGHT, Drawing, Sheet
from glasshouse.bench.report.view import View

__all__ = ["Missing", "Picture", "Row", "draw_guides", "draw_rows", "no_blocks", "rows_height"]

_ROW_PX = 25
_NARROW_ROW_PX = 36
_AROUND_PX = 92


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture.

    Args:
        name: of its file, and its anchor in the page.
        title: what it shows.
        caption: how to read it.
        alt: what is seen in it, for those who do not see it.
        headers, rows: its numbers.
        drawing: how to draw it.
    """

    _: KW_ONLY
    name: str
    title: str
    caption: str
    alt: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    drawing: Drawing


@dataclass(frozen=True, slots=True)
class Missing:
    """A picture that cannot be drawn, and why."""

    _: KW_ONLY
    name: str
    title: str
    why: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a row plot.

    Args:
        label: whose number it is; untrusted text has been through `safe_words`.
        value: the number, on the scale of the axis.
        shown: the same in words, at the right.
        interval: its ends; None where there is none, which draws an open mark.
        colour: a name of `theme.LIGHT`.
        marker: Matplotlib's.
        strong: the row that the reader came for.
        heading: a row without a number, above others.
    """

    _: KW_ONLY
    label: str
    value: float = 0.0
    shown: str = ""
    interval: Interval | None = None
    colour: str = "ink"
    marker: str = "o"
    strong: bool = False
    heading: bool = False


def no_blocks(view: View) -> str:
    """Return why there is nothing to draw of interleaved blocks."""
    if view.main is None:
        return "Not measured: this measurement has neither interleaved slices nor a null run."
    return "Nothing to draw: no block of the interleaved slices counts."


def rows_height(rows: Sequence[Row], *, narrow: bool) -> float:
    """Return how high a row plot has to be."""
    return len(rows) * (_NARROW_ROW_PX if narrow else _ROW_PX) + _AROUND_PX


def draw_rows(sheet: Sheet, axes: Axes, rows: Sequence[Row], *, low: float, high: float) -> None:
    """Draw rows from the top down; what lies beyond `low` or `high` becomes an arrow at the edge.

    Labels stand at the left and numbers at the right; on a phone both stand above their row.
    """
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.set_xlim(low, high)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    for place, row in enumerate(rows):
        _label(sheet, axes, place, row)
        if not row.heading:
            _mark(axes, place, row, low, high)


def draw_guides(sheet: Sheet, axes: Axes, rows: Sequence[Row], *, band: Interval | None = None) -> None:
    """Draw the line at 0 and a band; on a phone only beside the marks, so that no label stands on them."""
    spans = [(-0.7, len(rows) - 0.3)]
    if sheet.narrow:
        spans = [(place - 0.16, place + 0.44) for place, row in enumerate(rows) if not row.heading]
    for top, bottom in spans:
        if band is not None:
            axes.fill_betweenx([top, bottom], band.low, band.high, color=LIGHT["margin"], linewidth=0, zorder=0)
            for edge in (band.low, band.high):
                axes.plot([edge] * 2, [top, bottom], color=LIGHT["margin-edge"], linewidth=1, linestyle=(0, (4, 3)))
        axes.plot([0, 0], [top, bottom], color=LIGHT["ink"], linewidth=1, zorder=1)


def _label(sheet: Sheet, axes: Axes, place: int, row: Row) -> None:
    across = axes.get_yaxis_transform()
    weight = "bold" if row.strong or row.heading else "normal"
    colour = LIGHT["muted" if row.heading else "ink"]
    if sheet.narrow:
        above = {"va": "bottom", "size": sheet.size - 0.5, "weight": weight, "color": colour}
        axes.text(0, place - 0.2, row.label, transform=across, ha="left", **above)  # type: ignore[arg-type]
        axes.text(1, place - 0.2, row.shown, transform=across, ha="right", **above)  # type: ignore[arg-type]
        return
    style = {"va": "center", "weight": weight, "color": colour}
    axes.text(-0.025, place, row.label, transform=across, ha="right", **style)  # type: ignore[arg-type]
    axes.text(1.025, place, row.shown, transform=across, ha="left", **style)  # type: ignore[arg-type]


def _mark(axes: Axes, place: int, row: Row, low: float, high: float) -> None:
    colour = LIGHT[row.colour]
    size = 9 if row.strong else 6.5
    if row.interval is not None:
        ends = [max(row.interval.low, low), min(row.interval.high, high)]
        if ends[0] <= ends[1]:
            line = 3.2 if row.strong else 1.8
            axes.plot(ends, [place, place], color=colour, linewidth=line, solid_capstyle="butt")
    if low <= row.value <= high:
        face = colour if row.interval is not None else LIGHT["paper"]
        axes.plot(row.value, place, row.marker, color=colour, markerfacecolor=face, markersize=size, clip_on=False)
    else:
        edge = low if row.value < low else high
        axes.plot(edge, place, "<" if row.value < low else ">", color=colour, markersize=7, clip_on=False)
