"""Arms that live in this process and have a clock of their own: a measurement in milliseconds, with any misfortune.

Both arms of a world share one clock, which moves only while one of them runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from glasshouse.bench.harness.arms import Finished
from glasshouse.bench.harness.machine import Seen
from glasshouse.bench.harness.pace import ArmLostError
from glasshouse.bench.overhead.blocks import Block
from glasshouse.bench.overhead.design import Arm, Design, Mode
from glasshouse.bench.overhead.notes import SessionNote
from glasshouse.bench.overhead.slices import Record, SessionEnd, Slice
from glasshouse.errors import Code, GlasshouseError, RunError, UsageError
from glasshouse.wire import pacing
from glasshouse.wire.pacing import Go

__all__ = ["FakeArm", "MemoryStore", "PacedWorld", "Quiet", "nothing_seen"]


@dataclass(slots=True)
class PacedWorld:
    """What is true of the arms.

    Args:
        step_ns: time of a raw step.
        overhead: how much longer, on the log scale, a step of P takes.
        misfortune: asked with the arm and the number of its slice in its session; changes the report, or raises.
        faster_from: from this slice on a step takes a third of the time.
    """

    _: KW_ONLY
    step_ns: int = 5_000_000
    overhead: float = 0.0
    misfortune: Callable[[Arm, int, pacing.Slice], pacing.Slice] = lambda _arm, _number, report: report
    faster_from: int = 10**9
    now_ns: int = 1_000
    started: list[Arm] = field(default_factory=list)
    closed: list[Arm] = field(default_factory=list)
    orders: list[tuple[Arm, Go]] = field(default_factory=list)

    def arms(self, arm: Arm) -> FakeArm:
        return FakeArm(self, arm)


class FakeArm:
    """One arm of a world; also its own channel."""

    start_ns = 2_000_000_000

    def __init__(self, world: PacedWorld, arm: Arm) -> None:
        self.pace: Any = self
        self.done = self.slices = 0
        self._world, self._arm = world, arm
        self._why: GlasshouseError = RunError(Code.WORKER_KILLED, "the arm was killed")

    def start(self) -> None:
        self._world.started.append(self._arm)

    def slice(self, order: Go, _timeout_s: float) -> pacing.Slice:
        world, number = self._world, self.slices
        self.slices += 1
        world.orders.append((self._arm, order))
        step_ns = world.step_ns * math.exp(world.overhead if self._arm is Arm.PROTECTED else 0.0)
        step_ns = (step_ns / 3 if number >= world.faster_from else step_ns) + order.burn_ns
        guard = max(order.until - self.done, math.ceil(order.guard_ns / step_ns))
        steps = order.steps or math.ceil((order.least_ns or 0) / step_ns)
        t0_ns = world.now_ns + math.ceil(guard * step_ns)
        t1_ns = t0_ns + math.ceil(steps * step_ns)
        report = pacing.Slice(
            done_before=self.done + guard,
            done_after=self.done + guard + steps,
            t0_ns=t0_ns,
            t1_ns=t1_ns,
            guard_steps=guard,
            guard_ns=math.ceil(guard * step_ns),
            skew_ns=0,
            hooks_ns=1000,
            loss_finite=True,
            steps=steps,
            cpu_ns=t1_ns - t0_ns,
            device_bytes=None,
            wait_ppm=None,
            phases=None,
        )
        try:
            report = world.misfortune(self._arm, number, report)
        except RunError as error:
            if error.code in (Code.DURATION_EXCEEDED, Code.INTERRUPTED):
                raise
            self._why = error
            raise ArmLostError from None
        self.done, world.now_ns = report.done_after, report.t1_ns
        return report

    def pids(self) -> tuple[int, ...]:
        return (100 if self._arm is Arm.RAW else 200,)

    def cpu_ns(self) -> int:
        return 7

    def finish(self, until: int) -> Finished:
        self.done = max(self.done, until)
        weights = ("output", "weights", self.done.to_bytes(32))
        return Finished(done=self.done, start_ns=self.start_ns, outputs=(weights,))

    def why(self) -> GlasshouseError:
        return self._why

    def close(self) -> None:
        self._world.closed.append(self._arm)


class MemoryStore:
    """Keeps the lines; its disk is full after `room` of them, until room is made."""

    def __init__(self, room: int = 10**9) -> None:
        self.records: list[Record] = []
        self.notes: list[SessionNote] = []
        self._room = room

    def append(self, record: Record) -> None:
        if len(self.records) >= self._room:
            raise UsageError(Code.DISK_FULL, "no room to write it")
        self.records.append(record)

    def note(self, note: SessionNote) -> None:
        self.notes.append(note)

    def receipt(self, session: int, bundle: bytes) -> None:
        raise AssertionError("these arms have no receipts")

    def make_room(self) -> None:
        self._room = 10**9


class Quiet:
    """Watches and remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.blocks: list[Block] = []
        self.reasons: list[str] = []

    def doing(self, mode: Mode, session: int, what: str) -> None:
        self.said.append(f"{mode.value} {session}: {what}")

    def sliced(self, design: Design, one: Slice) -> None:
        pass

    def block(self, design: Design, block: Block) -> None:
        self.blocks.append(block)

    def ended(self, design: Design, end: SessionEnd, reason: str) -> None:
        self.reasons.append(reason)


def nothing_seen() -> Seen:
    """Return a look at a machine that says nothing."""
    return Seen(cpu=None, gpu=None)
