"""From what was planned to what counts: no attempt is lost on the way."""

from __future__ import annotations

from glasshouse.bench.overhead.artifact import Part
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.report.figures.picture import Missing, Picture
from glasshouse.bench.report.theme import LIGHT, Drawing, Sheet
from glasshouse.bench.report.view import View
from glasshouse.bench.report.words import ENDINGS, RULES

__all__ = ["attempts"]

_TITLE = "What became of every attempt"
_PARTS = {Mode.INTERLEAVED: "interleaved", Mode.NULL: "null", Mode.SEQUENTIAL: "sequential"}
_Bar = tuple[str, int, int, str]  # label, where it starts, how many, colour


def attempts(view: View) -> Picture | Missing:
    """Return the flow of blocks from planned to included, part by part."""
    parts = view.measurement.parts
    if not parts:
        return Missing(name="attempts", title=_TITLE, why="Not measured: this measurement has no blocks.")
    bars = [_bars(part) for part in parts]
    lines = sum(len(found) + 1 for found in bars)

    def draw(sheet: Sheet) -> None:
        grids = sheet.figure.subplots(
            len(parts), 1, squeeze=False, gridspec_kw={"height_ratios": [len(found) + 1 for found in bars]}
        )[:, 0]
        for axes, part, found in zip(grids, parts, bars, strict=True):
            axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
            axes.set_xticks([])
            axes.set_yticks([])
            most = max(number for _, _, number, _ in found) or 1
            axes.set_xlim(0, most * (1.12 if not sheet.narrow else 1.2))
            axes.set_ylim(len(found) - 0.35, -0.65)
            axes.set_title(f"{_PARTS[part.mode]}: {_unit(part)}", loc="left", size=sheet.size, weight="bold")
            for place, (label, start, number, colour) in enumerate(found):
                above = 0.18 if sheet.narrow else 0.0
                axes.barh(place + above, number, left=start, height=0.42 if sheet.narrow else 0.66, color=LIGHT[colour])
                axes.text(start + number + most * 0.012, place + above, f"{number:,}", va="center", ha="left")
                across = axes.get_yaxis_transform()
                if sheet.narrow:
                    axes.text(0, place - 0.08, label, va="bottom", ha="left", size=sheet.size - 0.5, transform=across)
                else:
                    axes.text(-0.012, place, label, va="center", ha="right", transform=across)

    rows = tuple(
        (_PARTS[part.mode], label, f"{number:,}")
        for part, found in zip(parts, bars, strict=True)
        for label, _, number, _ in found
    )
    return Picture(
        name="attempts",
        title=_TITLE,
        caption=(
            "Blocks from top to bottom; what was lost on the way stands where it was lost. Rules for excluding were "
            "fixed before the run, never look at the arm or at how long a slice took, and take whole blocks. A block "
            "that is excluded is not replaced."
        ),
        alt="; ".join(
            f"{_PARTS[part.mode]}: {part.analysis.attempts.started} started, {part.analysis.attempts.completed} "
            "completed, "
            f"{part.analysis.attempts.included} included"
            for part in parts
        )
        + ".",
        headers=("Part", "Blocks", "Number"),
        rows=rows,
        drawing=Drawing(draw=draw, height_px=26 * lines + 16 * len(parts) + 20, narrow_px=38 * lines + 16 * len(parts)),
    )


def _unit(part: Part) -> str:
    return "pairs of legs" if part.mode is Mode.SEQUENTIAL else "blocks of four slices"


def _bars(part: Part) -> list[_Bar]:
    found = part.analysis.attempts
    bars: list[_Bar] = [("planned", 0, found.blocks_planned, "rule"), ("started", 0, found.started, "null")]
    if found.blocks_planned > found.started:
        bars.insert(1, ("never started", found.started, found.blocks_planned - found.started, "excluded"))
    if found.incomplete:
        bars.append(("not completed" + _why(part), found.completed, found.incomplete, "excluded"))
    bars.append(("completed", 0, found.completed, "muted"))
    left = found.completed
    for rule, number in found.excluded:
        left -= number
        bars.append((f"excluded: {RULES[rule]}", left, number, "excluded"))
    bars.append(("included", 0, found.included, "margin-edge"))
    result = part.analysis.result
    if result is not None and result.blocks < found.included:
        lost = found.included - result.blocks
        bars.append(("in sessions with too few", result.blocks, lost, "excluded"))
        bars.append(("in the estimate", 0, result.blocks, "margin-edge"))
    return bars


def _why(part: Part) -> str:
    codes = [ENDINGS.get(code, code.value) for code, _ in part.analysis.attempts.ended]
    return f" ({', '.join(codes)})" if codes else ""
