"""The cost model's pictures: how well it holds on what it was not fitted to, and what it forecasts."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from glasshouse.bench.collectives.outlook import Outlook
from glasshouse.bench.collectives.values import Way
from glasshouse.bench.collectives.words import cell_words, size_words, time_words
from glasshouse.bench.report.figures.picture import Missing, Picture
from glasshouse.bench.report.theme import LIGHT, Drawing, Sheet

__all__ = ["COLOURS", "MARKS", "checked", "forecasts", "held_out"]

# Every way has a colour and a mark of its own, so that they stay apart in grey.
COLOURS = {
    Way.RAW: "raw",
    Way.SEALED: "margin-edge",
    Way.NETWORK: "protected-ink",
    Way.SERIAL: "excluded",
    Way.RING: "published",
    Way.DIRECT: "protected",
    Way.PLAIN: "null",
    Way.ALONE: "rule",
}
MARKS = {
    Way.RAW: "o",
    Way.SEALED: "P",
    Way.NETWORK: "^",
    Way.SERIAL: "v",
    Way.RING: "D",
    Way.DIRECT: "s",
    Way.PLAIN: "x",
    Way.ALONE: ".",
}
_PLOT_PX = 360
_NARROW_PX = 300
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def log_axis(axis: XAxis | YAxis) -> None:
    """Make an axis logarithmic, with numbers as people write them at 1, 2 and 5."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(_PLAIN)


def held_out(ahead: Outlook | None) -> Picture | Missing:
    """Return the cost model's goodness on points that its fit has not seen."""
    title = "The cost model on sizes that it has not seen"
    if ahead is None:
        return Missing(name="held-out", title=title, why="No cost model: it needs all-reduces of at least three sizes.")
    points = ahead.fit.held_out
    return Picture(
        name="held-out",
        title=title,
        caption=(
            f"Each size was left out of the fit in turn and predicted by it: {100 * ahead.fit.median_error:.0f} % off "
            f"in the median, {100 * ahead.fit.worst_error:.0f} % at worst. On the line both agree."
        ),
        alt="Predicted against measured all-reduce times of held-out sizes.",
        headers=("All-reduce", "Ranks", "Way", "Measured", "Predicted", "Error"),
        rows=tuple(
            (
                size_words(one.point.bytes),
                str(one.point.ranks),
                one.point.way.value,
                time_words(one.point.seconds),
                time_words(one.predicted_s),
                f"{100 * one.error:+.0f} %",
            )
            for one in points
        ),
        drawing=_agreement([(one.point.way, one.point.seconds, one.predicted_s) for one in points]),
    )


def checked(ahead: Outlook | None) -> Picture | Missing:
    """Return the cost model against iterations, to which nothing was fitted."""
    title = "The cost model on iterations, to which nothing was fitted"
    if ahead is None or not ahead.iterations:
        return Missing(name="checked", title=title, why="Not possible: no cost model, or no iteration beside it.")
    found = ahead.iterations
    return Picture(
        name="checked",
        title=title,
        caption=(
            "Computation alone as measured, and then the exchange of each bucket by the model, nothing hidden: on one "
            "host both need the same processors."
        ),
        alt="Predicted against measured iteration times.",
        headers=("Iteration", "Way", "Measured", "Predicted", "Error"),
        rows=tuple(
            (
                cell_words(one.found.cell),
                one.way.value,
                time_words(one.measured_s),
                time_words(one.predicted_s),
                f"{100 * one.error:+.0f} %",
            )
            for one in found
        ),
        drawing=_agreement([(one.way, one.measured_s, one.predicted_s) for one in found]),
    )


def _agreement(points: Sequence[tuple[Way, float, float]]) -> Drawing:
    """Return the drawing of predicted over measured seconds, with the line on which both agree."""

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes()
        for way in dict.fromkeys(way for way, _, _ in points):
            axes.plot(
                [1e3 * measured for one, measured, _ in points if one is way],
                [1e3 * predicted for one, _, predicted in points if one is way],
                MARKS[way],
                linestyle="none",
                color=LIGHT[COLOURS[way]],
                label=way.value,
            )
        ends = [1e3 * min(measured for _, measured, _ in points), 1e3 * max(measured for _, measured, _ in points)]
        axes.plot(ends, ends, color=LIGHT["ink"], linewidth=1)
        log_axis(axes.xaxis)
        log_axis(axes.yaxis)
        axes.set_xlabel("measured, ms")
        axes.set_ylabel("predicted, ms")
        sheet.legend(axes, columns=6)

    return Drawing(draw=draw, height_px=_PLOT_PX, narrow_px=_NARROW_PX)


def forecasts(ahead: Outlook | None) -> tuple[Picture | Missing, ...]:
    """Return one picture a forecast job."""
    if ahead is None:
        return (Missing(name="forecast", title="Forecast of an iteration", why="No cost model, so no forecast."),)
    return tuple(_forecast(ahead, index) for index in range(len(ahead.jobs)))


def _forecast(ahead: Outlook, index: int) -> Picture:
    job, found = ahead.jobs[index], ahead.forecasts[index]
    gbit = 8 * ahead.cluster.link_bytes_per_s / 1e9

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes()
        for way in ahead.fit.prices:
            mine = [one for one in found if one.way is way]
            axes.plot(
                [one.ranks for one in mine],
                [one.seconds for one in mine],
                MARKS[way],
                linestyle="-",
                color=LIGHT[COLOURS[way]],
                label=way.value,
            )
        axes.axhline(job.compute_s, color=LIGHT["ink"], linewidth=1, linestyle=(0, (5, 3)), label="computation alone")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(_PLAIN)
        log_axis(axes.yaxis)
        axes.set_xlabel("ranks, one a host")
        axes.set_ylabel("iteration, s")
        sheet.legend(axes, columns=4)

    crypto = ahead.cluster.crypto_bytes_per_s
    rate = "as measured here" if crypto is None else f"of {crypto / 1e9:g} GB/s"
    return Picture(
        name=f"forecast-{job.name}",
        title=f"Forecast: iteration of {job.name} on 8 to 4,096 ranks",
        caption=(
            f"By the cost model, for links of {gbit:g} Gbit/s, AEAD {rate} and "
            f"{ahead.flops_per_s / 1e12:g} TFLOP/s sustained a rank; buckets as DDP makes them by itself. A forecast, "
            "and beyond the measured ranks an extrapolation."
        ),
        alt=f"Forecast iteration times of {job.name} by ranks and way.",
        headers=("Ranks", "Way", "Iteration", "Exposed", "Bound by"),
        rows=tuple(
            (f"{one.ranks:,}", one.way.value, time_words(one.seconds), time_words(one.exposed_s), one.bound.value)
            for one in found
        ),
        drawing=Drawing(draw=draw, height_px=_PLOT_PX, narrow_px=_NARROW_PX),
    )
