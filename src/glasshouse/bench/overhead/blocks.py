"""From the lines of `slices.jsonl` to blocks that count: replays the schedule and the exclusions.

Laws: every record has the one place that the design gives it, in the order in which it ran; every block that a
session began is there, complete, or is the last one of a session that did not end well; so a slice, a block
or a session that is left out, moved, or given to the other arm is refused. What cannot be told from the
records alone is that the last sessions of a plan never ran: the counts say how many did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NoReturn

from glasshouse.bench.overhead.design import Arm, Design, Mode, Phase
from glasshouse.bench.overhead.exclusions import Rule, broken_rules, unobserved
from glasshouse.bench.overhead.slices import Outcome, Record, SessionEnd, Slice
from glasshouse.errors import Code, VerificationError
from glasshouse.wire.canonical import Json

__all__ = ["Attempts", "Block", "Session", "count", "replay"]


@dataclass(frozen=True, slots=True)
class Block:
    """One block as it ran: its slices in their order, and the rules that exclude it."""

    _: KW_ONLY
    session: int
    index: int
    phase: Phase
    sequence: str
    slices: tuple[Slice, ...]
    broken: tuple[Rule, ...]

    @property
    def complete(self) -> bool:
        return len(self.slices) == len(self.sequence)

    @property
    def included(self) -> bool:
        """Whether it counts in the result."""
        return self.phase is Phase.MEASURED and self.complete and not self.broken

    @property
    def step_times_ns(self) -> tuple[float, ...]:
        """Nanoseconds per step of each slice, by position."""
        return tuple(one.duration_ns / one.steps for one in self.slices)


@dataclass(frozen=True, slots=True)
class Session:
    """One process pair: its warm-up and its measured blocks, including those that broke a rule or broke off."""

    _: KW_ONLY
    number: int
    launched_first: Arm
    warmup: tuple[Block, ...]
    blocks: tuple[Block, ...]
    end: SessionEnd

    @property
    def included(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.included)


@dataclass(frozen=True, slots=True)
class Attempts:
    """What was begun, and what became of it.

    Laws: started = completed + incomplete; completed = included + the sum of `excluded`, where a block that
    breaks several rules counts under the first in the order of `Rule`.
    """

    _: KW_ONLY
    sessions_planned: int
    sessions_started: int
    sessions_completed: int
    blocks_planned: int
    started: int
    completed: int
    included: int
    incomplete: int
    excluded: tuple[tuple[Rule, int], ...]
    ended: tuple[tuple[Code, int], ...]
    unobserved: tuple[Rule, ...]

    def to_json(self) -> dict[str, Json]:
        return {
            "blocks_completed": self.completed,
            "blocks_included": self.included,
            "blocks_incomplete": self.incomplete,
            "blocks_planned": self.blocks_planned,
            "blocks_started": self.started,
            "excluded": {rule.value: number for rule, number in self.excluded},
            "sessions_completed": self.sessions_completed,
            "sessions_ended_by": {code.value: number for code, number in self.ended},
            "sessions_planned": self.sessions_planned,
            "sessions_started": self.sessions_started,
            "unobserved_rules": [rule.value for rule in self.unobserved],
        }


def count(design: Design, sessions: Sequence[Session]) -> Attempts:
    """Return the account of all attempts."""
    begun = sum(session.end.blocks_started for session in sessions)
    blocks = [block for session in sessions for block in session.blocks if block.complete]
    excluded = Counter(block.broken[0] for block in blocks if block.broken)
    ended = Counter(session.end.code for session in sessions if session.end.code is not None)
    return Attempts(
        sessions_planned=design.sessions,
        sessions_started=len(sessions),
        sessions_completed=sum(session.end.outcome is Outcome.COMPLETE for session in sessions),
        blocks_planned=design.sessions * design.blocks_per_session,
        started=begun,
        completed=len(blocks),
        included=sum(block.included for block in blocks),
        incomplete=begun - len(blocks),
        excluded=tuple((rule, excluded[rule]) for rule in Rule if excluded[rule]),
        ended=tuple((code, ended[code]) for code in Code if ended[code]),
        unobserved=unobserved([one for block in blocks for one in block.slices]),
    )


def replay(design: Design, records: Iterable[Record]) -> tuple[Session, ...]:
    """Return the sessions of a run, checked against the schedule drawn again from the design's seed.

    Args:
        design: what was fixed before the run.
        records: all lines, in the order of the file.

    Raises:
        VerificationError: `artifact-invalid`, naming the first record that is not where the design puts it.
    """
    sessions: list[Session] = []
    open_slices: list[Slice] = []
    for record in records:
        number = len(sessions)
        if number == design.sessions:
            _refuse(f"a record after the last of {design.sessions} planned sessions")
        if record.session != number:
            _refuse(f"a record of session {record.session} where session {number} is open")
        if isinstance(record, Slice):
            open_slices.append(record)
        else:
            sessions.append(_session(design, open_slices, record))
            open_slices = []
    if open_slices:
        _refuse(f"session {len(sessions)} has slices and no end")
    return tuple(sessions)


def _session(design: Design, slices: Sequence[Slice], end: SessionEnd) -> Session:
    if end.launched_first is not design.launched_first(end.session):
        _refuse(f"session {end.session} was launched in another order than was drawn")
    if end.blocks_started > design.blocks_per_session:
        _refuse(f"session {end.session} began {end.blocks_started} of {design.blocks_per_session} blocks")
    if design.mode is Mode.SEQUENTIAL and end.warmup_blocks > 1:
        _refuse(f"session {end.session} has {end.warmup_blocks} warm-ups for its pair of legs")
    # Records stand in the order in which they ran; walking the plan beside them needs no sorting.
    plan = _plan(design, end)
    gathered: dict[tuple[Phase, int], list[Slice]] = {}
    for one in slices:
        expected = next(plan, None)
        if expected is None or (one.phase, one.block, one.position, one.arm) != expected:
            _refuse(
                f"session {end.session}, {one.phase.value} block {one.block}, position {one.position}, "
                f"arm {one.arm.value} is not what the schedule has next"
            )
        _check_guard(design, one)
        gathered.setdefault((one.phase, one.block), []).append(one)
    if end.outcome is Outcome.COMPLETE and (
        next(plan, None) is not None or end.blocks_started < design.blocks_per_session
    ):
        _refuse(f"session {end.session} is called complete and is not")
    _check_break(design, end, gathered)
    before = _ends(slices)
    return Session(
        number=end.session,
        launched_first=end.launched_first,
        warmup=tuple(_blocks(design, end, Phase.WARMUP, gathered, before)),
        blocks=tuple(_blocks(design, end, Phase.MEASURED, gathered, before)),
        end=end,
    )


def _plan(design: Design, end: SessionEnd) -> Iterator[tuple[Phase, int, int, Arm]]:
    """Yield where each slice of a session belongs, in the order of execution."""
    if design.mode is Mode.SEQUENTIAL:
        for position, arm in enumerate(design.sequence(Phase.MEASURED, end.session, 0)):
            if end.warmup_blocks:
                yield Phase.WARMUP, 0, position, Arm(arm)
            if end.blocks_started:
                yield Phase.MEASURED, 0, position, Arm(arm)
        return
    for phase, number in ((Phase.WARMUP, end.warmup_blocks), (Phase.MEASURED, end.blocks_started)):
        for block in range(number):
            for position, arm in enumerate(design.sequence(phase, end.session, block)):
                yield phase, block, position, Arm(arm)


def _check_guard(design: Design, one: Slice) -> None:
    if one.guard_steps < design.guard_steps or one.guard_ns < design.guard_ns:
        _refuse(f"session {one.session}, block {one.block}, position {one.position} had too short a guard")


def _check_break(design: Design, end: SessionEnd, gathered: dict[tuple[Phase, int], list[Slice]]) -> None:
    """Refuse a session that says it began more than one block beyond what it has: it broke off only once."""
    per = design.slices_per_block
    if design.mode is Mode.SEQUENTIAL:
        return
    whole = {
        phase: sum(len(found) == per for (where, _), found in gathered.items() if where is phase) for phase in Phase
    }
    missing = end.warmup_blocks - whole[Phase.WARMUP] + end.blocks_started - whole[Phase.MEASURED]
    if missing > 1:
        _refuse(f"session {end.session} began {missing} blocks that are not there")


def _ends(slices: Sequence[Slice]) -> dict[tuple[Phase, int], int]:
    """Return, for each block, when the slice that ran just before it ended."""
    before: dict[tuple[Phase, int], int] = {}
    last = 0
    for one in slices:
        before.setdefault((one.phase, one.block), last)
        last = max(last, one.t1_ns)
    return before


def _blocks(
    design: Design,
    end: SessionEnd,
    phase: Phase,
    gathered: dict[tuple[Phase, int], list[Slice]],
    before: dict[tuple[Phase, int], int],
) -> Iterator[Block]:
    for (where, index), found in gathered.items():
        if where is not phase:
            continue
        sequence = design.sequence(phase, end.session, index)
        judged = phase is Phase.MEASURED and len(found) == len(sequence)
        yield Block(
            session=end.session,
            index=index,
            phase=phase,
            sequence=sequence,
            slices=tuple(found),
            broken=broken_rules(design, found, previous_ns=before[where, index]) if judged else (),
        )


def _refuse(message: str) -> NoReturn:
    raise VerificationError(Code.ARTIFACT_INVALID, message)
