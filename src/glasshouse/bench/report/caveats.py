"""What a reader has to know with the answer, in the order of how much it can change his mind."""

from __future__ import annotations

from collections.abc import Iterator

from glasshouse.bench.overhead.artifact import Part
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.estimate import Word
from glasshouse.bench.overhead.interval import Interval
from glasshouse.bench.overhead.parity import Same
from glasshouse.bench.report.html import Cell, tag
from glasshouse.bench.report.numbers import between, count, p_value, percent
from glasshouse.bench.report.view import View
from glasshouse.bench.report.words import ASSURANCE

__all__ = ["caveats"]


def caveats(view: View) -> list[Cell]:
    """Return the sentences under the answer."""
    return [*_alarms(view), *_null(view), *_meaning(view), *_basis(view), *_assurance(view)]


def _alarm(words: str) -> Cell:
    return tag("strong", words)


def _alarms(view: View) -> Iterator[Cell]:
    for part in view.measurement.parts:
        if part.parity.word is Same.DIFFERENT and part.mode is not Mode.SEQUENTIAL:
            yield _alarm("The two arms did not train the same weights: their work differed (see Work parity).")
        if part.analysis.unsteady:
            found = count(len(part.analysis.unsteady), "session")
            yield _alarm(
                f"No steady state: {found} of the {part.mode.value} part still drifted when the warm-up was cut."
            )
    direct = None if view.interleaved is None else view.interleaved.analysis.direct
    if direct is not None and direct.disagrees:
        words = (
            f"Direct accounting disagrees: the hooks' own time is {percent(direct.slowdown, 4)}, outside the 95 "
            "% interval."
        )
        # What was planted runs outside the hooks, so that a disagreement is what one has to see.
        yield f"{words} With planted overhead it should." if view.measurement.planted_ppm else _alarm(words)


def _null(view: View) -> Iterator[Cell]:
    if view.interleaved is None and view.sequential is None:
        return
    if view.null is None:
        yield (
            "Null run: not measured. Nothing here shows that the method sees no difference where there is none; a raw "
            "against raw run beside this one would."
        )
        return
    found, said = view.null.analysis.result, view.null.analysis.claim
    if found is None or said is None or (interval := found.slowdown_interval()) is None:
        yield "Null run: it gives no interval, so it does not vouch for the method."
    elif said.word is Word.BIAS_SUSPECTED:
        yield _alarm(
            f"The null run does not hold 0: raw against raw gives {percent(found.slowdown)} ({between(interval)}). "
            "The method "
            "sees a difference where there is none; doubt the answer above by as much."
        )
    else:
        yield (
            f"Null run (raw against raw through the same machinery): {percent(found.slowdown)} "
            f"({between(interval)}). It holds "
            "0, as it has to." + _coarse(view, interval)
        )


def _coarse(view: View, interval: Interval) -> str:
    """Say of a null run that is wider than the margin what it could not see: a coarse one holds 0 easily."""
    room = max(abs(interval.low), abs(interval.high))
    said = None if view.interleaved is None else view.interleaved.analysis.claim
    if said is None or room <= said.margin:
        return ""
    return f" But it is coarse: a bias of up to {percent(room, 2, sign=False)} could hide in it, more than the margin."


def _meaning(view: View) -> Iterator[Cell]:
    said = None if view.interleaved is None else view.interleaved.analysis.claim
    found = view.estimate
    if said is None or found is None or said.tost_p is None:
        return
    margin = f"±{percent(said.margin, 2, sign=False)}"
    if said.word is Word.EQUIVALENT:
        yield (
            f"“Equivalent” means: two one-sided tests at 5 % put the effect inside {margin} "
            f"({p_value(said.tost_p)}), which is "
            f"the 90 % interval {between(found.slowdown_interval(0.90))} inside the margin. It does not mean zero."
        )
    elif said.word is Word.INCONCLUSIVE:
        yield (
            f"“Inconclusive” is not “no cost”: the interval is too wide for the margin of {margin}. A longer run "
            "can settle it."
        )
    elif said.word is Word.OVERHEAD:
        yield "“Overhead” means: the 95 % interval lies wholly above 0 and is not inside the margin of " + margin + "."
    elif said.word is Word.BIAS_SUSPECTED:
        yield "“Bias suspected” is the word for any interval wholly below 0; there is no word for “faster”."


def _basis(view: View) -> Iterator[Cell]:
    part = view.interleaved or view.null
    if part is None or (found := part.analysis.result) is None:
        return
    if found.sessions > 1:
        yield (
            f"From {count(found.sessions, 'fresh process pair')} and {count(found.blocks, 'block')}; the interval "
            "is over "
            "process pairs, so that a pair's own effect is in it."
        )
    else:
        yield (
            f"From one process pair and {count(found.blocks, 'block')}: another pair on the same machine can differ "
            "by more than "
            "this interval. Several sessions would show it."
        )
    unused = [session.number for session in part.analysis.sessions if session not in view.usable]
    if unused:
        named = ", ".join(map(str, unused[:8])) + (" and more" if len(unused) > 8 else "")
        yield (
            f"Not in the estimate: {count(len(unused), 'session')} ({named}) in which fewer than half of the "
            "planned blocks "
            "count. They stand in every picture of the slices."
        )
    yield from _failed(part)


def _failed(part: Part) -> Iterator[Cell]:
    found = part.analysis.attempts
    lost = found.started - found.included
    if lost:
        yield f"Of {count(found.started, 'block')} begun, {lost:,} do not count; each has its reason under Attempts."
    if found.sessions_started < found.sessions_planned:
        yield f"Only {found.sessions_started} of {count(found.sessions_planned, 'planned session')} began."


def _assurance(view: View) -> Iterator[Cell]:
    level = view.measurement.assurance
    if level is None:
        return
    yield f"Assurance level {level}: {ASSURANCE.get(level, 'not a level that this report knows')}."
