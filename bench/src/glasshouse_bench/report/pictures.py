"""The four pictures: inline SVG whose colours are the page's, so that they read on light and on dark.

Law: the same numbers give the same bytes: a fixed salt, no date, and text as text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter

from glasshouse_bench.beside import Phases
from glasshouse_bench.design import Mode
from glasshouse_bench.report.published import Published
from glasshouse_bench.statement import Measured, Measurement

__all__ = ["forest", "jobs", "phase_rows", "phases", "sessions"]

# Colours that stand for those of the page's style, in which they are replaced.
_INK, _MUTED, _LINE, _RAW, _PROTECTED, _BAND = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
_PAGE = "#070707"
_VARIABLES = {_INK: "ink", _MUTED: "muted", _LINE: "line", _RAW: "raw", _PROTECTED: "protected", _BAND: "band"}
_VARIABLES |= {_PAGE: "page"}
_STYLE: Any = {
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "glasshouse",
    "text.color": _INK,
    "text.usetex": False,
    "text.parse_math": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
}
_WIDTH_IN = 4.8
REST = "the rest"
_NAMES = {
    Mode.INTERLEAVED: "this measurement",
    Mode.NULL: "null: raw against raw",
    Mode.SEQUENTIAL: "sequential",
    Mode.ALTERNATING: "alternating",
}
Picture = tuple[str, str]
_Row = tuple[str, float, tuple[float, float] | None, str]


def forest(measurement: Measurement, rows: Sequence[Published]) -> Picture:
    """Return every part's interval over the margin, and below them what others published of one pair each."""
    drawn = [row for one in measurement.parts if (row := _row(one, main=one is measurement.main)) is not None]
    drawn += [(one.label, one.slowdown, None, _MUTED) for one in rows]
    margin = 100 * measurement.main.part.design.margin

    def draw(axes: Axes) -> None:
        axes.axvspan(-margin, margin, color=_BAND, lw=0)
        axes.axvline(0, color=_LINE, lw=1)
        for place, (_, middle, ends, colour) in enumerate(drawn):
            if ends is not None:
                axes.plot([100 * ends[0], 100 * ends[1]], [place, place], color=colour, lw=2.5, solid_capstyle="butt")
            axes.plot([100 * middle], [place], "o" if ends else "x", color=colour, ms=6)
        axes.set_yticks(range(len(drawn)), [one[0] for one in drawn])
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        reach = 1.25 * max([2 * margin, *(100 * abs(edge) for one in drawn for edge in (one[1], *(one[2] or ())))])
        # One published pair at −30 % would hide an interval of half a percent.
        axes.set_xscale("symlog", linthresh=2 * margin, linscale=1.2)
        axes.set_xlim(-reach, reach)
        ticks = [one for one in (-100, -10, -margin, 0, margin, 10, 100) if abs(one) < reach]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(FixedLocator([]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("slowdown δ, percent")

    others = " Crosses are what others published: one pair each, no interval." if rows else ""
    caption = (
        f"Slowdown with its 95 % interval; the band is the margin of ±{margin:g} % that was named before. Beyond twice "
        f"that the scale is logarithmic.{others}"
    )
    return _picture("forest", draw, caption, height=0.9 + 0.26 * len(drawn))


def sessions(measurement: Measurement) -> Picture:
    """Return every attempt's contrast in order; those that ended early lie below."""
    parts = [one for one in (measurement.main, measurement.part(Mode.NULL)) if one is not None]
    parts = parts[:1] if parts[0] is parts[-1] else parts

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=_LINE, lw=1)
        values = [100 * float(row["contrast"]) for one in parts for row in _rows(one) if row["contrast"] is not None]
        floor = min([0.0, *values]) - 0.12 * max(max([0.5, *values]) - min([0.0, *values]), 0.5)
        for one, colour, mark in zip(
            reversed(parts), (_RAW, _PROTECTED)[-len(parts) :], "so"[-len(parts) :], strict=True
        ):
            rows = list(enumerate(_rows(one), 1))
            counted = [(at, 100 * float(row["contrast"])) for at, row in rows if row["contrast"] is not None]
            ended = [at for at, row in rows if row["contrast"] is None]
            places, contrasts = zip(*counted, strict=True) if counted else ((), ())
            axes.plot(places, contrasts, mark, color=colour, ms=4, label=_NAMES[one.mode])
            if ended:
                axes.plot(ended, [floor] * len(ended), "x", color=colour, ms=6, label=f"ended early ({one.mode.value})")
        axes.set_xlabel("session, in order")
        axes.set_ylabel("contrast, percent")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2, fontsize=8)

    return _picture("sessions", draw, "Each session's contrast in order; a cross is an attempt that does not count.")


def jobs(main: Measured) -> Picture:
    """Return what protection adds to a job of some length: δ + F/D with its band."""
    result, cycle = main.analysis["result"], main.analysis["lifecycle"]
    hours = [10 ** (-1.2 + 0.03 * step) for step in range(101)]
    steady, ends = float(result["slowdown"]), result["slowdown_95"]
    fixed, fixed_ends = float(cycle["seconds"]), cycle["seconds_95"]

    def cost(slope: float, once: float) -> list[float]:
        return [100 * (slope + once / (3600 * one)) for one in hours]

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=_LINE, lw=1)
        if ends is not None and fixed_ends is not None:
            low, high = (cost(float(ends[end]), float(fixed_ends[end])) for end in ("low", "high"))
            axes.fill_between(hours, low, high, color=_BAND, lw=0)
        axes.plot(hours, cost(steady, fixed), color=_PROTECTED, lw=2)
        axes.set_xscale("log")
        axes.set_xlim(hours[0], hours[-1])
        axes.xaxis.set_major_locator(FixedLocator([0.25, 1, 4, 24]))
        axes.xaxis.set_minor_locator(FixedLocator([]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "15 min" if value < 1 else f"{value:g} h"))
        axes.set_xlabel("length of the raw job, D")
        axes.set_ylabel("δ + F/D, percent")

    caption = "What protection adds to a job: what a run pays once weighs less the longer it is."
    if ends is not None and fixed_ends is not None:
        caption += " The band is the 95 % interval."
    return _picture("jobs", draw, caption)


def phases(found: Phases) -> Picture:
    """Return a step of each arm, divided into its phases."""
    arms = (("raw", _RAW), ("protected", _PROTECTED))
    names = [*(one.name for one in found.phases), REST]
    shades = [1 - 0.8 * place / len(found.phases) for place in range(len(names))]

    def draw(axes: Axes) -> None:
        for place, (_, colour) in enumerate(arms):
            left = 0.0
            for shade, (_, *both) in zip(shades, phase_rows(found), strict=True):
                width = both[place]
                axes.barh(place, width, left=left, height=0.6, color=colour, alpha=shade, edgecolor=_PAGE, lw=0.8)
                left += width
        axes.set_yticks([0, 1], [arm for arm, _ in arms])
        axes.set_ylim(1.5, -0.5)
        axes.set_xlabel("milliseconds of a step under a profiler")
        keys = [Patch(color=_INK, alpha=shade) for shade in shades]
        figure = axes.get_figure()
        assert isinstance(figure, Figure)  # noqa: S101 - `_picture` made it
        figure.legend(keys, names, loc="outside upper center", ncols=4, fontsize=8, handlelength=1)

    caption = (
        f"Where the time of a step goes: means of {found.steps} steps of each arm in one session of their own. A "
        "profiler slows them down, and one pair of processes is no measure of what protection costs."
    )
    return _picture("phases", draw, caption, height=2.3)


def phase_rows(found: Phases) -> list[tuple[str, float, float]]:
    """Return each phase with the milliseconds of a raw and a protected step in it, and at last what is in none."""
    per_ms = found.steps * 1e6
    rows = [(one.name, one.raw_ns / per_ms, one.protected_ns / per_ms) for one in found.phases]
    raw = found.raw_ns / per_ms - sum(one for _, one, _ in rows)
    protected = found.protected_ns / per_ms - sum(one for _, _, one in rows)
    return [*rows, (REST, max(0.0, raw), max(0.0, protected))]


def _picture(name: str, draw: Any, caption: str, *, height: float = 2.7) -> Picture:
    with mpl.rc_context():
        # What a user has set for other pictures does not change these.
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
        draw(figure.add_subplot())
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue().decode()
    text = text[text.index("<svg") :]
    # Several pictures stand on one page, and their names must not meet.
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    label = escape(caption, quote=True)
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg role="img" aria-label="{label}" viewBox="\1">', text, count=1
    ), caption


def _row(one: Measured, *, main: bool) -> _Row | None:
    result = one.analysis["result"]
    if result is None:
        return None
    ends = result["slowdown_95"]
    interval = None if ends is None else (float(ends["low"]), float(ends["high"]))
    return _NAMES[one.mode], float(result["slowdown"]), interval, _PROTECTED if main else _RAW


def _rows(one: Measured) -> list[dict[str, Any]]:
    return list(one.analysis["sessions"])
