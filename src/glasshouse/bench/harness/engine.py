"""Runs interleaved sessions: both arms alive, one of them running, the other parked.

Laws: every slice stands in the file before the next one begins; a session always gets its end, with a reason if it
did not complete; both arms of a session have ended before the next one starts. What decides how long the guard and
the warm-up last never looks at which arm was faster.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from glasshouse.bench.harness.arms import Finished, Runner
from glasshouse.bench.harness.machine import Seen
from glasshouse.bench.harness.pace import ArmLostError
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.overhead.blocks import Block
from glasshouse.bench.overhead.design import Arm, Design, Mode, Phase
from glasshouse.bench.overhead.exclusions import broken_rules
from glasshouse.bench.overhead.notes import ArmWork, SessionNote
from glasshouse.bench.overhead.slices import Outcome, Record, SessionEnd, Slice
from glasshouse.bench.overhead.warmup import State, judge
from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.evidence.results import WEIGHTS
from glasshouse.package.output_header import SALT_BYTES
from glasshouse.wire.kdf import salted, sha256
from glasshouse.wire.pacing import Go

__all__ = ["Engine", "Keeper", "Pieces", "Watch", "enders", "slice_of"]

# A guard shorter than this many times the least is lengthened for the blocks after it.
_SHORT, _ENOUGH = 1.2, 1.4


class Keeper(Protocol):
    """Where the lines go (`store.Store`)."""

    def append(self, record: Record) -> None: ...

    def note(self, note: SessionNote) -> None: ...

    def receipt(self, session: int, bundle: bytes) -> None: ...

    def make_room(self) -> None: ...


class Watch(Protocol):
    """Whoever shows a measurement to a person; called between slices only."""

    def doing(self, mode: Mode, session: int, what: str) -> None:
        """Something begins."""

    def sliced(self, design: Design, one: Slice) -> None:
        """A slice is in the file."""

    def block(self, design: Design, block: Block) -> None:
        """A measured block is complete."""

    def ended(self, design: Design, end: SessionEnd, reason: str) -> None:
        """A session has ended; `reason` says, for people, why it did not complete."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a session is made of.

    Args:
        design: fixed before the first slice.
        store: gets every line.
        arms: makes a fresh arm of either kind.
        look: looks at the machine.
        watch: told of everything.
        stop: asked before every slice.
        guard_steps: what the calibration took for a guard; at least the design's.
        burn_ns: planted in every step of P.
        patience_s: a slice that takes longer has failed.
    """

    _: KW_ONLY
    design: Design
    store: Keeper
    arms: Callable[[Arm], Runner]
    look: Callable[[], Seen]
    watch: Watch
    stop: Stop
    guard_steps: int = 0
    burn_ns: int = 0
    patience_s: float = 600.0


class Engine:
    """Runs the sessions of an interleaved or null design, in order.

    Args:
        pieces: what they are made of.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.records: list[Record] = []
        self.notes: list[SessionNote] = []

    def session(self, number: int) -> SessionEnd:
        """Run one session to its end, however it ends.

        Raises:
            UsageError: `disk-full`, when not even the session's end could be written.
        """
        session = _Session(self._pieces, number, self.records)
        end, note, reason = enders(self._pieces, session, number)
        self.records.append(end)
        self.notes.append(note)
        self._pieces.watch.ended(self._pieces.design, end, reason)
        return end


class Attempt(Protocol):
    """A session under way (`_Session`, or a pair of legs)."""

    warmup_blocks: int
    blocks_started: int
    finished: dict[Arm, Finished]

    def run(self) -> None: ...

    def close(self) -> None: ...


def enders(pieces: Pieces, session: Attempt, number: int) -> tuple[SessionEnd, SessionNote, str]:
    """Run a session and write its end and its note, whatever came of it; return them, and the reason for people."""
    outcome, code, reason = Outcome.COMPLETE, None, ""
    try:
        session.run()
    except GlasshouseError as error:
        interrupted = error.code is Code.INTERRUPTED
        outcome, code = Outcome.INTERRUPTED if interrupted else Outcome.FAILED, error.code
        reason = error.message
    finally:
        session.close()
    end = SessionEnd(
        session=number,
        launched_first=pieces.design.launched_first(number),
        warmup_blocks=session.warmup_blocks,
        blocks_started=session.blocks_started,
        outcome=outcome,
        code=code,
    )
    if code is Code.DISK_FULL:
        pieces.store.make_room()
    pieces.store.append(end)
    note = _note(number, session.finished)
    protected = session.finished.get(Arm.PROTECTED)
    if protected is not None and protected.bundle is not None:
        pieces.store.receipt(number, protected.bundle)
    pieces.store.note(note)
    return end, note, reason


def slice_of(
    pieces: Pieces,
    runners: Mapping[Arm, Runner],
    place: tuple[Phase, int, int, int, Arm],
    order: Go,
    previous: Callable[[Arm], int],
) -> Slice:
    """Let one arm run one slice, and return its line; raises `GlasshouseError`."""
    phase, session, block, position, arm = place
    if pieces.stop.asked:
        raise RunError(Code.INTERRUPTED, "the measurement was interrupted")
    waiting = runners.get(arm.other)
    ours = [pid for runner in runners.values() for pid in runner.pids()]
    parked_before, before = None if waiting is None else waiting.cpu_ns(), pieces.look()
    try:
        report = runners[arm].pace.slice(order, pieces.patience_s)
    except ArmLostError:
        raise runners[arm].why() from None
    after, parked_after = pieces.look(), None if waiting is None else waiting.cpu_ns()
    if report.done_before < previous(arm):
        raise RunError(Code.WORKER_FAILED, "an arm's count of its steps ran backwards")
    return Slice(
        session=session,
        block=block,
        position=position,
        arm=arm,
        phase=phase,
        steps=report.steps,
        guard_steps=report.guard_steps,
        guard_ns=report.guard_ns,
        t0_ns=report.t0_ns,
        t1_ns=report.t1_ns,
        done_before=report.done_before,
        done_after=report.done_after,
        first_batch=report.done_before,
        loss_finite=report.loss_finite,
        clock_skew_ns=report.skew_ns,
        parked_cpu_ns=_difference(parked_before, parked_after),
        hooks_ns=report.hooks_ns if arm is Arm.PROTECTED and pieces.design.mode is not Mode.NULL else None,
        **before.until(after, ours),
    )


class _Session:
    """One process pair."""

    def __init__(self, pieces: Pieces, number: int, records: list[Record]) -> None:
        self._pieces, self._number, self._records = pieces, number, records
        self._design = pieces.design
        self._runners: dict[Arm, Runner] = {}
        self._done = dict.fromkeys(Arm, 0)
        self._guard_steps = max(pieces.guard_steps, pieces.design.guard_steps)
        self._last_ns = 0
        self._origin_ns = time.perf_counter_ns()
        self.warmup_blocks = 0
        self.blocks_started = 0
        self.finished: dict[Arm, Finished] = {}

    def run(self) -> None:
        """Start both arms, warm up, measure, and let both train to the same count."""
        first = self._design.launched_first(self._number)
        for arm in (first, first.other):
            self._say(f"starting {_name(self._design, arm)}")
            if self._pieces.stop.asked:
                raise RunError(Code.INTERRUPTED, "the measurement was interrupted")
            # In its place before it starts: what was begun is ended.
            self._runners[arm] = self._pieces.arms(arm)
            self._runners[arm].start()
        self._say("warm-up")
        self._warm_up()
        self._say("measured")
        for index in range(self._design.blocks_per_session):
            self.blocks_started += 1
            self._pieces.watch.block(self._design, self._block(Phase.MEASURED, index))
        self._say("ending both arms")
        until = max(self._done.values()) + self._guard_steps
        for arm in (first, first.other):
            self.finished[arm] = self._runners[arm].finish(until)

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()

    def _warm_up(self) -> None:
        blocks: list[Block] = []
        while True:
            self.warmup_blocks += 1
            blocks.append(self._block(Phase.WARMUP, len(blocks)))
            if judge(blocks, self._design.warmup).state is not State.WARMING:
                return

    def _block(self, phase: Phase, index: int) -> Block:
        sequence = self._design.sequence(phase, self._number, index)
        slices: list[Slice] = []
        # Where the k-th slices of this block begin: whichever arm comes first decides, and the other follows.
        begins: list[int] = []
        previous_ns = self._last_ns
        for position, arm in enumerate(map(Arm, sequence)):
            turn = sum(one.arm is arm for one in slices)
            order = Go(
                origin_ns=self._origin_ns,
                until=begins[turn] if turn < len(begins) else self._next(arm, turn),
                steps=self._design.slice_steps,
                least_ns=None,
                guard_ns=self._design.guard_ns,
                burn_ns=self._pieces.burn_ns if arm is Arm.PROTECTED else 0,
                stamps=False,
            )
            place = (phase, self._number, index, position, arm)
            one = slice_of(self._pieces, self._runners, place, order, self._done.__getitem__)
            self._pieces.store.append(one)
            self._records.append(one)
            slices.append(one)
            self._done[arm] = one.done_after
            self._last_ns = max(self._last_ns, one.t1_ns)
            if turn == len(begins):
                begins.append(one.first_batch)
            self._pieces.watch.sliced(self._design, one)
        self._lengthen(slices)
        measured = phase is Phase.MEASURED
        return Block(
            session=self._number,
            index=index,
            phase=phase,
            sequence=sequence,
            slices=tuple(slices),
            broken=broken_rules(self._design, slices, previous_ns=previous_ns) if measured else (),
        )

    def _next(self, arm: Arm, turn: int) -> int:
        """Return the count at which a slice begins that is the first of its turn."""
        done = self._done[arm] if turn else max(self._done.values())
        return done + self._guard_steps

    def _lengthen(self, slices: Sequence[Slice]) -> None:
        """Take more guard steps from now on where they were almost too quick: at the least time arms part company."""
        least_ns = self._design.guard_ns
        quickest_ns = min(one.guard_ns / max(one.guard_steps, 1) for one in slices)
        if 0 < quickest_ns * self._guard_steps < _SHORT * least_ns:
            self._guard_steps = math.ceil(_ENOUGH * least_ns / quickest_ns)

    def _say(self, what: str) -> None:
        self._pieces.watch.doing(self._design.mode, self._number, what)


def _note(number: int, finished: Mapping[Arm, Finished]) -> SessionNote:
    protected, works = finished.get(Arm.PROTECTED), _works(finished)
    bundle = None if protected is None else protected.bundle
    return SessionNote(
        session=number,
        raw=works.get(Arm.RAW),
        protected=works.get(Arm.PROTECTED),
        lifecycle_us=None if protected is None else protected.lifecycle_us,
        imports_us=None if protected is None else protected.imports_us,
        bundle_sha256=None if bundle is None else sha256(bundle),
    )


def _works(finished: Mapping[Arm, Finished]) -> dict[Arm, ArmWork]:
    """Return what each arm did, its weights as the protected run's receipt commits to them: comparable, not guessable.

    A salt that the receipt's outputs do not give is drawn here and kept nowhere.
    """
    protected = finished.get(Arm.PROTECTED)
    given = [] if protected is None else zip(protected.outputs, protected.salts, strict=False)
    salts = [salt for (_, of, _), salt in given if of == WEIGHTS]
    salts += [os.urandom(SALT_BYTES) for one in finished.values() for _ in one.outputs]

    def work(one: Finished) -> ArmWork:
        left = iter(salts)
        outputs = tuple(
            (kind, of, salted(next(left), digest) if of == WEIGHTS else None) for kind, of, digest in one.outputs
        )
        return ArmWork(done=one.done, start_ns=one.start_ns, outputs=outputs)

    return {arm: work(one) for arm, one in finished.items()}


def _name(design: Design, arm: Arm) -> str:
    if arm is Arm.RAW:
        return "the raw arm"
    return "the second raw arm" if design.mode is Mode.NULL else "the protected arm"


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)
