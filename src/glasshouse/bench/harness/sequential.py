"""Runs pairs of legs, one process after the other: 5 s of warm-up, then so many steps or so much time.

This is how published figures were made, and it is measured here to be compared with them: drift and order are in
it. The second leg starts at the batch at which the first one did.
"""

from __future__ import annotations

import time

from glasshouse.bench.harness.arms import Finished, Runner
from glasshouse.bench.harness.engine import Pieces, enders, slice_of
from glasshouse.bench.overhead.design import Arm, Mode, Phase
from glasshouse.bench.overhead.notes import SessionNote
from glasshouse.bench.overhead.slices import Record, SessionEnd, Slice
from glasshouse.wire.pacing import Go

__all__ = ["Legs"]


class Legs:
    """Runs the sessions of a sequential design, in order.

    Args:
        pieces: what they are made of.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.records: list[Record] = []
        self.notes: list[SessionNote] = []

    def session(self, number: int) -> SessionEnd:
        """Run one pair to its end, however it ends; raises as `Engine.session`."""
        end, note, reason = enders(self._pieces, _Pair(self._pieces, number, self.records), number)
        self.records.append(end)
        self.notes.append(note)
        self._pieces.watch.ended(self._pieces.design, end, reason)
        return end


class _Pair:
    """One leg of either arm."""

    def __init__(self, pieces: Pieces, number: int, records: list[Record]) -> None:
        self._pieces, self._number, self._records = pieces, number, records
        self._design = pieces.design
        self._runner: Runner | None = None
        self._origin_ns = time.perf_counter_ns()
        self._begin: int | None = None
        self._until = 0
        self.warmup_blocks = 0
        self.blocks_started = 0
        self.finished: dict[Arm, Finished] = {}

    def run(self) -> None:
        """Run either leg from the start of its process to its end."""
        for position, letter in enumerate(self._design.sequence(Phase.MEASURED, self._number, 0)):
            self._leg(position, Arm(letter))

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def _leg(self, position: int, arm: Arm) -> None:
        design, name = self._design, "raw" if arm is Arm.RAW else "protected"
        self._pieces.watch.doing(Mode.SEQUENTIAL, self._number, f"starting the {name} leg")
        runner = self._runner = self._pieces.arms(arm)
        runner.start()
        done = steps = 0
        if design.warmup.least_ns:
            self._pieces.watch.doing(Mode.SEQUENTIAL, self._number, f"warm-up of the {name} leg")
            self.warmup_blocks = 1
            warm = self._slice(Phase.WARMUP, position, arm, self._order(0, None, design.warmup.least_ns, arm), 0)
            done, steps = warm.done_after, warm.steps
        self._pieces.watch.doing(Mode.SEQUENTIAL, self._number, f"the {name} leg")
        # As far again as its own warm-up went: a second leg may be twice as fast and still begin at the same batch.
        begin = done + max(3, steps) if self._begin is None else self._begin
        self.blocks_started = 1
        order = self._order(begin, design.slice_steps, design.leg_ns, arm)
        one = self._slice(Phase.MEASURED, position, arm, order, done)
        self._begin = one.first_batch if self._begin is None else self._begin
        self._until = max(self._until, one.done_after)
        self.finished[arm] = runner.finish(self._until)
        runner.close()

    def _order(self, until: int, steps: int | None, least_ns: int | None, arm: Arm) -> Go:
        return Go(
            origin_ns=self._origin_ns,
            until=until,
            steps=steps,
            least_ns=None if steps is not None else least_ns,
            guard_ns=0,
            stamps=False,
            burn_ns=self._pieces.burn_ns if arm is Arm.PROTECTED else 0,
        )

    def _slice(self, phase: Phase, position: int, arm: Arm, order: Go, done: int) -> Slice:
        assert self._runner is not None  # noqa: S101 - its leg has begun
        place = (phase, self._number, 0, position, arm)
        one = slice_of(self._pieces, {arm: self._runner}, place, order, lambda _arm: done)
        self._pieces.store.append(one)
        self._records.append(one)
        self._pieces.watch.sliced(self._design, one)
        return one
