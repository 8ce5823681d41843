"""What a worker recorded of its own steps, read strictly (spec/measurement.md, section 3).

Law: a record that no pacer could have written under its plan is refused, and nothing is put right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.record import DECIMAL
from glasshouse.workloads.measurement.measured_steps import PHASES
from glasshouse.workloads.measurement.slots import MAX_STEPS, NONFINITE, Plan
from glasshouse_bench.documents import INSTANT
from glasshouse_bench.strict_fields import Fields

__all__ = ["MAX_PROFILED", "Integers", "Profile", "Record", "Steps", "loss", "parse", "too_long"]

Integers = NDArray[np.int64]

MAX_BYTES = 64 << 20
MAX_PROFILED = 256
_LINE_BYTES = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps of one worker, in order; one entry a step in each array.

    Args:
        slot: the number of the slot in which the step began.
        index: its place in that slot, from 0.
        begin, end: nanoseconds of CLOCK_MONOTONIC.
    """

    slot: Integers
    index: Integers
    begin: Integers
    end: Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What a profiled worker recorded of some of its steps.

    Args:
        first: the steps before them.
        steps: how many they are.
        together_ns: their length.
        phases: nanoseconds that all of them spent in each, in the order of `PHASES`.
    """

    first: int
    steps: int
    together_ns: int
    phases: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One worker's record.

    Args:
        slots: the numbers of its slots.
        hooks_ns: how long the worker waited for inputs and messages in each slot.
        cpu: processor time at the begin and the end of each slot, in nanoseconds, of shape (slots, 2).
        clocks: the stamps in order, two a slot: CLOCK_MONOTONIC, what CLOCK_BOOTTIME is ahead of it, both in
            nanoseconds, and CLOCK_REALTIME in microseconds, of shape (2·slots, 3).
        losses: one a step, as text; None where none was reported.
        tokens_per_step: or None.
        reason: why it ended: `end`, `stopped`, `full`; or None where it has no end.
        until_ns: up to when the worker followed the schedule.
        profile: of a profiled worker, whose record is of no session; None of any other.
    """

    plan: Plan
    steps: Steps
    slots: Integers
    hooks_ns: Integers
    cpu: Integers
    clocks: Integers
    losses: tuple[str | None, ...]
    tokens_per_step: int | None
    reason: str | None
    until_ns: int
    profile: Profile | None = None


def parse(data: bytes) -> Record:
    """Return a worker's record.

    Raises:
        FormatError: `too-large`, `not-canonical` or `schema-invalid` for lines of another form; `artifact-invalid` for
            steps that the plan does not lead to.
        UsageError: `usage`, for a plan outside its limits.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(Code.TOO_LARGE, f"a record of {len(data)} bytes where at most {MAX_BYTES} are allowed")
    if not data.endswith(b"\n"):
        raise FormatError(Code.SCHEMA, "the last line of a record has no end")
    values = [decode(line, max_bytes=_LINE_BYTES) for line in data[:-1].split(b"\n")]
    head = Fields(values[0], "record")
    head.choice("kind", ("steps",))
    head.integer("version", low=1, high=1)
    plan = Plan.from_json(head.any("plan"))
    tokens = None if head.null("tokens_per_step") else head.integer("tokens_per_step", low=1)
    head.end()
    reason, until_ns = _end(values.pop()) if _kind(values[-1]) == "end" else (None, 0)
    phases = values.pop() if reason is not None and _kind(values[-1]) == "phases" else None
    table = _Table(plan)
    for value in values[1:]:
        table.slot(Fields(value, "slot"))
    return table.record(tokens, reason, until_ns, phases)


def _kind(value: Json) -> Json:
    return value.get("kind") if isinstance(value, dict) else None


def _end(value: Json) -> tuple[str, int]:
    fields = Fields(value, "end")
    fields.choice("kind", ("end",))
    reason = fields.choice("reason", ("end", "full", "stopped"))
    until_ns = INSTANT.read(fields, "until_ns")
    fields.end()
    return reason, until_ns


def too_long(phases_ns: int, steps_ns: int) -> bool:
    """Return whether phases take longer than their steps; the profiler's clock is another one and has a hundredth."""
    return 100 * phases_ns > 101 * steps_ns


def _profile(value: Json, lengths: Integers) -> Profile:
    """Return what a line has of steps, of which `lengths` are all."""
    fields = Fields(value, "phases")
    fields.choice("kind", ("phases",))
    first, steps = fields.integer("first"), fields.integer("steps", low=1, high=MAX_PROFILED)
    found: dict[str, int] = {}
    left = list(PHASES)
    for one in fields.items("phases", max_items=len(PHASES)):
        phase = Fields(one, "phases.phases")
        name = phase.choice("name", left)
        left = left[left.index(name) + 1 :]
        found[name] = phase.integer("ns", low=1)
        phase.end()
    fields.end()
    together_ns = int(lengths[first : first + steps].sum())
    if first + steps > len(lengths) or too_long(sum(found.values()), together_ns):
        raise FormatError(Code.ARTIFACT_INVALID, "phases of more steps, or of longer ones, than the record has")
    return Profile(first=first, steps=steps, together_ns=together_ns, phases=found)


class _Table:
    """Takes slot lines in order, and holds them to the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps: list[tuple[int, int, int, int]] = []
        self._slots: list[int] = []
        self._hooks: list[int] = []
        self._cpu: list[tuple[int, int]] = []
        self._clocks: list[tuple[int, int, int]] = []
        self._losses: list[str | None] = []
        self._ended = 0  # the last instant so far

    def slot(self, line: Fields) -> None:
        line.choice("kind", ("slot",))
        number = line.integer("slot", high=self._plan.end_ns // self._plan.slot_ns)
        origin = number * self._plan.slot_ns
        if line.integer("first") != len(self._steps):
            raise _impossible(number, "does not count the steps before it")
        hooks_ns = line.integer("hooks_ns")
        stamps = [self._stamp(line.child(name), origin) for name in ("begin", "end")]
        steps = [_pair(value) for value in line.items("steps", max_items=self._plan.in_slot)]
        losses = [loss(value) for value in line.items("losses", max_items=self._plan.in_slot)]
        line.end()
        begin, end = stamps[0][0], stamps[1][0]
        late = begin >= min(origin + self._plan.slot_ns, self._plan.end_ns)
        again = bool(self._slots) and number <= self._slots[-1]
        if self._plan.own_slot(origin) != number or again or late or begin < self._ended:
            raise _impossible(number, "is not this worker's to begin then")
        if len(losses) != len(steps) or len(self._steps) + len(steps) > MAX_STEPS:
            raise _impossible(number, "has another number of losses than of steps, or too many")
        expected = begin - origin
        for index, (first, last) in enumerate(steps):
            # Steps of a slot lie back to back, and each begins inside it.
            if first != expected or last <= first or first >= min(self._plan.slot_ns, self._plan.end_ns - origin):
                raise _impossible(number, f"has a step {index} that the schedule does not lead to")
            self._steps.append((number, index, origin + first, origin + last))
            expected = last
        if end < max(origin + expected, begin + hooks_ns):
            raise _impossible(number, "ends before its last step, or is shorter than what is in it")
        self._ended = end
        self._slots.append(number)
        self._hooks.append(hooks_ns)
        self._cpu.append((stamps[0][3], stamps[1][3]))
        self._clocks += [stamp[:3] for stamp in stamps]
        self._losses += losses

    def record(self, tokens: int | None, reason: str | None, until_ns: int, phases: Json) -> Record:
        if reason is not None and until_ns > self._plan.end_ns:
            raise FormatError(Code.ARTIFACT_INVALID, "a record goes on after its plan's end")
        steps = _array(self._steps, 4)
        return Record(
            plan=self._plan,
            steps=Steps(slot=steps[:, 0], index=steps[:, 1], begin=steps[:, 2], end=steps[:, 3]),
            slots=np.array(self._slots, dtype=np.int64),
            hooks_ns=np.array(self._hooks, dtype=np.int64),
            cpu=_array(self._cpu, 2),
            clocks=_array(self._clocks, 3),
            losses=tuple(self._losses),
            tokens_per_step=tokens,
            reason=reason,
            until_ns=until_ns,
            profile=None if phases is None else _profile(phases, steps[:, 3] - steps[:, 2]),
        )

    def _stamp(self, fields: Fields, origin: int) -> tuple[int, int, int, int]:
        limit = 2**53 - 1
        at_ns = fields.integer("at_ns")
        boot_ns = fields.integer("boot_ns", low=-limit)
        found = (origin + at_ns, boot_ns, fields.integer("real_us", high=2**52), fields.integer("cpu_ns"))
        fields.end()
        return found


def _pair(value: Json) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2:
        first, last = value
        if type(first) is int and type(last) is int:
            return first, last
    raise FormatError(Code.SCHEMA, "slot.steps is not made of pairs of integers")


def loss(value: Json) -> str | None:
    """Return a loss as records have it; raises `FormatError` for what is none."""
    if value is None or value == NONFINITE or (isinstance(value, str) and DECIMAL.fullmatch(value)):
        return value
    raise FormatError(Code.SCHEMA, f"slot.losses has what is neither a decimal, {NONFINITE!r} nor null")


def _array(rows: Sequence[tuple[int, ...]], width: int) -> Integers:
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


def _impossible(slot: int, what: str) -> FormatError:
    return FormatError(Code.ARTIFACT_INVALID, f"slot {slot} {what}")
