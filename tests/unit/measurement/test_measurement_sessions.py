"""From two workers' records to one contrast: what counts, what is dropped, and what voids a session."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from glasshouse.errors import FormatError
from glasshouse_bench.records import Record, parse
from glasshouse_bench.sessions import Outcome, Session, session_of
from simulators.slot_clock import MS, SlotClock, plan, train

LENGTH_NS = 8_000 * MS
Steps = Iterable[int]


def record(arm: str, steps: Steps = (), *, clock: SlotClock | None = None, **more: Any) -> Record:
    """Take the given steps, and then steps of 10 ms to the end."""
    changes = more.pop("changes", {})
    lengths = itertools.chain(steps, itertools.repeat(10 * MS))
    return parse(train(plan(arm, **changes), clock or SlotClock(), lengths, **more).record())


def session(raw: Record, protected: Record, **more: Any) -> Session:
    return session_of(raw, protected, length_ns=LENGTH_NS, **more)


def test_the_contrast_is_the_ratio_of_the_means_of_counted_steps() -> None:
    found = session(record("R"), record("P", itertools.repeat(11 * MS)))
    assert found.outcome is Outcome.COMPLETE
    assert found.blocks is not None
    assert found.blocks.contrast == pytest.approx(math.log(1.1))
    assert found.blocks.cpu_contrast == pytest.approx(math.log(1.1))
    assert (found.blocks.steps == 10).all()
    assert (found.blocks.all_steps == 12).all()
    assert found.dropped == (0, 0)


def test_a_slow_first_step_of_each_slot_is_not_counted() -> None:
    def cold(arm: str, step_ns: int) -> Record:
        return record(arm, itertools.cycle([15 * MS, *[step_ns] * 5]))

    found = session(cold("R", 10 * MS), cold("P", 10 * MS))
    assert found.blocks is not None
    assert (found.blocks.time_ns == 100 * MS).all()


def test_only_whole_blocks_count_from_a_second_after_the_later_arm_is_warm() -> None:
    late = SlotClock(now_ns=1_500 * MS)
    found = session(record("R", changes={"warmup_steps": 6}), record("P", clock=late, changes={"warmup_steps": 6}))
    assert found.blocks is not None
    # Warm within 400 ms of 1.5 s, and a second more: blocks of 400 ms from 2.8 s or 3.2 s on, up to 10 s.
    assert len(found.blocks.steps) in {17, 18}


def test_an_overrun_counts_in_full_and_only_the_steps_that_it_overlapped_are_dropped() -> None:
    usual = record("R")
    slot = next(slot for slot in range(40, 44) if slot in usual.slots and slot + 1 not in usual.slots)
    last = int(np.flatnonzero(usual.steps.slot == slot)[-1])
    # From 50 ms in its slot on to 65 ms in the next one, which is the other arm's.
    slow = record("R", [*[10 * MS] * last, 115 * MS])
    assert int(slow.steps.end[last]) == (slot + 1) * 100 * MS + 65 * MS
    found, whole = session(slow, record("P")), session(usual, record("P"))
    assert found.blocks is not None
    assert whole.blocks is not None
    # Protected steps began at 0, 10, … 50 ms of that slot: five counted ones, and the uncounted first.
    assert found.dropped == (0, 5)
    assert (whole.blocks.steps.sum(axis=0) - found.blocks.steps.sum(axis=0)).tolist() == [0, 5]
    assert (found.blocks.time_ns.sum(axis=0) - whole.blocks.time_ns.sum(axis=0)).tolist() == [105 * MS, -50 * MS]
    # Six protected steps of 10 ms ran beside it, and the last of them ended before it did.
    assert found.blocks.beside_ns.sum(axis=0).tolist() == [60 * MS, 0]
    assert whole.blocks.contention == 0
    part = 30 * MS / int(found.blocks.time_ns[:, 0].sum())
    assert found.blocks.contention == pytest.approx(math.log(1 - part))


def test_a_suspended_machine_excludes_the_blocks_it_slept_in_and_no_other() -> None:
    clock = SlotClock()
    slept = record("R", clock=clock, before=lambda step: clock.suspend(9_000 * MS) if step == 150 else None)
    found = session(slept, record("P"))
    whole = session(record("R"), record("P"))
    assert found.excluded == {"clock": 1}
    assert found.blocks is not None
    assert whole.blocks is not None
    assert len(found.blocks.steps) == len(whole.blocks.steps) - 1


def test_a_clock_that_is_set_excludes_its_blocks_and_the_rule_is_the_same_for_both_arms() -> None:
    for arm in "RP":
        clock = SlotClock()

        def jump(step: int, clock: SlotClock = clock) -> None:
            clock.real_ns += 5 * MS if step == 150 else 0

        records = {one: record(one) for one in "RP"} | {arm: record(arm, clock=clock, before=jump)}
        assert session(records["R"], records["P"]).excluded == {"clock": 1}


def test_what_the_machine_saw_excludes_blocks_by_its_own_rules() -> None:
    found = session(record("R"), record("P"), observed={10: "steal", 11: "steal", 10_000: "steal"})
    assert found.excluded == {"steal": 2}


def test_a_session_with_less_than_half_of_its_time_fails() -> None:
    stopped = parse(train(plan("P"), SlotClock(), itertools.repeat(10 * MS, 100)).record())
    assert session(record("R"), stopped).outcome is Outcome.SHORT
    observed = dict.fromkeys(range(3, 17), "steal")
    assert session(record("R"), record("P"), observed=observed).outcome is Outcome.SHORT


def test_an_arm_that_died_leaves_an_attempt_and_no_number() -> None:
    whole = record("R")
    cut = dataclasses.replace(record("P"), reason=None)
    for found in (session_of(whole, None, length_ns=LENGTH_NS), session(whole, cut)):
        assert found == Session(outcome=Outcome.DIED, excluded={})


def test_an_arm_that_never_got_warm_fails_the_session() -> None:
    changes = {"warmup_steps": 10_000}
    assert session(record("R", changes=changes), record("P", changes=changes)).outcome is Outcome.NOT_WARM


def test_steps_that_no_slot_holds_are_an_outcome_and_not_a_number() -> None:
    found = session(record("R", itertools.repeat(120 * MS)), record("P", itertools.repeat(120 * MS)))
    assert found.outcome is Outcome.NO_STEPS
    assert found.blocks is None


def test_losses_that_are_no_numbers_fail_the_session() -> None:
    bad = record("P", loss=lambda step: math.nan if step == 77 else 1.0)
    assert session(record("R"), bad).outcome is Outcome.NONFINITE


@pytest.mark.parametrize(("outside_ns", "outcome"), [(2 * MS, Outcome.COMPLETE), (5 * MS, Outcome.OUTSIDE)])
def test_processor_time_outside_its_slots_voids_a_session(outside_ns: int, outcome: Outcome) -> None:
    class Busy(SlotClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            self.cpu_ns += outside_ns

    assert session(record("R"), record("P", clock=Busy())).outcome is outcome


def test_different_work_is_seen_in_the_losses_of_common_steps() -> None:
    same = session(record("R"), record("P", itertools.repeat(12 * MS)))
    other = session(record("R"), record("P", loss=lambda step: 2.0 if step == 30 else 1 / (1 + step)))
    assert same.unlike_losses is None
    assert other.unlike_losses == 30


def test_records_of_two_schedules_are_not_a_session() -> None:
    with pytest.raises(FormatError, match="one schedule"):
        session(record("R"), record("P", changes={"steps": 4}))
    with pytest.raises(FormatError, match="one schedule"):
        session(record("R"), record("R"))


def altered(change: Callable[[list[dict[str, Any]]], object]) -> bytes:
    lines = [json.loads(line) for line in train(plan(), SlotClock(), itertools.repeat(10 * MS)).record().splitlines()]
    change(lines)
    return b"".join(json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n" for line in lines)


def shift(lines: list[dict[str, Any]]) -> None:
    lines[2]["slot"] += next(
        n for n in range(1, 4) if plan().own_slot((lines[2]["slot"] + n) * 100 * MS) != lines[2]["slot"] + n
    )


FORGERIES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "a slot of the other arm": shift,
    "a slot twice": lambda lines: lines.insert(3, {**lines[2], "first": lines[3]["first"]}),
    "a slot again, later in it": lambda lines: lines.insert(
        3, {**lines[2], "begin": lines[2]["end"], "first": lines[3]["first"], "losses": [], "steps": []}
    ),
    "a slot left out": lambda lines: lines.pop(2),
    "a step made shorter": lambda lines: lines[2]["steps"][3].__setitem__(1, 35 * MS),
    "a step taken out": lambda lines: (lines[2]["steps"].pop(3), lines[2]["losses"].pop(3)),
    "a step begun outside the slot": lambda lines: lines[2].update(
        steps=[[0, 110 * MS], [110 * MS, 120 * MS]], losses=[None] * 2
    ),
    "a loss too few": lambda lines: lines[2]["losses"].pop(),
    "a loss that is no decimal": lambda lines: lines[2]["losses"].__setitem__(0, "NaN"),
    "an unknown member": lambda lines: lines[2].update(more=1),
    "an end before the last step": lambda lines: lines[2]["end"].update(at_ns=5 * MS),
    "a record that goes on after its plan": lambda lines: lines[-1].update(until_ns=str(10_001 * MS)),
    "a line after the end": lambda lines: lines.append(lines[1]),
    "no head": lambda lines: lines.pop(0),
    "a boolean for a number": lambda lines: lines[2]["steps"][0].__setitem__(0, False),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_record_that_no_worker_could_have_written_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        parse(altered(FORGERIES[name]))


def test_a_record_is_read_as_it_was_written() -> None:
    found = parse(altered(lambda lines: None))
    assert found.reason == "end"
    assert found.until_ns == 10_000 * MS
    assert parse(altered(lambda lines: lines.pop())).reason is None
    assert len(found.losses) == len(found.steps.begin) == sum(np.diff(found.steps.begin) > 0) + 1


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b"{}", b"\xff\n"])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse(data)
