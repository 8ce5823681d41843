"""From the records of two workers to what one session adds to the estimate (spec/measurement.md, section 4).

Laws: nothing is left out because of how long it took; the rules are the same for both arms, and looked at in one order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from glasshouse.errors import Code, FormatError
from glasshouse.workloads.measurement.slots import ALONE, BLOCK, NONFINITE, Plan
from glasshouse_bench.records import Integers, Record, Steps

__all__ = ["Blocks", "Outcome", "Session", "blocks_of", "session_of", "unlike_losses"]

SETTLE_NS = 1_000_000_000  # after both arms are warm
ALONE_NS = 5_000_000_000  # the warm-up of a whole process, as those who published theirs had it
OUTSIDE = 0.05  # of the processor time inside slots
CLOCK_NS = 1_000_000


class Outcome(StrEnum):
    """What became of a session; all but `complete` stay in the count of attempts and out of the estimate."""

    COMPLETE = "complete"
    DIED = "died"  # an arm left no record, or one without an end
    THROTTLED = "throttled"  # the machine held its own clocks down, by heat or power
    NOT_WARM = "not-warm"  # an arm had not taken its warm-up steps
    NONFINITE = "nonfinite-loss"
    SHORT = "short"  # the blocks of both arms that count last less than half of the planned time
    NO_STEPS = "no-steps"  # an arm has no counted step: no slot holds one
    OUTSIDE = "outside-slots"  # an arm used more than 5 % of its processor time outside its slots


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Sums over each block that counts, of shape (blocks, 2): column 0 is raw, column 1 protected.

    Args:
        time_ns: length of the counted steps.
        steps: their number.
        beside_ns: how much of their length the other arm was running too.
        cpu_ns: processor time of all slots.
        all_steps: number of all steps in these slots.
    """

    time_ns: Integers
    steps: Integers
    beside_ns: Integers
    cpu_ns: Integers
    all_steps: Integers

    @property
    def contrast(self) -> float:
        """ln(Σt_P/n_P) − ln(Σt_R/n_R): what the session says of ln(T_protected/T_raw)."""
        return _contrast(self.time_ns, self.steps)

    @property
    def contention(self) -> float:
        """By how much overruns beside the other arm raised the contrast at most; below 0, lowered it.

        Two workers that share all their cores each take twice as long: half of that time is the other one's.
        """
        raw, protected = (float(one) / 2 for one in self.beside_ns.sum(axis=0) / self.time_ns.sum(axis=0))
        return math.log1p(-raw) - math.log1p(-protected)

    @property
    def cpu_contrast(self) -> float:
        """The same of the processor time of all steps."""
        return _contrast(self.cpu_ns, self.all_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One session.

    Args:
        blocks: its sums; None unless it is complete.
        excluded: how many blocks each rule took out.
        dropped: counted steps that another arm's overrun overlapped, raw and protected.
        unlike_losses: the first step whose losses differ between the arms; None where all are equal.
    """

    outcome: Outcome
    blocks: Blocks | None = None
    excluded: Mapping[str, int] = field(default_factory=dict)
    dropped: tuple[int, int] = (0, 0)
    unlike_losses: int | None = None


def session_of(
    raw: Record | None,
    protected: Record | None,
    *,
    length_ns: int,
    observed: Mapping[int, str] | None = None,
    throttled: bool = False,
) -> Session:
    """Return what a session adds.

    Args:
        raw, protected: the records of two arms, or of two whole processes; None where an arm left none.
        length_ns: the planned length of the time in which both arms take their slots, or each runs alone, T.
        observed: blocks that the machine's state excludes (steal), by block, with the rule's name.
        throttled: whether a counter of throttling went up during the session.

    Raises:
        FormatError: `artifact-invalid`, for records that are not of one session.
    """
    if any(one is not None and one.profile is not None for one in (raw, protected)):
        raise FormatError(Code.ARTIFACT_INVALID, "a profiled worker's steps are of no session")
    if raw is None or protected is None or raw.reason is None or protected.reason is None:
        return Session(outcome=Outcome.DIED)
    if throttled:
        return Session(outcome=Outcome.THROTTLED)
    plan = _plan(raw, protected)
    records = (raw, protected)
    if any(len(one.losses) <= plan.warmup_steps for one in records):
        return Session(outcome=Outcome.NOT_WARM)
    if any(NONFINITE in one.losses for one in records):
        return Session(outcome=Outcome.NONFINITE)
    if plan.arm == ALONE:
        return _alone(records, plan, length_ns, observed or {})
    first, stop = window(records, plan)
    rules = {**(observed or {}), **_clock_anomalies(records, plan)}
    rules = {block: rule for block, rule in rules.items() if first <= block < stop}
    excluded = dict(sorted(Counter(rules.values()).items()))
    kept = np.array([block not in rules for block in range(first, stop)], dtype=bool)
    if 2 * int(kept.sum()) * BLOCK * plan.slot_ns < length_ns:
        return Session(outcome=Outcome.SHORT, excluded=excluded)
    blocks, dropped = blocks_of(raw.steps, protected.steps, uncounted=plan.uncounted, first=first, kept=kept)
    blocks = replace(blocks, cpu_ns=_processor_time(records, first, kept))
    if not blocks.steps.sum(axis=0).all():
        outcome = Outcome.NO_STEPS
    elif any(_outside(one, first, stop) for one in records):
        outcome = Outcome.OUTSIDE
    else:
        outcome = Outcome.COMPLETE
    return Session(
        outcome=outcome,
        blocks=blocks if outcome is Outcome.COMPLETE else None,
        excluded=excluded,
        dropped=dropped,
        unlike_losses=unlike_losses(raw, protected),
    )


def _alone(records: tuple[Record, Record], plan: Plan, length_ns: int, observed: Mapping[int, str]) -> Session:
    """Return what a session of two whole processes adds: one block, of all their steps after the warm-up."""
    rules = {**observed, **_clock_anomalies(records, plan)}
    sums, counter = [], Counter[str]()
    for one in records:
        warm = one.steps.begin >= max(int(one.steps.begin[plan.warmup_steps]), int(one.steps.begin[0]) + ALONE_NS)
        block = one.steps.slot // BLOCK
        counter.update(rules[number] for number in np.unique(block[warm]).tolist() if number in rules)
        counted = warm & ~np.isin(block, list(rules))
        slots = np.unique(one.steps.slot[counted])
        spent = int((one.cpu[:, 1] - one.cpu[:, 0])[np.isin(one.slots, slots)].sum())
        time_ns, steps = int((one.steps.end - one.steps.begin)[counted].sum()), int(np.count_nonzero(counted))
        sums.append((time_ns, steps, 0, spent, int(np.count_nonzero(np.isin(one.steps.slot, slots)))))
    excluded = dict(sorted(counter.items()))
    if any(2 * total[0] < length_ns for total in sums):
        return Session(outcome=Outcome.SHORT, excluded=excluded)
    columns = (np.array([column], dtype=np.int64) for column in zip(*sums, strict=True))
    blocks = Blocks(**dict(zip(("time_ns", "steps", "beside_ns", "cpu_ns", "all_steps"), columns, strict=True)))
    return Session(outcome=Outcome.COMPLETE, blocks=blocks, excluded=excluded, unlike_losses=unlike_losses(*records))


def window(records: tuple[Record, Record], plan: Plan) -> tuple[int, int]:
    """Return the first block, and the one after the last, that lie whole in the time in which both arms are there.

    Raises:
        IndexError: an arm has not taken its warm-up steps.
    """
    warm = max(
        int(one.steps.end[plan.warmup_steps - 1]) if plan.warmup_steps else int(one.clocks[0, 0]) for one in records
    )
    block_ns = BLOCK * plan.slot_ns
    first = -(-(warm + SETTLE_NS) // block_ns)
    return first, max(first, min(one.until_ns for one in records) // block_ns)


def blocks_of(
    raw: Steps, protected: Steps, *, uncounted: int, first: int, kept: NDArray[np.bool_]
) -> tuple[Blocks, tuple[int, int]]:
    """Return the sums of each block that is kept, without processor time, and the numbers of dropped steps.

    A step that overran counts in full in its own arm; a step that began while a step of the other arm was still going
    on is dropped, alone.

    Args:
        first: number of the first block of the window.
        kept: which of the window's blocks count.
    """
    sums, dropped = [], []
    for own, other in ((raw, protected), (protected, raw)):
        block = own.slot // BLOCK - first
        inside = (block >= 0) & (block < len(kept))
        counted = inside & (own.index >= uncounted)
        before = np.searchsorted(other.begin, own.begin)
        reached = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(other.end)))[before]
        overlapped = counted & (reached > own.begin)
        counted &= ~overlapped
        where = block[counted]
        beside = (_ran(other, own.end) - _ran(other, own.begin))[counted]
        # Sums of integers below 2^53 are exact in the double precision of bincount's weights.
        time_ns, beside_ns = (
            np.bincount(where, weights, minlength=len(kept)).astype(np.int64)
            for weights in ((own.end - own.begin)[counted], beside)
        )
        steps = np.bincount(where, minlength=len(kept))
        sums.append((time_ns, steps, beside_ns, np.bincount(block[inside], minlength=len(kept))))
        dropped.append(int(np.count_nonzero(kept[block[overlapped]])))
    time_ns, steps, beside_ns, all_steps = (np.stack(columns, axis=1)[kept] for columns in zip(*sums, strict=True))
    unknown = np.zeros_like(time_ns)
    blocks = Blocks(time_ns=time_ns, steps=steps, beside_ns=beside_ns, cpu_ns=unknown, all_steps=all_steps)
    return blocks, (dropped[0], dropped[1])


def unlike_losses(raw: Record, protected: Record) -> int | None:
    """Return the first common step at which the two arms report different losses, or None."""
    pairs = zip(raw.losses, protected.losses, strict=False)
    return next((step for step, (one, other) in enumerate(pairs) if one != other), None)


def _ran(steps: Steps, instants: Integers) -> Integers:
    """Return for how long a worker had been in steps at each instant."""
    before = np.searchsorted(steps.begin, instants)
    total = np.concatenate(([0], np.cumsum(steps.end - steps.begin)))[before]
    last = np.concatenate(([np.iinfo(np.int64).min], steps.end))[before]
    # The last step that began before the instant may be going on still.
    ran: Integers = total - np.where(last > instants, last - instants, 0)
    return ran


def _contrast(amounts: Integers, numbers: Integers) -> float:
    raw, protected = (float(one) for one in amounts.sum(axis=0) / numbers.sum(axis=0))
    return math.log(protected) - math.log(raw)


def _plan(raw: Record, protected: Record) -> Plan:
    plan, other = raw.plan, protected.plan
    # Whole processes run one after the other, each to an end of its own.
    same = {"arm": "R"} if plan.arm != ALONE else {"end_ns": str(plan.end_ns)}
    if (plan.arm, other.arm) not in (("R", "P"), (ALONE, ALONE)) or {**other.to_json(), **same} != plan.to_json():
        raise FormatError(Code.ARTIFACT_INVALID, "the two records are not the two arms of one schedule")
    return plan


def _clock_anomalies(records: tuple[Record, Record], plan: Plan) -> dict[int, str]:
    """Return the blocks within which a clock jumped, or the machine was suspended."""
    found: dict[int, str] = {}
    for record in records:
        at, boot, real_us = record.clocks.T
        passed = np.diff(at)
        jump = np.abs(np.diff(real_us) * 1000 - passed) > CLOCK_NS + passed // 1000
        blocks = at // (BLOCK * plan.slot_ns)
        for step in np.flatnonzero((np.abs(np.diff(boot)) > CLOCK_NS) | jump):
            found |= dict.fromkeys(range(int(blocks[step]), int(blocks[step + 1]) + 1), "clock")
    return found


def _processor_time(records: tuple[Record, Record], first: int, kept: NDArray[np.bool_]) -> Integers:
    columns = []
    for record in records:
        block = record.slots // BLOCK - first
        inside = (block >= 0) & (block < len(kept))
        spent = (record.cpu[:, 1] - record.cpu[:, 0])[inside]
        columns.append(np.bincount(block[inside], spent, minlength=len(kept)).astype(np.int64))
    return np.stack(columns, axis=1)[kept]


def _outside(record: Record, first: int, stop: int) -> bool:
    """Return whether this arm used too much processor time between its slots, excluded blocks included."""
    here = (record.slots // BLOCK >= first) & (record.slots // BLOCK < stop)
    inside = (record.cpu[:, 1] - record.cpu[:, 0])[here].sum()
    between = (record.cpu[1:, 0] - record.cpu[:-1, 1])[here[1:]].sum()
    return bool(between > OUTSIDE * inside)
