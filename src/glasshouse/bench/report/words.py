"""What a measurement says, in words that a buyer understands: never more than the claim, never without its level."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from glasshouse.bench.overhead.estimate import CONDITIONAL, Claim, Estimate, Word
from glasshouse.bench.overhead.exclusions import Rule
from glasshouse.bench.overhead.sequential import SequentialResult
from glasshouse.bench.report.html import plain
from glasshouse.bench.report.numbers import between, count, digits_for, percent
from glasshouse.bench.report.view import View
from glasshouse.errors import Code

__all__ = ["ASSURANCE", "ENDINGS", "RULES", "Answer", "answer", "phase_name", "planted"]

ASSURANCE = {
    "software": (
        "measurements are signed by the runtime itself. Whoever has root on the machine could read the run's memory "
        "and "
        "forge them; what was measured here is the cost of protection at this level, not of a stronger one"
    ),
    "tpm": "a TPM quote covers boot chain and runtime; whoever has root on the machine could read the run's memory",
    "cpu-tee": "a CPU report binds the runtime; what crosses to the GPU is visible to the machine's owner",
    "gpu-tee": "CPU and GPU reports bind the runtime; attacks on the hardware itself remain",
    "unattested": "at least one protected run that was timed has no attestation behind it",
}
RULES = {
    Rule.CLOCK: "clock anomaly",
    Rule.NONFINITE: "loss not finite",
    Rule.WORK: "arms did different work",
    Rule.ECC: "memory (ECC) error",
    Rule.THERMAL: "thermal throttling",
    Rule.POWER: "power brake",
    Rule.FOREIGN: "another process on the GPU",
    Rule.STEAL: "hypervisor took over 5 % of the CPU",
}
ENDINGS = {
    Code.NONFINITE_LOSS: "the loss was not finite",
    Code.WORKER_FAILED: "a worker failed",
    Code.WORKER_KILLED: "a worker was killed",
    Code.OUT_OF_MEMORY: "out of memory",
    Code.DISK_FULL: "the disk was full",
    Code.SCRIPT_FAILED: "the script failed",
}
_PHASES = {
    "data": "data loading",
    "forward": "forward",
    "backward": "backward",
    "gradients": "gradient communication",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The first thing that a reader sees.

    Args:
        word: of the claim, or `no claim`.
        tone: the word's class in the page: `good`, `cost`, `open` or `bad`.
        sentence: the answer in one sentence.
    """

    _: KW_ONLY
    word: str
    tone: str
    sentence: str


_TONES = {
    Word.EQUIVALENT: "good",
    Word.OVERHEAD: "cost",
    Word.INCONCLUSIVE: "open",
    Word.BIAS_SUSPECTED: "bad",
}


def phase_name(name: str) -> str:
    return _PHASES.get(name, name)


def planted(view: View) -> str | None:
    """Return the warning of a measurement in which overhead was planted, or None."""
    ppm = view.measurement.planted_ppm
    if not ppm:
        return None
    found = (
        f"Planted overhead: busy time of {percent(ppm / 1e6, 2, sign=False)} of a step was added to every protected "
        "step on "
        "purpose, to test the measurement itself. This is not the cost of protection."
    )
    if view.estimate is None or (interval := view.estimate.slowdown_interval()) is None:
        return found
    held = "holds" if interval.holds(ppm / 1e6) else "does not hold"
    return f"{found} The 95 % interval {held} what was planted."


def answer(view: View) -> Answer:
    """Return the answer of a measurement, from the strongest part that was measured."""
    if view.interleaved is not None:
        found, said = view.interleaved.analysis.result, view.interleaved.analysis.claim
        if found is None or said is None:
            started = count(view.interleaved.analysis.attempts.started, "block")
            return _none(f"Nothing can be said: {started} began and none of them counts{_level(view)}.")
        sentence = _claimed(view, found, said) + _qualifiers(view, found)
        return Answer(word=_text(said.word), tone=_TONES[said.word], sentence=sentence + ".")
    if view.sequential is not None:
        return _none(_legs(view, view.sequential.analysis.sequential))
    if view.null is not None:
        return _null_only(view)
    return _none(
        f"Only the phases of a training step of {_name(view)} were measured; what protection costs was "
        f"not{_level(view)}."
    )


def _none(sentence: str) -> Answer:
    return Answer(word="no claim", tone="open", sentence=sentence)


def _text(word: Word) -> str:
    return word.value.replace("_", " ")


def _name(view: View) -> str:
    return f"“{plain(view.workload, most=96)}”"


def _qualifiers(view: View, found: Estimate) -> str:
    label = f"; {found.label}" if found.label else ""
    ppm = view.measurement.planted_ppm
    on_purpose = f"; {percent(ppm / 1e6, 2, sign=False)} was planted on purpose" if ppm else ""
    return f"{on_purpose}{label}{_level(view)}"


def _level(view: View) -> str:
    level = view.measurement.assurance
    return "" if level is None else f"; assurance level: {plain(level)}"


def _claimed(view: View, found: Estimate, said: Claim) -> str:
    interval, name = found.slowdown_interval(), _name(view)
    if interval is None:
        return (
            f"One block of {name} gives a slowdown of {percent(found.slowdown, 2)}, from which nothing can be claimed"
        )
    edge = math.expm1(said.margin)
    digits = digits_for(interval, 0.0, edge, -edge)
    value, ends = percent(found.slowdown, digits), between(interval, digits)
    least = percent(found.minimum_detectable or 0.0, digits, sign=False)
    margin = f"±{percent(said.margin, 2, sign=False)}"
    if said.word is Word.EQUIVALENT:
        return (
            f"Protection changed the time per training step of {name} by {value} (95 % interval {ends}), inside "
            f"the margin of {margin} that was fixed before the run"
        )
    if said.word is Word.OVERHEAD:
        return (
            f"Protection made each training step of {name} {percent(found.slowdown, digits, sign=False)} slower "
            f"(95 % interval {ends}; a cost of {least} or more would be seen in four runs of five)"
        )
    if said.word is Word.BIAS_SUSPECTED:
        return (
            f"{name} seems to run {percent(-found.slowdown, digits, sign=False)} faster with protection (95 % "
            f"interval {ends}), which protection cannot cause, so something else differed between the arms and the "
            "number "
            "must not be used"
        )
    return (
        f"This run cannot tell what protection costs {name}; the time per training step changed by {value} (95 % "
        f"interval {ends}), and only a cost of {least} or more would be seen in four runs of five"
    )


def _legs(view: View, found: SequentialResult | None) -> str:
    if found is None:
        return f"Nothing can be said: no pair of legs of {_name(view)} counts{_level(view)}."
    value = -math.expm1(-found.log_ratio)
    interval = found.interval()
    ends = (
        ""
        if interval is None
        else f" (95 % interval {percent(-math.expm1(-interval.low), 2)} to {percent(-math.expm1(-interval.high), 2)})"
    )
    label = f"; {found.label}" if found.label else ""
    if found.order_effect is not None:
        label = f"; the order of the legs alone moves it by ±{percent(abs(found.order_effect), 2, sign=False)}{label}"
    return (
        f"Legs one after the other show a throughput loss of {percent(value, 2)}{ends} for {_name(view)}, and such "
        f"pairs measure warm-up, drift and order as well as protection{label}{_level(view)}."
    )


def _null_only(view: View) -> Answer:
    assert view.null is not None  # noqa: S101
    found, said = view.null.analysis.result, view.null.analysis.claim
    if found is None or said is None:
        return _none("Nothing can be said: no block of the null run counts, and nothing was protected.")
    interval = found.slowdown_interval()
    if interval is None:
        held = "gives no interval"
    else:
        digits = digits_for(interval, 0.0)
        held = (
            f"95 % interval {between(interval, digits)}, which {'holds' if interval.holds(0.0) else 'does not hold'} 0"
        )
    one = f"; {CONDITIONAL}" if found.sessions == 1 else ""
    return Answer(
        word=f"null run: {_text(said.word)}",
        tone=_TONES[said.word],
        sentence=(
            f"This run checks the method and protects nothing: two raw processes of {_name(view)} differed by "
            f"{percent(found.slowdown, 2 if interval is None else digits_for(interval, 0.0))} per training step "
            f"({held}){one}."
        ),
    )
