"""Every number of one part, computed from its design, its notes and its records (spec/measurement.md, section 10).

Law: `analyse` reads a part's files and nothing else, one session at a time; what it returns is `analysis.json`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import numpy as np

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.wire.canonical import Json
from glasshouse.workloads.measurement.slots import BLOCK
from glasshouse_bench.artifact import Attempt, Lifecycle, Part
from glasshouse_bench.claim import Word, claim, job_costs
from glasshouse_bench.design import Design, Mode
from glasshouse_bench.estimate import Estimate, Interval, estimate
from glasshouse_bench.records import Record, parse
from glasshouse_bench.sensitivity import sensitivity
from glasshouse_bench.sessions import Blocks, Session, session_of

__all__ = ["analyse", "check_same", "number"]

TOLERANCE = 1e-8
_NUMBER = re.compile(r"-?\d\.\d{11}e[+-]\d{2,3}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Looked:
    """One attempt: its note, what its records give, and of these the time in hooks and in slots of both arms."""

    note: Attempt
    found: Session
    hooks: tuple[tuple[int, int], ...]


def analyse(part: Part) -> dict[str, Json]:
    """Return the analysis of a part.

    Raises:
        FormatError: files that are missing, cannot be read, or do not fit the design or each other.
        UsageError: `usage`, a record of a schedule outside its limits.
    """
    design = part.design
    looked = [_look(part, note) for note in part.notes()]
    used = [one for one in looked if one.found.blocks is not None]
    blocks = [one.found.blocks for one in used if one.found.blocks is not None]
    cycles = [one.note.lifecycle for one in used if one.note.lifecycle is not None]
    background = _background(design, used)
    found = None
    if blocks:
        found = estimate(
            [one.contrast for one in blocks],
            background=background or 0.0,
            widening=design.widening,
            contention=[] if design.mode.whole else [one.contention for one in blocks],
        )
    return {
        "attempts": _attempts(design, looked),
        "background": _or_null(background),
        "claim": None if found is None else _claim(design, looked, found, background),
        "hooks": _hooks(used),
        "jobs": None if found is None or not cycles else _jobs(found, cycles),
        "lifecycle": _lifecycle(cycles) if cycles else None,
        "order_effect": _order_effect(design, used),
        "result": None if found is None else _result(found, blocks),
        "sensitivity": None if not blocks or design.mode.whole else _sensitivity(design, blocks),
        "sessions": [_session(one) for one in looked],
        "steps": {name: _steps(blocks, arm) if blocks else None for name, arm in (("protected", 1), ("raw", 0))},
        "version": 1,
    }


def number(value: float) -> str:
    """Return a number as text of twelve significant digits; zero has no sign."""
    return f"{value + 0.0:.11e}"


def check_same(found: Json, expected: Json, where: str = "analysis") -> None:
    """Refuse an analysis that is not the recomputed one.

    Numbers may differ by 1e-8 of the larger, or by 1e-12, because libraries round differently; all else is equal.

    Raises:
        VerificationError: `artifact-invalid`, naming the first member that differs.
    """
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if set(found) != set(expected):
            _refuse(where)
        for name in sorted(expected):
            check_same(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, str) and isinstance(found, str):
        numbers = all(_NUMBER.fullmatch(text) for text in (found, expected))
        if found != expected and not (
            numbers and math.isclose(float(found), float(expected), rel_tol=TOLERANCE, abs_tol=1e-12)
        ):
            _refuse(where)
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(expected):
            _refuse(where)
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            check_same(mine, theirs, f"{where}[{index}]")
    elif type(found) is not type(expected) or found != expected:
        _refuse(where)


def _look(part: Part, note: Attempt) -> _Looked:
    design, data = part.design, part.records(note)
    records = [None if one is None else parse(one) for one in data]
    for record, arm in zip(records, "RP", strict=True):
        if record is not None and record.plan != design.plan(note.session, arm, end_ns=record.plan.end_ns):
            raise FormatError(Code.ARTIFACT_INVALID, f"a record of session {note.session} follows another schedule")
    raw, protected = records
    if raw is not None and protected is not None and design.mode.whole:
        _check_order(design, note, raw, protected)
    found = session_of(
        raw,
        protected,
        length_ns=design.length_ns,
        observed=_stolen(design, note),
        throttled=any(sample.throttled for sample in note.samples),
    )
    if protected is not None and note.background is not None:
        launched_ns = note.protected.launched_ns
        if launched_ns is None or note.background.over_ns > protected.until_ns - launched_ns:
            raise FormatError(
                Code.ARTIFACT_INVALID, f"the background of session {note.session} is spread over more than its run"
            )
    return _Looked(
        note=note, found=found, hooks=tuple(_hooks_of(one) for one in records if one is not None and found.blocks)
    )


def _check_order(design: Design, note: Attempt, raw: Record, protected: Record) -> None:
    first, second = (raw, protected) if design.raw_first(note.session) else (protected, raw)
    if len(first.clocks) and len(second.clocks) and first.clocks[-1, 0] > second.clocks[0, 0]:
        raise FormatError(
            Code.ARTIFACT_INVALID, f"the processes of session {note.session} ran in another order than was drawn"
        )


def _stolen(design: Design, note: Attempt) -> dict[int, str]:
    """Return the blocks in which the hypervisor took more than the design allows."""
    found: dict[int, str] = {}
    block_ns, before = BLOCK * design.slot_ns, note.began.monotonic_ns
    for sample in note.samples:
        until = note.began.monotonic_ns + sample.at_ns
        if sample.steal_ppm is not None and sample.steal_ppm > design.exclusions.steal_ppm:
            found |= dict.fromkeys(range(before // block_ns, (until - 1) // block_ns + 1), "steal")
        before = until
    return found


def _hooks_of(record: Record) -> tuple[int, int]:
    begins, ends = record.clocks[0::2, 0], record.clocks[1::2, 0]
    return int(record.hooks_ns.sum()), int((ends - begins).sum())


def _background(design: Design, used: Sequence[_Looked]) -> float | None:
    """Return b; 0 in a null measurement, which has no agent, and None where it was not looked at in every session."""
    if design.mode is Mode.NULL:
        return 0.0
    spent = [one.note.background for one in used]
    if not spent or any(one is None for one in spent):
        return None
    return sum(one.spent_ns for one in spent if one) / sum(one.over_ns for one in spent if one)


def _attempts(design: Design, looked: Sequence[_Looked]) -> dict[str, Json]:
    outcomes = Counter(one.found.outcome.value for one in looked)
    excluded: Counter[str] = Counter()
    for one in looked:
        excluded.update(one.found.excluded)
    raw, protected = (sum(one.found.dropped[arm] for one in looked) for arm in (0, 1))
    return {
        "dropped_steps": {"protected": protected, "raw": raw},
        "excluded_blocks": dict(sorted(excluded.items())),
        "included_blocks": sum(len(one.found.blocks.steps) for one in looked if one.found.blocks),
        "made": len(looked),
        "outcomes": dict(sorted(outcomes.items())),
        "planned": design.sessions,
    }


def _claim(
    design: Design, looked: Sequence[_Looked], found: Estimate, background: float | None
) -> dict[str, Json] | None:
    """Return the word, and what holds back a better one than `inconclusive`."""
    if design.mode is Mode.SEQUENTIAL:
        return None
    claimed = claim(found, margin=design.margin, null=design.mode is Mode.NULL)
    held_back = {
        "attempts": len(looked) < design.sessions,
        "background": background is None and claimed.word is Word.EQUIVALENT,
        "losses": design.workload.deterministic and any(one.found.unlike_losses is not None for one in looked),
    }
    reasons = [name for name, holds in held_back.items() if holds]
    word = Word.INCONCLUSIVE if reasons and claimed.word is not Word.BIAS_SUSPECTED else claimed.word
    return {
        "held_back": reasons,
        "margin": number(design.margin),
        "tost_p": _or_null(claimed.tost_p),
        "word": word.value,
    }


def _result(found: Estimate, blocks: Sequence[Blocks]) -> dict[str, Json]:
    contrasts = [one.contrast for one in blocks]
    return {
        "contention": number(found.contention),
        "log_ratio": number(found.log_ratio),
        "minimum_detectable": _or_null(found.minimum_detectable),
        "session_deviation": None if len(contrasts) < 2 else number(float(np.std(contrasts, ddof=1))),
        "sessions": found.sessions,
        "slowdown": number(math.expm1(found.log_ratio)),
        "slowdown_95": _slowdown(found.interval()),
        "standard_error": _or_null(found.standard_error),
        "steady": found.steady,
        "steady_p": _or_null(found.steady_p),
        "without_background_95": _slowdown(found.measured()),
    }


def _lifecycle(cycles: Sequence[Lifecycle]) -> dict[str, Json]:
    fixed = estimate([one.seconds for one in cycles])
    means_us = {name: math.fsum(getattr(one, name) for one in cycles) / len(cycles) for name in asdict(cycles[0])}
    return {
        "parts_s": {name: number(mean_us / 1e6) for name, mean_us in means_us.items()},
        "seconds": number(fixed.log_ratio),
        "seconds_95": _ends(fixed.measured()),
        "sessions": len(cycles),
    }


def _jobs(found: Estimate, cycles: Sequence[Lifecycle]) -> list[Json]:
    return [
        {
            "duration_s": cost.seconds,
            "protected_s": number(cost.protected_s),
            "relative": number(cost.relative),
            "relative_95": _ends(cost.interval),
        }
        for cost in job_costs(found, [one.seconds for one in cycles])
    ]


def _hooks(used: Sequence[_Looked]) -> dict[str, Json] | None:
    """Return which part of their slots both arms waited for inputs and messages."""
    if not used:
        return None
    sums = np.array([one.hooks for one in used]).sum(axis=0)
    raw, protected = (float(spent / max(over, 1)) for spent, over in sums)
    return {"protected": number(protected), "raw": number(raw)}


def _order_effect(design: Design, used: Sequence[_Looked]) -> str | None:
    """Return half of what the contrast is larger by where the raw process ran first (Hills & Armitage 1979)."""
    if not design.mode.whole:
        return None
    orders: tuple[list[float], list[float]] = ([], [])
    for one in used:
        if one.found.blocks is not None:
            orders[design.raw_first(one.note.session)].append(one.found.blocks.contrast)
    if not all(orders):
        return None
    later, first = (math.fsum(values) / len(values) for values in orders)
    return number((first - later) / 2)


def _sensitivity(design: Design, blocks: Sequence[Blocks]) -> dict[str, Json]:
    """Return the three other looks; of whole processes there are no blocks of both arms."""
    found = sensitivity(blocks, seed=design.seed)
    return {
        "processor": _other(found.processor),
        "randomisation_p": number(found.randomisation_p),
        "trimmed": _other(found.trimmed),
    }


def _other(found: Estimate | None) -> dict[str, Json] | None:
    if found is None:
        return None
    return {"slowdown": number(math.expm1(found.log_ratio)), "slowdown_95": _slowdown(found.measured())}


def _session(one: _Looked) -> dict[str, Json]:
    found, blocks = one.found, one.found.blocks
    return {
        "blocks": 0 if blocks is None else len(blocks.steps),
        "contention": None if blocks is None else number(blocks.contention),
        "contrast": None if blocks is None else number(blocks.contrast),
        "dropped": {"protected": found.dropped[1], "raw": found.dropped[0]},
        "excluded": dict(found.excluded),
        "outcome": found.outcome.value,
        "unlike_losses": found.unlike_losses,
    }


def _steps(blocks: Sequence[Blocks], arm: int) -> dict[str, Json]:
    """Return what is counted of one arm in all sessions, and the mean length of a step."""
    count = sum(int(one.steps[:, arm].sum()) for one in blocks)
    time_ns = sum(int(one.time_ns[:, arm].sum()) for one in blocks)
    return {"counted": count, "mean_s": number(time_ns / count / 1e9)}


def _slowdown(interval: Interval | None) -> dict[str, Json] | None:
    return None if interval is None else _ends(interval.slowdown)


def _ends(interval: Interval | None) -> dict[str, Json] | None:
    return None if interval is None else {"high": number(interval.high), "low": number(interval.low)}


def _or_null(value: float | None) -> str | None:
    return None if value is None else number(value)


def _refuse(where: str) -> NoReturn:
    raise VerificationError(Code.ARTIFACT_INVALID, f"{where} is not what the records give")
