"""The table at the top: every headline number once, with its interval and a line on how to read it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from glasshouse.bench.overhead.artifact import Part
from glasshouse.bench.overhead.interval import Interval
from glasshouse.bench.report.html import Cell, Markup, table, tag
from glasshouse.bench.report.numbers import between, duration, p_value, percent, seconds
from glasshouse.bench.report.view import View

__all__ = ["summary"]

_NO = "not measured"
_Row = tuple[Cell, Cell, Cell]


def summary(view: View) -> Markup:
    """Return the table of headline numbers."""
    rows = [
        *_steady(view.interleaved),
        *_null(view),
        *_sequential(view),
        *_direct(view),
        *_jobs(view),
        *_attempts(view),
    ]
    return table(("Quantity", "Value", "95 % interval"), rows, caption="The numbers", class_="numbers")


def _named(name: str, gloss: str) -> Markup:
    return tag("span", name, tag("small", gloss))


def _steady(part: Part | None) -> Iterator[_Row]:
    slowdown = _named("Slowdown δ", "extra time per training step")
    loss = _named("Throughput loss", "1 − protected rate / raw rate; the published definition")
    if part is None or (found := part.analysis.result) is None or part.analysis.claim is None:
        why = _NO if part is None else "no block counts"
        yield slowdown, why, ""
        return
    yield slowdown, tag("b", percent(found.slowdown)), between(found.slowdown_interval())
    yield loss, percent(found.throughput_loss), between(found.throughput_loss_interval())
    yield (
        _named("Log ratio", "ln of protected over raw time per step; what is estimated"),
        _plain(found.log_ratio),
        _ends(found.interval()),
    )
    least = found.minimum_detectable
    yield (
        _named("Minimum detectable effect", "a cost of this size is seen in 80 % of such runs; log ratio"),
        "no interval" if least is None else percent(least, sign=False),
        "",
    )
    said = part.analysis.claim
    yield (
        _named("Equivalence margin", "on the log ratio, fixed before the run; p of two one-sided tests"),
        f"±{percent(said.margin, sign=False)}",
        "no interval"
        if said.tost_p is None
        else f"90 %: {between(found.slowdown_interval(0.90))}; {p_value(said.tost_p)}",
    )


def _null(view: View) -> Iterator[_Row]:
    name = _named("Null run, slowdown", "raw against raw; has to hold 0")
    if view.null is None:
        yield name, _NO, ""
    elif (found := view.null.analysis.result) is None:
        yield name, "no block counts", ""
    else:
        yield name, percent(found.slowdown), between(found.slowdown_interval())


def _sequential(view: View) -> Iterator[_Row]:
    name = _named("Sequential, throughput loss", "one leg after the other, mean of both orders")
    if view.sequential is None:
        yield name, _NO, ""
        return
    if (found := view.sequential.analysis.sequential) is None:
        yield name, "no pair counts", ""
        return
    interval, order = found.interval(), found.order_mean
    yield name, percent(-math.expm1(-found.log_ratio)), found.label or between(_as_loss(interval))
    yield (
        _named("Order effect", "half the difference between raw first and protected first; log ratio"),
        "one order only" if found.order_effect is None else percent(found.order_effect),
        between(None if order is None else order.interval(0.95)),
    )


def _direct(view: View) -> Iterator[_Row]:
    name = _named("Direct accounting", "time inside protection hooks, summed, as slowdown")
    found = None if view.interleaved is None else view.interleaved.analysis.direct
    if found is None:
        yield name, _NO, ""
        return
    said = {True: "disagrees with δ's interval", False: "inside δ's interval", None: "nothing to compare with"}
    yield name, percent(found.slowdown, 4), said[found.disagrees]


def _jobs(view: View) -> Iterator[_Row]:
    name = _named("Once a run, F", "its lifecycle, and what else makes it start later")
    if view.lifecycle is None:
        yield name, _NO, ""
        return
    found = view.lifecycle
    ends = (
        "no interval" if found.interval is None else f"{seconds(found.interval.low)} to {seconds(found.interval.high)}"
    )
    yield name, seconds(found.seconds), ends
    if view.biased:
        yield (
            _named("A job of 15 min, 1 h, 24 h", "δ + F/D, all that protection adds"),
            "not given",
            ("δ must not be used"),
        )
    for cost in view.jobs:
        yield (
            _named(f"A job of {duration(cost.duration_s)}", "δ + F/D, all that protection adds"),
            percent(cost.relative),
            between(cost.interval),
        )


def _attempts(view: View) -> Iterator[_Row]:
    for part in view.measurement.parts:
        found, result = part.analysis.attempts, part.analysis.result
        what = "pairs of legs" if result is None and part.analysis.sequential is not None else "blocks"
        sessions = f"{found.sessions_completed} of {found.sessions_planned} planned sessions whole"
        if result is not None and result.blocks < found.included:
            sessions += f"; {result.blocks:,} blocks of {result.sessions} are in the estimate"
        yield (
            _named(f"Counted, {part.mode.value}", "of those begun; the rest has a reason each"),
            f"{found.included:,} of {found.started:,} {what}",
            sessions,
        )


def _plain(value: float) -> str:
    return f"{value:+.6f}".replace("-", "\u2212")


def _ends(interval: Interval | None) -> str:
    return "no interval" if interval is None else f"{_plain(interval.low)} to {_plain(interval.high)}"


def _as_loss(interval: Interval | None) -> Interval | None:
    return None if interval is None else Interval(low=-math.expm1(-interval.low), high=-math.expm1(-interval.high))
