"""How a characterisation of collectives looks while it runs, and its result as tables.

On a terminal one line is alive, drawn between orders to the ranks; elsewhere a plain line says what is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table
from rich.text import Text

from glasshouse.bench.collectives.measurement import Bar, Measurement, NotMeasured, bars
from glasshouse.bench.collectives.paper import PUBLISHED, SOURCE
from glasshouse.bench.collectives.values import Cell, Found, Kind, Way
from glasshouse.bench.collectives.words import cell_words, size_words, time_words, times_words
from glasshouse.cli.output import printable
from glasshouse.cli.words import clock

if TYPE_CHECKING:
    from rich.console import Console

    from glasshouse.cli.output import Output

__all__ = ["Silent", "View", "print_result"]

_BUSY = 0.1


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def world(self, ranks: int) -> None:
        pass

    def cell(self, cell: Cell, number: int, of: int) -> None:
        pass

    def rounds(self, done: int, seconds_left: float) -> None:
        pass

    def found(self, found: Found) -> None:
        pass

    def skipped(self, one: NotMeasured) -> None:
        pass

    def doing(self, what: str) -> None:
        pass


class View:
    """Shows a measurement.

    Args:
        console: where.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._began = time.monotonic()
        self._where = "starting"

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def world(self, ranks: int) -> None:
        """Processes are started."""
        self.doing(f"starting {ranks} ranks")

    def cell(self, cell: Cell, number: int, of: int) -> None:
        """A cell begins."""
        self._where = f"{number}/{of}  {cell_words(cell)}"
        self._draw()

    def rounds(self, done: int, seconds_left: float) -> None:
        """Rounds of the cell were done."""
        self._draw(f"{done} rounds, {clock(seconds_left)} left for it")

    def found(self, found: Found) -> None:
        """A cell is complete."""
        best = found.best()
        said = "" if best is None else f"{best.value} {found.ratio(best).value:.2f}× raw"
        self._say(f"{self._where}: {said}, {found.rounds} rounds")

    def skipped(self, one: NotMeasured) -> None:
        """A cell was left out."""
        self._say(f"{self._where}: left out, {one.why}", style="yellow")

    def doing(self, what: str) -> None:
        """Something else begins."""
        self._where = what
        if self._live is None:
            self._say(what)
        self._draw()

    def _say(self, text: str, style: str = "") -> None:
        passed = clock(time.monotonic() - self._began)
        self._console.print(Text.assemble((f"{passed:>7}  ", "dim"), (printable(text), style)), soft_wrap=True)

    def _draw(self, more: str = "") -> None:
        if self._live is not None:
            passed = clock(time.monotonic() - self._began)
            text = "  ·  ".join(part for part in (f"{passed}  {self._where}", more) if part)
            self._live.update(Text(text, overflow="ellipsis", no_wrap=True), refresh=True)


def print_result(output: Output, measurement: Measurement, *, folder: Path) -> None:
    """Print what was found for people."""
    if output.as_json:
        return
    output.say("")
    for kind, title in (
        (Kind.ALL_REDUCE, "All-reduce: raw gloo's median, and times that"),
        (Kind.TRAIN, "Training under DDP: raw gloo's median, times that, and alone"),
        (Kind.REPLAY, "Exchange of a large model's buckets alone: raw gloo's median, and times that"),
    ):
        for ranks in sorted({one.cell.ranks for one in measurement.of(kind)}):
            mine = [one for one in measurement.of(kind) if one.cell.ranks == ranks]
            output.console.print(_cells(f"{ranks} ranks. {title}", mine))
            output.say("")
    _print_bars(output, bars(measurement), quick=measurement.quick)
    _print_paper(output)
    _print_caveats(output, measurement)
    output.say(f"samples and numbers: {folder / 'collectives.json'}")
    output.say(f"report: {folder / 'report.html'}")


def _cells(title: str, cells: Sequence[Found]) -> Table:
    """Return the cells of one number of ranks, in a table that 80 columns hold."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    ways = [way for way in Way if any(way in found.samples for found in cells)]
    for way in (*ways, "rounds"):
        table.add_column(str(way), justify="right", no_wrap=True)
    for found in cells:
        table.add_row(cell_words(found.cell, short=True), *(_way_words(found, way) for way in ways), str(found.rounds))
    return table


def _way_words(found: Found, way: Way) -> str:
    """Return the time of what others are compared with, and how many times that of raw the others take."""
    if way not in found.samples:
        return "–"
    if way in (Way.RAW, Way.ALONE) or Way.RAW not in found.samples:
        return time_words(found.seconds(way))
    return times_words(found.ratio(way).value)


def _print_bars(output: Output, judged: tuple[Bar, ...], *, quick: bool) -> None:
    if not judged:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "what", "found", "95 % interval", "bar"):
        table.add_column(name)
    for bar in judged:
        mark = Text("✓", style="green") if bar.met else Text("✗", style="bold red")
        interval = "" if bar.low is None or bar.high is None else f"{bar.low:.3f} to {bar.high:.3f}"
        table.add_row(mark, bar.what, f"{bar.found:.3f} {bar.unit}", interval, f"at most {bar.at_most:g} {bar.unit}")
    output.console.print(table)
    if quick:
        output.say("A quick trial judges nothing: a few rounds of each are no result.", style="yellow")
    output.say("")


def _print_paper(output: Output) -> None:
    words = "; ".join(f"{one.shown} {one.what}" for one in PUBLISHED)
    output.say(f"Published, on other machines: {words} ({SOURCE}).")


def _print_caveats(output: Output, measurement: Measurement) -> None:
    busy = [found for found in measurement.found if (found.foreign_cpu or 0) > _BUSY]
    if busy:
        most = max(found.foreign_cpu or 0 for found in busy)
        output.say(
            f"Other programs kept up to {most:.1f} processors busy during {len(busy)} of "
            f"{len(measurement.found)} cells.",
            style="yellow",
        )
    if measurement.failed is not None:
        output.say(f"It ended early: {measurement.failed}.", style="bold red")
    if measurement.not_measured:
        output.say(f"Not measured: {len(measurement.not_measured)} cells; the file says which, and why.")
    for memory in measurement.memory:
        output.say(
            f"peak extra memory, {memory.way.value}, {size_words(memory.bytes)}, {memory.ranks} ranks: "
            f"{size_words(memory.extra_bytes)}"
        )
