"""The schedule of a measured run: which arm has which slot of the machine's monotonic clock, and the steps in one.

Two workers that share no channel take turns because each follows the same sealed seed (spec/measurement.md, sections 2
and 3). Laws: `order_of` and `Plan` are pure; a `Pacer` begins a step only in a slot of its own, never looks at how long
a step is going to take, and keeps no more than `MAX_STEPS` steps.
"""

from __future__ import annotations

import hashlib
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeAlias

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.task.handle import decimal
from glasshouse.wire.canonical import Codec, Json, encode
from glasshouse.wire.record import Record, Sha256, choice, text

ARMS = ("P", "R")  # protected and raw; in a null measurement both are raw
ALONE = "A"  # each slot is its own: a calibration, or a run with a target of its own
BLOCK = 4
MAX_SLOT_NS = 60 * 10**9
MAX_STEPS = 1 << 18
NONFINITE = "nonfinite"

_ORDERS = ("RPPR", "PRRP")
_DOMAIN = b"glasshouse/slots/v1\x00"
# A clock that counts nanoseconds since the machine's start passes 2^53 after 104 days, so it travels as text.
_INSTANT = text(19, re.compile(r"0|[1-9][0-9]{0,18}"))
Instant: TypeAlias = Annotated[int, Codec(lambda value, where: int(_INSTANT.read(value, where)), str)]
# Clocks read one after the other differ by what interrupts the reading; a reading within this is taken.
_TIGHT_NS = 100_000


def order_of(seed: bytes, block: int) -> str:
    """Return whose the four slots of a block are: the low bit of SHA-256(domain ‖ seed ‖ u64(block))'s first byte."""
    return _ORDERS[hashlib.sha256(_DOMAIN + seed + block.to_bytes(8, "big")).digest()[0] & 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Record, name="slots"):
    """What is sealed into one worker's parameters; raises `UsageError` (`usage`) for a value outside its limits."""

    seed: Sha256  # 32 random bytes, the same in both arms
    arm: Annotated[str, choice((ALONE, *ARMS))]  # `A` for a worker that has the machine for itself
    slot_ns: int  # length of a slot, L; slot k begins at k·L of CLOCK_MONOTONIC
    steps: int  # counted steps in a slot, N
    uncounted: int  # steps before them in each slot, which run cold
    warmup_steps: int  # steps after which the worker is warm; they run in slots like all others
    end_ns: Instant  # no step begins at or after this one of CLOCK_MONOTONIC

    def __post_init__(self) -> None:
        limits = {
            "seed": len(self.seed) == 32,
            "arm": self.arm in (ALONE, *ARMS),
            "slot_ns": 1_000_000 <= self.slot_ns <= MAX_SLOT_NS,
            "steps": 1 <= self.steps <= 64,
            "uncounted": 1 <= self.uncounted <= 4,
            "warmup_steps": 0 <= self.warmup_steps < MAX_STEPS,
            "end_ns": 0 <= self.end_ns < 2**62,
        }
        for name, held in limits.items():
            if not held:
                raise UsageError(Code.USAGE, f"a schedule of slots has {name} = {getattr(self, name)!r}")

    @property
    def in_slot(self) -> int:
        """The most steps of one slot."""
        return self.steps + self.uncounted

    def own_slot(self, now_ns: int) -> int:
        """Return this arm's slot in which `now_ns` lies, or else its next one."""
        slot = now_ns // self.slot_ns
        while self.arm != ALONE and order_of(self.seed, slot // BLOCK)[slot % BLOCK] != self.arm:
            slot += 1
        return slot


@dataclass(frozen=True, slots=True)
class Stamp:
    """Clocks at one end of a slot: monotonic, how far boot time is ahead of it, processor time, real time."""

    at_ns: int
    boot_ns: int
    cpu_ns: int
    real_us: int

    def to_json(self, origin_ns: int) -> dict[str, Json]:
        """Return the stamp with its instant counted from the slot's beginning."""
        return asdict(self) | {"at_ns": self.at_ns - origin_ns}


class MachineClocks:
    """The clocks of this process and machine (Linux); tests have others."""

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def stamp(self) -> Stamp:
        """Return all clocks at one moment."""
        for _ in range(4):
            cpu, first = time.process_time_ns(), self.monotonic_ns()
            boot, real = time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.clock_gettime_ns(time.CLOCK_REALTIME)
            last = self.monotonic_ns()
            if last - first < _TIGHT_NS:
                break
        return Stamp(last, boot - last, cpu, real // 1000)


@dataclass(slots=True)
class _Taken:
    """A slot of the record."""

    number: int
    first: int  # steps done before it
    begin: Stamp
    hooks_ns: int  # so far at its begin; at its end, in it
    end: Stamp | None = None


class Pacer:
    """Takes the step boundaries of one worker, waits for its slots, and keeps the record. Not for several threads.

    Args:
        plan: the sealed schedule.
        clocks, sleep: the machine's, or a test's.
        synchronise: returns when the device has done its work; called before each stamp.
        hooks_ns: how long the thread that trains has waited for inputs and messages so far.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        clocks: MachineClocks | None = None,
        sleep: Callable[[float], None] = time.sleep,
        synchronise: Callable[[], None] = lambda: None,
        hooks_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._plan, self._clocks, self._sleep = plan, clocks or MachineClocks(), sleep
        self._synchronise, self._hooks_ns = synchronise, hooks_ns
        self._begins, self._ends = array("q"), array("q")
        self._losses: list[str | None] = []
        self._slots: list[_Taken] = []
        self._ready = False
        self._now = self._begin = 0
        self._reason = ""
        self._until_ns = 0

    def boundary(self, loss: Any = None) -> bool:
        """End a step, wait until the next may begin, and begin it; the first call ends the start-up and no step.

        Args:
            loss: of the step that ended, a number or a tensor of one element, or None.

        Returns:
            Whether to go on; False from the plan's end on, and where the record is full.

        Raises:
            PlatformError: `platform-unsupported`, where the monotonic clock went back.
        """
        if self._reason:
            return False
        self._synchronise()
        now = self._read()
        if not self._ready:
            self._ready = True
            return self._wait(0)
        slot = self._slots[-1]
        self._begins.append(self._begin)
        self._ends.append(now)
        done = len(self._ends)
        inside = now < min((slot.number + 1) * self._plan.slot_ns, self._plan.end_ns)
        going_on = inside and done - slot.first < self._plan.in_slot and done < MAX_STEPS
        if not going_on:
            # Before the loss is turned to text, so that the processor time of a slot is that of its steps.
            self._close(slot)
        self._begin = now
        self._losses.append(None if loss is None else decimal(loss) or NONFINITE)
        return True if going_on else self._wait((slot.number + 1) * self._plan.slot_ns)

    def stop(self) -> None:
        """End the record early, where the job is interrupted or its script ends by itself."""
        if not self._reason:
            self._over("stopped", self._read())

    def record(self, *, tokens_per_step: int | None = None, phases: dict[str, Json] | None = None) -> bytes:
        """Return the record as lines of canonical JSON (spec/measurement.md, section 3), whole after the end only."""
        plan = self._plan.to_json()
        lines: list[dict[str, Json]] = [
            {"kind": "steps", "plan": plan, "tokens_per_step": tokens_per_step, "version": 1},
            *(self._line(index) for index in range(len(self._slots)) if self._slots[index].end is not None),
            *([] if phases is None else [phases]),
        ]
        if self._reason:
            lines.append({"kind": "end", "reason": self._reason, "until_ns": str(self._until_ns)})
        return b"".join(encode(line) + b"\n" for line in lines)

    def _line(self, index: int) -> dict[str, Json]:
        slot, origin = self._slots[index], self._slots[index].number * self._plan.slot_ns
        last = self._slots[index + 1].first if index + 1 < len(self._slots) else len(self._ends)
        steps = range(slot.first, last)
        assert slot.end is not None  # noqa: S101 - `record` leaves out the slot that is still open
        return {
            "begin": slot.begin.to_json(origin),
            "end": slot.end.to_json(origin),
            "first": slot.first,
            "hooks_ns": slot.hooks_ns,
            "kind": "slot",
            "losses": [self._losses[step] for step in steps],
            "slot": slot.number,
            "steps": [[self._begins[step] - origin, self._ends[step] - origin] for step in steps],
        }

    def _wait(self, earliest_ns: int) -> bool:
        """Sleep until this arm's next slot from `earliest_ns` on, and begin always: an expectation would be a bias."""
        while True:
            slot = self._plan.own_slot(max(self._now, earliest_ns))
            starts = slot * self._plan.slot_ns
            if max(self._now, starts) >= self._plan.end_ns:
                return self._over("end", self._plan.end_ns)
            if len(self._ends) >= MAX_STEPS:
                return self._over("full", self._now)
            if self._now < starts:
                self._sleep((starts - self._now) / 1e9)
                self._read()
                continue
            begin = self._clocks.stamp()
            self._now = begin.at_ns
            if begin.at_ns < min(starts + self._plan.slot_ns, self._plan.end_ns):
                self._slots.append(_Taken(slot, len(self._ends), begin, self._hooks_ns()))
                self._begin = begin.at_ns
                return True

    def _over(self, reason: str, until_ns: int) -> bool:
        self._reason, self._until_ns = reason, until_ns
        if self._slots and self._slots[-1].end is None:
            self._close(self._slots[-1])
        return False

    def _close(self, slot: _Taken) -> None:
        slot.end, slot.hooks_ns = self._clocks.stamp(), self._hooks_ns() - slot.hooks_ns

    def _read(self) -> int:
        now = self._clocks.monotonic_ns()
        if now < self._now:
            raise PlatformError(
                Code.PLATFORM,
                f"the monotonic clock went back by {self._now - now} ns during a measurement",
                hint="such a machine cannot be measured on",
            )
        self._now = now
        return now
