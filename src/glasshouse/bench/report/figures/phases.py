"""Where a step's time goes, raw against protected."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.phases import ArmPhases
from glasshouse.bench.report.figures.picture import Missing, Picture
from glasshouse.bench.report.numbers import percent, step_time
from glasshouse.bench.report.theme import LIGHT, Drawing, Sheet
from glasshouse.bench.report.view import View
from glasshouse.bench.report.words import phase_name
from glasshouse.wire.pacing import PHASES

__all__ = ["phases"]

_TITLE = "Where a training step's time goes, raw against protected"
_NAMES = {Arm.RAW: "raw", Arm.PROTECTED: "protected"}
_REST = "residual"
_RESIDUAL = "everything else"


def phases(view: View) -> Picture | Missing:
    """Return the phase bars."""
    found = view.measurement.phases
    if found is None:
        return Missing(name="phases", title=_TITLE, why="Not measured: the command glasshouse bench phases does it.")
    names = _ordered(list(found.arms.values()))
    rows = [
        (label, {arm: _time(of, name) for arm, of in found.arms.items()})
        for name, label in [*((name, phase_name(name)) for name in names), (None, _RESIDUAL)]
    ]
    most = max(max(times.values()) for _, times in rows) or 1.0
    size, unit = (1e6, "ms") if most >= 1e5 else (1e3, "µs")

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes(grid="x")
        for place, (label, times) in enumerate(rows):
            for shift, arm in ((-0.19, Arm.RAW), (0.19, Arm.PROTECTED)):
                if arm in times:
                    _bar(
                        axes,
                        sheet,
                        arm,
                        place + shift + (0.12 if sheet.narrow else 0),
                        times[arm] / size,
                        first=not place,
                    )
            if sheet.narrow:
                axes.text(
                    0, place - 0.3, label, transform=axes.get_yaxis_transform(), va="bottom", size=sheet.size - 0.5
                )
        if sheet.narrow:
            axes.set_yticks([])
        else:
            axes.set_yticks(range(len(rows)), [label for label, _ in rows])
            axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.4, -0.75)
        axes.set_xlim(0, 1.18 * most / size)
        axes.set_xlabel(f"median time per step, {unit}")
        sheet.legend(axes)

    numbers = tuple(
        (label, *(step_time(times[arm]) if arm in times else "not measured" for arm in _NAMES)) for label, times in rows
    )
    return Picture(
        name="phases",
        title=_TITLE,
        caption=(
            "Medians over stamped slices, which run in blocks of their own and are in no other figure. What the stamps "
            f"themselves change: {_perturbation(found.arms)}.{_unmarked(names)}"
        ),
        alt="Time per step by phase. "
        + "; ".join(f"{row[0]}: raw {row[1]}, protected {row[2]}" for row in numbers)
        + ".",
        headers=("Phase", "Raw", "Protected"),
        rows=numbers,
        drawing=Drawing(draw=draw, height_px=44 * len(rows) + 90, narrow_px=66 * len(rows) + 90),
    )


def _bar(axes: Axes, sheet: Sheet, arm: Arm, place: float, value: float, *, first: bool) -> None:
    raw = arm is Arm.RAW
    colour = LIGHT["raw" if raw else "protected"]
    axes.barh(
        place,
        value,
        height=0.34 if not sheet.narrow else 0.3,
        color=colour if raw else LIGHT["paper"],
        edgecolor=colour,
        hatch=None if raw else "////",
        label=_NAMES[arm] if first else None,
    )
    axes.annotate(
        f"{value:.2f}" if value >= 0.1 else f"{value:.3f}",
        (value, place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        size=sheet.size - 1,
    )


def _ordered(arms: list[ArmPhases]) -> list[str]:
    """Return the phases of all arms in the order of a step, unknown ones last."""
    names = {name for arm in arms for name in arm.phases_ns} - {_REST}
    return [name for name in PHASES if name in names] + sorted(names - set(PHASES))


def _time(of: ArmPhases, name: str | None) -> float:
    if name is None:
        # What the workload itself calls the rest, and what not even that covers.
        return of.residual_ns + of.phases_ns.get(_REST, 0.0)
    return of.phases_ns.get(name, 0.0)


def _unmarked(names: list[str]) -> str:
    missing = [phase_name(name) for name in PHASES if name not in names and name != _REST]
    return f" This workload has no stamp for: {', '.join(missing)}." if missing else ""


def _perturbation(arms: Mapping[Arm, ArmPhases]) -> str:
    found = [
        f"{_NAMES[arm]} {percent(of.perturbation)}" if of.perturbation is not None else f"{_NAMES[arm]} not measured"
        for arm, of in arms.items()
    ]
    return ", ".join(found)
