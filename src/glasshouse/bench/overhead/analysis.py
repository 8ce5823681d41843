"""All numbers of a measurement from its design and its records: what the runner writes and the verifier compares.

Law: ``analyse(design, records)`` depends on nothing else, so that whoever has the lines has the numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NoReturn

from glasshouse.bench.overhead.blocks import Attempts, Session, count, replay
from glasshouse.bench.overhead.combine import DirectAccounting, direct_accounting
from glasshouse.bench.overhead.design import Design, Mode
from glasshouse.bench.overhead.estimate import Claim, Estimate, claim, contrasts, estimate, usable
from glasshouse.bench.overhead.interval import decimal
from glasshouse.bench.overhead.sensitivity import Sensitivity, sensitivity
from glasshouse.bench.overhead.sequential import SequentialResult, sequential, sequential_pairs
from glasshouse.bench.overhead.slices import Record
from glasshouse.bench.overhead.warmup import State, judge
from glasshouse.errors import Code, VerificationError
from glasshouse.wire.canonical import Json

__all__ = ["Analysis", "analyse", "check_same"]

TOLERANCE = 1e-8
_NUMBER = re.compile(r"-?[0-9]\.[0-9]{11}e[+-][0-9]{2,3}")


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything that follows from the slices.

    Args:
        sessions: as they ran, with their blocks and the rules that exclude them.
        attempts: what was begun and what became of it.
        result: the estimate; None when sequential, or when no block counts.
        claim: the word for it; None where there is no result.
        sequential: the estimate from pairs of legs; None when interleaved, or when no pair counts.
        sensitivity: other estimators; None where there is no result.
        direct: the hooks' own time; None where it was not kept.
        parked: the largest share of a slice in which the waiting arm used a CPU; None where it was not looked at.
        unsteady: the sessions whose warm-up was cut by its cap.
    """

    _: KW_ONLY
    sessions: tuple[Session, ...]
    attempts: Attempts
    result: Estimate | None
    claim: Claim | None
    sequential: SequentialResult | None
    sensitivity: Sensitivity | None
    direct: DirectAccounting | None
    parked: float | None
    unsteady: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the recomputable part of `analysis.json` (spec/overhead-artifact.md section 8)."""
        return {
            "attempts": self.attempts.to_json(),
            "claim": None if self.claim is None else self.claim.to_json(),
            "direct": None if self.direct is None else self.direct.to_json(),
            "no_steady_state": list(self.unsteady),
            "parked": None if self.parked is None else decimal(self.parked),
            "result": None if self.result is None else self.result.to_json(),
            "sensitivity": None if self.sensitivity is None else self.sensitivity.to_json(),
            "sequential": None if self.sequential is None else self.sequential.to_json(),
        }


def analyse(design: Design, records: Iterable[Record]) -> Analysis:
    """Replay the schedule, the warm-ups and the exclusions, and compute every number.

    Args:
        design: what was fixed before the run.
        records: all lines of `slices.jsonl`, in order.

    Raises:
        VerificationError: `artifact-invalid`, records that do not follow the design.
    """
    sessions = replay(design, records)
    attempts = count(design, sessions)
    unsteady = _warmups(design, sessions)
    if design.mode is Mode.SEQUENTIAL:
        pairs = sequential_pairs(sessions)
        return Analysis(
            sessions=sessions,
            attempts=attempts,
            result=None,
            claim=None,
            sequential=sequential(pairs) if pairs else None,
            sensitivity=None,
            direct=None,
            parked=None,
            unsteady=unsteady,
        )
    used = usable(design, sessions)
    result = estimate([contrasts(session.blocks) for session in used]) if used else None
    blocks = [block for session in used for block in session.blocks]
    null = design.mode is Mode.NULL
    steady = not {session.number for session in used} & set(unsteady)
    return Analysis(
        sessions=sessions,
        attempts=attempts,
        result=result,
        claim=None if result is None else claim(result, margin=design.margin, null=null, steady=steady),
        sequential=None,
        sensitivity=None if result is None else sensitivity(design, used),
        direct=None if result is None or null else direct_accounting(blocks, result),
        parked=_parked(used),
        unsteady=unsteady,
    )


def check_same(found: Json, expected: Json, where: str = "analysis") -> None:
    """Refuse an analysis that is not the recomputed one.

    Numbers in the form of `decimal` may differ by 1e-8 of themselves, or by 1e-12, because libraries round differently;
    everything else has to be equal.

    Raises:
        VerificationError: `artifact-invalid`, naming the first member that differs.
    """
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if set(found) != set(expected):
            _refuse(where)
        for name in sorted(expected):
            check_same(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, str) and isinstance(found, str):
        if found != expected and not (_is_number(found, expected) and _close(float(found), float(expected))):
            _refuse(where)
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(expected):
            _refuse(where)
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            check_same(mine, theirs, f"{where}[{index}]")
    elif type(found) is not type(expected) or found != expected:
        _refuse(where)


def _warmups(design: Design, sessions: Sequence[Session]) -> tuple[int, ...]:
    """Return the sessions without a steady state; refuse one that did not follow the warm-up rule."""
    unsteady = []
    for session in sessions:
        if not session.end.blocks_started:
            continue
        if design.mode is Mode.SEQUENTIAL:
            _check_leg_warmups(design, session)
            continue
        found = judge(session.warmup, design.warmup)
        if found.state is State.WARMING or found.blocks != len(session.warmup):
            raise VerificationError(
                Code.ARTIFACT_INVALID,
                f"session {session.number} warmed up for {len(session.warmup)} blocks; its rule says otherwise",
            )
        if found.state is State.NO_STEADY_STATE:
            unsteady.append(session.number)
    return tuple(unsteady)


def _check_leg_warmups(design: Design, session: Session) -> None:
    warm = {one.position: one.duration_ns for block in session.warmup for one in block.slices}
    for block in session.blocks:
        for one in block.slices:
            if design.warmup.least_ns and warm.get(one.position, 0) < design.warmup.least_ns:
                raise VerificationError(
                    Code.ARTIFACT_INVALID, f"session {session.number}, leg {one.position} had too short a warm-up"
                )
            if design.leg_ns is not None and one.duration_ns < design.leg_ns:
                raise VerificationError(
                    Code.ARTIFACT_INVALID, f"session {session.number}, leg {one.position} ended before its time"
                )


def _parked(sessions: Sequence[Session]) -> float | None:
    slices = [one for session in sessions for block in session.included for one in block.slices]
    shares = [one.parked_cpu_ns / one.duration_ns for one in slices if one.parked_cpu_ns is not None]
    return max(shares) if shares and len(shares) == len(slices) else None


def _is_number(*texts: str) -> bool:
    return all(_NUMBER.fullmatch(text) for text in texts)


def _close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=1e-12)


def _refuse(where: str) -> NoReturn:
    raise VerificationError(Code.ARTIFACT_INVALID, f"{where} is not what the slices give")
