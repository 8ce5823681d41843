"""What a measurement looks like while it runs, and its result as a table.

On a terminal one line is alive, drawn between slices and never inside one; elsewhere a plain line says what begins.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table
from rich.text import Text

from glasshouse.bench.overhead.design import Mode, Phase
from glasshouse.bench.overhead.estimate import Word, contrasts, estimate
from glasshouse.cli.bench_phases import check, print_phases
from glasshouse.cli.output import printable
from glasshouse.cli.words import clock
from glasshouse.jobs.durations import format_s

if TYPE_CHECKING:
    from rich.console import Console

    from glasshouse.bench.harness.measure import Measured
    from glasshouse.bench.harness.plan import Calibration, Plan
    from glasshouse.bench.overhead.artifact import Part
    from glasshouse.bench.overhead.blocks import Block
    from glasshouse.bench.overhead.combine import DirectAccounting, JobCost
    from glasshouse.bench.overhead.design import Design
    from glasshouse.bench.overhead.lifecycle import Lifecycle
    from glasshouse.bench.overhead.slices import SessionEnd, Slice
    from glasshouse.cli.output import Output
    from glasshouse.jobs.identity import OwnerPublic

__all__ = ["Silent", "View", "print_result"]

_STYLES = {
    Word.EQUIVALENT: "bold green",
    Word.OVERHEAD: "bold yellow",
    Word.INCONCLUSIVE: "bold",
    Word.BIAS_SUSPECTED: "bold red",
}


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def calibrating(self) -> None:
        pass

    def planned(self, found: Calibration, chosen: Plan) -> None:
        pass

    def phases(self, what: str) -> None:
        pass

    def closing(self) -> None:
        pass

    def doing(self, mode: Mode, session: int, what: str) -> None:
        pass

    def sliced(self, design: Design, one: Slice) -> None:
        pass

    def block(self, design: Design, block: Block) -> None:
        pass

    def ended(self, design: Design, end: SessionEnd, reason: str) -> None:
        pass


class View:
    """Shows a measurement.

    Args:
        console: where.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._began = self._planned = time.monotonic()
        self._designs: dict[Mode, Design] = {}
        self._expected_s = 0.0
        self._blocks: dict[tuple[Mode, int], list[Block]] = {}
        self._ended = 0
        self._slices = 0
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

    def calibrating(self) -> None:
        self._where = "timing the raw workload"
        self._draw()

    def planned(self, found: Calibration, chosen: Plan) -> None:
        self._designs, self._expected_s = dict(chosen.designs), chosen.expected_s
        self._planned = time.monotonic()
        self._say(f"a step takes {found.step_ns / 1e6:.3g} ms; the workload starts in {format_s(found.start_s)}")
        for mode, design in chosen.designs.items():
            self._say(f"{mode.value}: {_planned(design)}, design {design.sha256.hex()}")
        self._say(f"about {format_s(chosen.expected_s)} from now; Ctrl-C keeps what is complete")

    def phases(self, what: str) -> None:
        self._where = f"phases of a step: {what}"
        if self._live is None and what == "warm-up":
            self._say("phases of a step, in slices of their own")
        self._draw()

    def closing(self) -> None:
        self._where = "computing the intervals, writing the report"
        self._draw()

    def doing(self, mode: Mode, session: int, what: str) -> None:
        of = self._designs[mode].sessions
        self._where = f"{mode.value} session {session + 1}/{of}: {what}"
        if self._live is None and what.startswith(("starting the raw", "measured")):
            self._say(self._where)
        self._draw()

    def sliced(self, design: Design, one: Slice) -> None:
        self._slices += 1
        if design.mode is not Mode.SEQUENTIAL:
            step = f"block {one.block + 1}"
            step += f"/{design.blocks_per_session}" if one.phase is Phase.MEASURED else ""
            self._where = f"{design.mode.value} session {one.session + 1}/{design.sessions}: {one.phase.value}, {step}"
        self._draw()

    def block(self, design: Design, block: Block) -> None:
        self._blocks.setdefault((design.mode, block.session), []).append(block)

    def ended(self, design: Design, end: SessionEnd, reason: str) -> None:
        self._ended += 1
        where = f"{design.mode.value} session {end.session + 1}/{design.sessions}"
        if end.code is not None:
            self._say(f"{where}: {end.outcome.value}: {reason} [{end.code.value}]", style="yellow")
            return
        means = self._estimate(design.mode)
        said = "" if means is None or design.mode is Mode.SEQUENTIAL else f"; so far {means}"
        self._say(f"{where}: complete{said}")

    def _say(self, text: str, style: str = "") -> None:
        passed = clock(time.monotonic() - self._began)
        self._console.print(Text.assemble((f"{passed:>7}  ", "dim"), (printable(text), style)), soft_wrap=True)

    def _draw(self) -> None:
        if self._live is None:
            return
        now = time.monotonic()
        parts = [f"{clock(now - self._began)}  {self._where}", f"{self._slices} slices"]
        shown = next((mode for mode in (Mode.INTERLEAVED, Mode.NULL) if mode in self._designs), None)
        if shown is not None and (found := self._estimate(shown)) is not None:
            parts.append(found)
            parts += self._to_margin(shown)
        if self._designs:
            parts.append(f"{clock(self._left_s(now))} left")
        self._live.update(Text("  ·  ".join(parts), overflow="ellipsis", no_wrap=True), refresh=True)

    def _left_s(self, now: float) -> float:
        total = sum(design.sessions for design in self._designs.values())
        passed = now - self._planned
        if not self._ended:
            return max(0.0, self._expected_s - passed)
        return max(0.0, passed / (self._ended + 0.5) * (total - self._ended - 0.5))

    def _half(self, mode: Mode) -> tuple[float, float] | None:
        """Return the estimate so far and half the width of its interval, on the log ratio."""
        found = [made for (which, _), blocks in self._blocks.items() if which is mode and (made := contrasts(blocks))]
        if not found:
            return None
        so_far = estimate(found)
        interval = so_far.interval()
        return None if interval is None else (so_far.log_ratio, (interval.high - interval.low) / 2)

    def _estimate(self, mode: Mode) -> str | None:
        found = self._half(mode)
        return None if found is None else f"{_percent(found[0])} ± {100 * math.expm1(found[1]):.2f} %"

    def _to_margin(self, mode: Mode) -> list[str]:
        """Say how long it would take until the interval is as narrow as the margin: its width falls with √time."""
        found, margin = self._half(mode), self._designs[mode].margin
        if found is None or found[1] <= margin:
            return []
        passed = time.monotonic() - self._planned
        return [f"±{100 * margin:.2g} % would take about {format_s(passed * (found[1] / margin) ** 2)}"]


def print_result(output: Output, measured: Measured, *, owner: OwnerPublic) -> None:
    """Print the numbers of a measurement for people, and how a stranger checks who signed it."""
    if output.as_json:
        return
    measurement = measured.measurement
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "slowdown", "95 % interval", "in a word"):
        table.add_column(name)
    for part in measurement.parts:
        table.add_row(*_row(part))
    output.console.print(table)
    if measurement.planted_ppm:
        output.say(f"Planted on purpose: {measurement.planted_ppm / 10_000:g} % of a raw step.", style="bold yellow")
    for part in measurement.parts:
        output.say("")
        output.say(part.mode.value, style="bold")
        output.facts(_facts(part))
    if measured.phases is not None:
        output.say("")
        output.say("phases of a step", style="bold")
        print_phases(output, measured.phases)
    elif measured.phases_problem:
        output.say(f"The phases could not be measured: {measured.phases_problem}", style="bold yellow")
    output.say("")
    output.facts(
        {
            "assurance": measurement.assurance,
            "took": format_s(measured.took_s),
            "ended early": None if measured.ended is None else measured.ended.value,
            "report": measured.report,
            **check(measured.folder, owner),
        }
    )


def _row(part: Part) -> tuple[str | Text, ...]:
    name, found = part.mode.value, part.analysis
    if part.mode is Mode.SEQUENTIAL:
        pairs = found.sequential
        if pairs is None:
            return name, "none", "", "no pair of legs counts"
        interval = pairs.interval()
        shown = "" if interval is None else _interval(math.expm1(interval.low), math.expm1(interval.high))
        return name, _percent(pairs.log_ratio), shown, pairs.label or "order effects are in it"
    if found.result is None or found.claim is None:
        return name, "none", "", "no block counts"
    ends = found.result.slowdown_interval()
    word = Text(found.claim.word.value.replace("_", " "), style=_STYLES[found.claim.word])
    if found.claim.word is Word.EQUIVALENT:
        word.append(f" within ±{100 * found.claim.margin:.2g} %", style="not bold")
    elif found.result.minimum_detectable is not None:
        least = 100 * math.expm1(found.result.minimum_detectable)
        word.append(f"; it would have seen {least:.2g} %", style="not bold")
    return name, _percent(found.result.log_ratio), "" if ends is None else _interval(ends.low, ends.high), word


def _facts(part: Part) -> dict[str, object]:
    found = part.analysis
    attempts, direct, cost = found.attempts, found.direct, part.lifecycle
    excluded = "".join(f", {number} excluded for {rule.value}" for rule, number in attempts.excluded)
    ended = "".join(f", {number} ended by {code.value}" for code, number in attempts.ended)
    return {
        "note": (found.result.label or None) if found.result is not None else None,
        "sessions": f"{attempts.sessions_completed} of {attempts.sessions_planned} complete{ended}",
        "blocks": f"{attempts.included} of {attempts.started} begun count{excluded}"
        + (f", {attempts.incomplete} incomplete" if attempts.incomplete else ""),
        "not observed": ", ".join(rule.value for rule in attempts.unobserved) or None,
        "not steady": f"sessions {', '.join(str(one + 1) for one in found.unsteady)}" if found.unsteady else None,
        "same weights": part.parity.word.value,
        "inside hooks": None if direct is None else _direct(direct),
        "once a run": None if cost is None else _once(cost),
        "jobs": None
        if part.jobs is None
        else "\n".join(f"{_length(job.duration_s)}: {_job(job)}" for job in part.jobs),
        "design": part.design.sha256.hex(),
    }


def _once(cost: Lifecycle) -> str:
    rest = f"later imports and sandbox {format_s(cost.start_s)}"
    return f"{format_s(cost.seconds)} (lifecycle {format_s(cost.in_receipts_s)}, {rest})"


def _direct(direct: DirectAccounting) -> str:
    against = "; more than the interval allows, or less" if direct.disagrees else ""
    return f"{100 * direct.slowdown:.4f} % of the time{against}"


def _job(job: JobCost) -> str:
    ends = job.interval
    return f"{100 * job.relative:+.2f} %" + ("" if ends is None else f" ({_interval(ends.low, ends.high)})")


def _planned(design: Design) -> str:
    if design.mode is Mode.SEQUENTIAL:
        leg = f"{design.slice_steps} steps" if design.slice_steps is not None else format_s((design.leg_ns or 0) / 1e9)
        return f"{design.sessions} pairs of legs of {leg}"
    return f"{design.sessions} sessions of {design.blocks_per_session} blocks, slices of {design.slice_steps} steps"


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.2f} %"


def _interval(low: float, high: float) -> str:
    return f"{100 * low:+.2f} % to {100 * high:+.2f} %"


def _length(seconds: int) -> str:
    return {900: "15 min", 3600: "1 h", 86400: "24 h"}.get(seconds, format_s(seconds))
