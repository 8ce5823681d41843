"""The pictures of a characterisation, in the shape of the paper's: each carries its numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from glasshouse.bench.collectives.measurement import Measurement
from glasshouse.bench.collectives.paper import PUBLISHED
from glasshouse.bench.collectives.values import Counts, Found, Kind, Way
from glasshouse.bench.collectives.words import cell_words, size_words, time_words, times_words
from glasshouse.bench.report.figures.picture import Missing, Picture
from glasshouse.bench.report.theme import LIGHT, Drawing, Sheet

__all__ = ["pictures"]

PHASES = ("seal_s", "open_s", "add_s", "system_s", "other_s", "wait_s")
PHASE_WORDS = ("seal", "open", "add", "kernel: send, receive", "control", "not on a processor")
PHASE_COLOURS = ("protected", "published", "margin-edge", "raw", "null", "rule")
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
# Lines, and how marks are filled: the leading type first.
_STYLES = (("-", "full"), ("--", "none"), (":", "none"), ("-.", "none"))
_ROW_PX = 30
_PLOT_PX = 360
_NARROW_PX = 300


def pictures(measurement: Measurement) -> tuple[Picture | Missing, ...]:
    """Return all pictures in their order; what was not measured says so."""
    return (
        _sizes(measurement),
        _iterations(measurement),
        _exposed(measurement),
        _caps(measurement),
        _phases(measurement),
    )


def _sizes(measurement: Measurement) -> Picture | Missing:
    """Return all-reduce times by size, as multiples of raw gloo: a line for each way and type."""
    title = "All-reduce by size: times raw gloo"
    measured = measurement.of(Kind.ALL_REDUCE)
    if not measured:
        return Missing(name="sizes", title=title, why="Not measured: no all-reduces in this measurement.")
    # They were measured with the judged sizes first; a line goes from the smallest to the largest.
    cells = sorted(measured, key=lambda found: (found.cell.ranks, found.cell.bytes or 0))
    dtypes = list(dict.fromkeys(found.cell.dtype for found in measured))
    styles = list(zip(dtypes, cycle(_STYLES)))
    ranks = sorted({found.cell.ranks for found in cells})
    ways = [way for way in Way if any(way in found.samples for found in cells) and way is not Way.RAW]

    def draw(sheet: Sheet) -> None:
        grids = sheet.figure.subplots(
            len(ranks) if sheet.narrow else 1, 1 if sheet.narrow else len(ranks), squeeze=False, sharey=True
        ).flatten()
        for axes, count in zip(grids, ranks, strict=True):
            mine = [found for found in cells if found.cell.ranks == count]
            for way, (dtype, (line, fill)) in product(ways, styles):
                those = [found for found in mine if found.cell.dtype == dtype and way in found.samples]
                drawn = [(found.cell.bytes or 0, found.ratio(way)) for found in those]
                axes.plot(
                    [size for size, _ in drawn],
                    [ratio.value for _, ratio in drawn],
                    MARKS[way],
                    color=LIGHT[COLOURS[way]],
                    linestyle=line,
                    fillstyle=fill,
                    label=way.value if dtype == dtypes[0] else None,
                )
                for size, ratio in drawn:
                    axes.plot([size] * 2, [ratio.low, ratio.high], color=LIGHT[COLOURS[way]], linewidth=1)
            _style(axes, sheet, title=f"{count} ranks")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_words(round(value))))
            axes.xaxis.set_minor_locator(NullLocator())
            _ratio_axis(axes)
        for dtype, (line, fill) in styles:
            grids[0].plot([], [], "o", color=LIGHT["ink"], linestyle=line, fillstyle=fill, label=dtype)
        sheet.legend(grids[0], columns=len(ways) + len(dtypes))

    rows = tuple(
        (cell_words(found.cell), way.value, time_words(found.seconds(way)), *_ratio_cells(found, way))
        for found in cells
        for way in found.samples
    )
    return Picture(
        name="sizes",
        title=title,
        caption=(
            "Medians of interleaved rounds, with 95 % intervals from resampled rounds as bars. The line at 1 is gloo "
            "in plaintext. `sealed` has shared memory between ranks of one machine; `network` and all others go over "
            "TCP, as gloo does. `plain` is `network` without AEAD: the distance between those two is the price of "
            "encryption and authentication."
        ),
        alt="All-reduce times by size as multiples of gloo, by number of ranks, way and type.",
        headers=("All-reduce", "Way", "Median", "Times raw", "95 % interval"),
        rows=rows,
        drawing=Drawing(draw=draw, height_px=_PLOT_PX, narrow_px=_NARROW_PX * len(ranks)),
    )


def _iterations(measurement: Measurement) -> Picture | Missing:
    """Return iteration times by model and ranks beside the published figures."""
    title = "Iteration time by model and ranks, times raw, beside the published figures"
    cells = _leading(measurement.of(Kind.TRAIN)) + _leading(measurement.of(Kind.REPLAY))
    if not cells:
        return Missing(name="iterations", title=title, why="Not measured: no iterations in this measurement.")
    published = [one for one in PUBLISHED if one.times is not None]

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes(grid="x")
        lines = len(cells) + len(published)
        axes.set_ylim(lines - 0.4, -0.6)
        for place, found in enumerate(cells):
            for way in found.samples:
                if way in (Way.RAW, Way.ALONE):
                    continue
                axes.plot(found.ratio(way).value, place, MARKS[way], color=LIGHT[COLOURS[way]], label=way.value)
        for place, one in enumerate(published, len(cells)):
            axes.plot([one.times or 1.0], [place], "*", color=LIGHT["published"], markersize=10, label="published")
        labels = [_short_words(found) for found in cells] + [f"published: {one.what}" for one in published]
        axes.set_yticks(range(lines), labels)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.xaxis.set_minor_locator(NullLocator())
        highest = max(one.times or 1 for one in published)
        axes.set_xticks([tick for tick in (0.5, 1, 2, 3, 5, 10, 20, 40) if tick <= highest])
        axes.axvline(1, color=LIGHT["ink"], linewidth=1)
        axes.set_xlabel("times the iteration with raw gloo")
        sheet.legend(axes, columns=6)

    rows = tuple(
        (cell_words(found.cell), way.value, time_words(found.seconds(way)), *_ratio_cells(found, way))
        for found in cells
        for way in found.samples
    )
    rows += tuple((one.testbed, one.what, "–", one.shown, one.source) for one in PUBLISHED)
    height = _ROW_PX * (len(cells) + len(published)) + 110
    return Picture(
        name="iterations",
        title=title,
        caption=(
            "Models that were trained here, computation included, and replays of the buckets of larger ones, which are "
            "communication alone: the most that an iteration could be lengthened. The published figures are from other "
            "machines, with GPUs, and from full iterations; they compare in what they say, and not in size."
        ),
        alt="Iteration times as multiples of those with gloo, by model, with the published 8.68, 41.6 and 3.03.",
        headers=("Iteration", "Way", "Median", "Times raw", "95 % interval or source"),
        rows=rows,
        drawing=Drawing(draw=draw, height_px=height, narrow_px=height + 60),
    )


def _exposed(measurement: Measurement) -> Picture | Missing:
    """Return what of an iteration is communication that the backward pass does not hide."""
    title = "Exposed communication: the iteration less the same without communication"
    cells = [found for found in _leading(measurement.of(Kind.TRAIN)) if Way.ALONE in found.samples]
    if not cells:
        return Missing(name="exposed", title=title, why="Not measured: no trained iterations in this measurement.")
    bars = [(found, way, found.exposed_s(way) or 0.0) for found in cells for way in found.samples if way != Way.ALONE]

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes(grid="x")
        for place, (found, way, seconds) in enumerate(bars):
            alone = found.seconds(Way.ALONE)
            axes.barh(place, 1e3 * alone, color=LIGHT["rule"], height=0.7)
            axes.barh(place, 1e3 * seconds, left=1e3 * alone, color=LIGHT[COLOURS[way]], height=0.7)
        axes.set_yticks(range(len(bars)), [f"{_short_words(found)}, {way.value}" for found, way, _ in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlabel("ms: computation (light), then exposed communication")

    rows = tuple(
        (cell_words(found.cell), way.value, time_words(found.seconds(Way.ALONE)), time_words(seconds))
        for found, way, seconds in bars
    )
    height = 24 * len(bars) + 60
    return Picture(
        name="exposed",
        title=title,
        caption=(
            "On this machine the ranks compute on the same processors that carry the exchange, so that little can be "
            "hidden behind the computation, in plaintext or sealed."
        ),
        alt="Computation and exposed communication of an iteration, by model and way.",
        headers=("Iteration", "Way", "Computation alone", "Exposed communication"),
        rows=rows,
        drawing=Drawing(draw=draw, height_px=height, narrow_px=height),
    )


def _caps(measurement: Measurement) -> Picture | Missing:
    """Return iteration time by bucket cap, the paper's own remedy."""
    title = "Iteration time by bucket cap, times raw with the same buckets"
    cells = [
        found for found in (*measurement.of(Kind.TRAIN), *measurement.of(Kind.REPLAY)) if found.cell.dtype == "float32"
    ]
    groups: dict[tuple[str, int], list[Found]] = {}
    for found in cells:
        groups.setdefault((found.cell.model or "", found.cell.ranks), []).append(found)
    groups = {key: sorted(many, key=_cap) for key, many in groups.items() if len(many) > 1}
    if not groups:
        return Missing(name="caps", title=title, why="Not measured: every model was measured with one bucket cap.")

    def draw(sheet: Sheet) -> None:
        columns = 1 if sheet.narrow else min(2, len(groups))
        lines = -(-len(groups) // columns)
        grids = sheet.figure.subplots(lines, columns, squeeze=False).flatten()
        for axes in grids[len(groups) :]:
            axes.set_visible(False)
        for axes, ((model, ranks), many) in zip(grids, groups.items(), strict=False):
            for way in Way:
                if way in (Way.RAW, Way.ALONE) or way not in many[0].samples:
                    continue
                axes.plot(
                    range(len(many)),
                    [found.ratio(way).value for found in many],
                    MARKS[way],
                    linestyle="-",
                    color=LIGHT[COLOURS[way]],
                    label=way.value,
                )
            _style(axes, sheet, title=f"{model}, {ranks} ranks")
            axes.set_xticks(range(len(many)), [str(found.cell.cap_mib or "default") for found in many])
            _ratio_axis(axes)
        sheet.legend(grids[0], columns=6)

    rows = tuple(
        (cell_words(found.cell), str(found.whole_buckets), way.value, time_words(found.seconds(way) / found.share))
        for many in groups.values()
        for found in many
        for way in found.samples
    )
    lines = -(-len(groups) // 2)
    return Picture(
        name="caps",
        title=title,
        caption="The cap in MiB; the default is 25 MiB with a first bucket of 1 MiB, an explicit 25 is without that.",
        alt="Iteration times as multiples of raw by bucket cap, for each swept model and number of ranks.",
        headers=("Iteration", "All-reduces", "Way", "Median, scaled to the whole model"),
        rows=rows,
        drawing=Drawing(draw=draw, height_px=240 * lines + 40, narrow_px=230 * len(groups) + 40),
    )


def _phases(measurement: Measurement) -> Picture | Missing:
    """Return where the time of the ranks goes in one exchange."""
    title = "Where the time goes: phases of one exchange, summed over the ranks"
    cells = [
        found
        for found in measurement.found
        if found.cell.dtype == "float32" and found.cell.cap_mib is None and _is_shown(found)
    ]
    bars = [(found, way, count) for found in cells for way, count in found.counts.items() if way is not Way.RAW]
    if not bars:
        return Missing(name="phases", title=title, why="Not measured: nothing was counted in this measurement.")

    def draw(sheet: Sheet) -> None:
        axes = sheet.axes(grid="x")
        for place, (_, _, count) in enumerate(bars):
            left = 0.0
            for phase, words, colour in zip(PHASES, PHASE_WORDS, PHASE_COLOURS, strict=True):
                value = 1e3 * float(getattr(count, phase))
                label = words if not place else None
                axes.barh(place, value, left=left, height=0.7, color=LIGHT[colour], label=label)
                left += value
        axes.set_yticks(range(len(bars)), [f"{_short_words(found)}, {way.value}" for found, way, _ in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlabel("ms of all ranks together")
        sheet.legend(axes, columns=6)

    height = 24 * len(bars) + 100
    return Picture(
        name="phases",
        title=title,
        caption=(
            "Counted in repetitions of their own, because counting takes time: these sums explain the medians above "
            "and are not them."
        ),
        alt="Time of an exchange by phase, for each way.",
        headers=("Exchange", "Way", "All-reduces", "AEAD calls", "AEAD bytes", "Received", *PHASE_WORDS),
        rows=tuple((cell_words(found.cell), way.value, *_count_cells(count)) for found, way, count in bars),
        drawing=Drawing(draw=draw, height_px=height, narrow_px=height + 40),
    )


def _leading(cells: Sequence[Found]) -> list[Found]:
    """Return the cells with DDP's own buckets in the leading type."""
    return [found for found in cells if found.cell.dtype == "float32" and found.cell.cap_mib is None]


def _is_shown(found: Found) -> bool:
    """Return whether a cell stands among the phases: the judged sizes of an all-reduce."""
    return found.cell.bytes in (1 << 20, 25 << 20)


def _short_words(found: Found) -> str:
    cell = found.cell
    what = size_words(cell.bytes) if cell.bytes is not None else str(cell.model)
    return f"{what}, {cell.ranks} ranks" + (" (replay)" if cell.kind is Kind.REPLAY else "")


def _cap(found: Found) -> int:
    return found.cell.cap_mib or 0


def _ratio_cells(found: Found, way: Way) -> tuple[str, str]:
    if Way.RAW not in found.samples:
        return "–", "–"
    ratio = found.ratio(way)
    return times_words(ratio.value), f"{ratio.low:.2f} to {ratio.high:.2f}"


def _count_cells(count: Counts) -> tuple[str, ...]:
    times = tuple(time_words(float(getattr(count, phase))) for phase in PHASES)
    bytes_ = round(count.seal_bytes + count.open_bytes)
    calls = f"{count.seal_calls + count.open_calls:,.0f}"
    return f"{count.all_reduces:g}", calls, size_words(bytes_), size_words(round(count.received_bytes)), *times


def _style(axes: Axes, sheet: Sheet, *, title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=LIGHT["rule"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", size=sheet.size, weight="bold")


def _ratio_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.yaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    ticks = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)
    axes.set_yticks([tick for tick in ticks if low * 0.8 <= tick <= high * 1.25])
    axes.axhline(1, color=LIGHT["ink"], linewidth=1)
