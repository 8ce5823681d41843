"""Two workers that share no channel keep out of each other's time, however long their steps are."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import FormatError, PlatformError, UsageError
from glasshouse.workloads.measurement import slots
from glasshouse.workloads.measurement.slots import Pacer, Plan, order_of
from simulators.slot_clock import MS, SEED, SlotClock, plan, train


def lines(pacer: Pacer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in pacer.record().splitlines()]


def slot_lines(pacer: Pacer) -> list[dict[str, Any]]:
    return [line for line in lines(pacer) if line["kind"] == "slot"]


def test_a_block_is_one_of_two_orders_by_the_hash_of_seed_and_number() -> None:
    bits = [hashlib.sha256(b"glasshouse/slots/v1\0" + SEED + n.to_bytes(8, "big")).digest()[0] & 1 for n in range(64)]
    assert [order_of(SEED, n) for n in range(64)] == [("RPPR", "PRRP")[bit] for bit in bits]
    assert set(bits) == {0, 1}


@given(now=st.integers(0, 10**18))
def test_each_instant_lies_in_a_slot_of_one_arm_and_the_other_waits_for_three_slots_at_most(now: int) -> None:
    slot = now // (100 * MS)
    raw, protected = (plan(arm).own_slot(now) for arm in "RP")
    assert slot in {raw, protected}
    assert raw != protected
    assert max(raw, protected) - slot <= 2


def test_a_worker_takes_one_uncounted_step_and_five_counted_ones_then_sleeps() -> None:
    clock = SlotClock(now_ns=250 * MS)
    pacer = train(plan(), clock, itertools.repeat(10 * MS))
    found = slot_lines(pacer)
    assert all(len(line["steps"]) == 6 for line in found[1:])
    assert all(line["steps"][0][0] == 0 for line in found[1:])
    assert {plan().own_slot(line["slot"] * 100 * MS) for line in found} == {line["slot"] for line in found}
    assert [line["first"] for line in found] == list(
        itertools.accumulate((len(line["steps"]) for line in found[:-1]), initial=0)
    )
    assert lines(pacer)[-1] == {"kind": "end", "reason": "end", "until_ns": str(10_000 * MS)}


def test_a_worker_that_is_ready_in_the_middle_of_its_slot_begins_at_once() -> None:
    own = plan().own_slot(500 * MS)
    pacer = train(plan(), SlotClock(now_ns=own * 100 * MS + 70 * MS), itertools.repeat(10 * MS))
    first = slot_lines(pacer)[0]
    assert first["slot"] == own
    assert first["steps"] == [[at * MS, (at + 10) * MS] for at in (70, 80, 90)]


def test_the_two_arms_never_run_at_once_while_steps_fit() -> None:
    intervals = []
    for arm, step in (("R", 13), ("P", 14)):
        found = slot_lines(train(plan(arm), SlotClock(now_ns=3 * MS), itertools.repeat(step * MS)))
        intervals += [
            (line["slot"] * 100 * MS + begin, line["slot"] * 100 * MS + end)
            for line in found
            for begin, end in line["steps"]
        ]
    intervals.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(intervals))


def test_a_step_that_overruns_is_taken_whole_and_the_next_begins_in_a_slot_of_its_own() -> None:
    lengths = itertools.chain([10 * MS, 10 * MS, 150 * MS], itertools.repeat(10 * MS))
    clock = SlotClock(now_ns=plan().own_slot(0) * 100 * MS)
    first, second = slot_lines(train(plan(), clock, lengths))[:2]
    assert first["steps"][-1] == [20 * MS, 170 * MS]
    assert len(first["steps"]) == 3
    assert second["slot"] == plan().own_slot(first["slot"] * 100 * MS + 170 * MS)


def test_a_step_longer_than_a_slot_is_begun_in_each_slot_that_it_leaves_and_never_counted() -> None:
    found = slot_lines(train(plan(), SlotClock(), itertools.repeat(130 * MS)))
    assert found
    assert {len(line["steps"]) for line in found} == {1}


def test_a_worker_that_sleeps_past_its_slot_waits_for_another() -> None:
    found = slot_lines(train(plan(), SlotClock(oversleep_ns=130 * MS), itertools.repeat(10 * MS)))
    assert found
    assert all(0 <= line["steps"][0][0] < 100 * MS for line in found)
    assert all(plan().own_slot(line["slot"] * 100 * MS) == line["slot"] for line in found)


def test_a_stall_between_waking_and_beginning_begins_no_step_in_the_others_slot() -> None:
    class Stalls(SlotClock):
        def stamp(self) -> slots.Stamp:
            if self.slept == 3:
                self.slept, self.now_ns = 4, self.now_ns + 120 * MS
            return super().stamp()

    found = slot_lines(train(plan(), Stalls(), itertools.repeat(10 * MS)))
    assert found
    assert all(0 <= line["begin"]["at_ns"] < 100 * MS for line in found)


def test_waiting_costs_no_processor_time_and_the_stamps_show_it() -> None:
    found = slot_lines(train(plan(), SlotClock(), itertools.repeat(10 * MS)))
    for one, other in itertools.pairwise(found):
        assert one["end"]["cpu_ns"] - one["begin"]["cpu_ns"] == 10 * MS * len(one["steps"])
        assert other["begin"]["cpu_ns"] == one["end"]["cpu_ns"]


def test_a_suspended_machine_is_seen_in_the_clock_that_goes_on() -> None:
    clock = SlotClock()
    pacer = train(
        plan(), clock, itertools.repeat(10 * MS), before=lambda step: clock.suspend(60_000 * MS) if step == 40 else None
    )
    boots = [stamp["boot_ns"] for line in slot_lines(pacer) for stamp in (line["begin"], line["end"])]
    assert sorted(set(boots)) == [0, 60_000 * MS]


def test_a_monotonic_clock_that_goes_back_ends_the_measurement() -> None:
    clock = SlotClock()
    with pytest.raises(PlatformError, match="went back"):
        train(plan(), clock, itertools.repeat(10 * MS), before=lambda step: clock.busy(-50 * MS if step == 9 else 0))


def test_a_job_that_stops_early_keeps_what_it_has_and_says_so() -> None:
    pacer = train(plan(), SlotClock(), itertools.repeat(10 * MS, 20))
    assert sum(len(line["steps"]) for line in slot_lines(pacer)) == 20
    assert lines(pacer)[-1]["reason"] == "stopped"
    assert not pacer.boundary()


def test_a_worker_that_dies_leaves_a_record_without_an_end() -> None:
    clock = SlotClock()
    pacer = Pacer(plan(), clocks=clock, sleep=clock.sleep)
    pacer.boundary()
    assert [line["kind"] for line in lines(pacer)] == ["steps"]


def test_a_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_STEPS", 30)
    pacer = train(plan(), SlotClock(), itertools.repeat(10 * MS))
    assert sum(len(line["steps"]) for line in slot_lines(pacer)) == 30
    assert lines(pacer)[-1]["reason"] == "full"


def test_losses_are_kept_as_six_digits_and_what_is_no_number_is_seen() -> None:
    losses = [0.123456789, float("nan"), float("inf"), None]
    pacer = train(plan(), SlotClock(), itertools.repeat(10 * MS, 4), loss=lambda step: losses[step])
    found = [loss for line in slot_lines(pacer) for loss in line["losses"]]
    assert found == ["0.123457", "nonfinite", "nonfinite", None]


def test_the_device_is_waited_for_before_each_instant() -> None:
    clock, waited = SlotClock(), []
    pacer = Pacer(plan(), clocks=clock, sleep=clock.sleep, synchronise=lambda: waited.append(clock.busy(MS)))
    pacer.boundary()
    clock.busy(9 * MS)
    pacer.boundary()
    pacer.stop()
    ((begin, end),) = slot_lines(pacer)[0]["steps"]
    assert end - begin == 10 * MS
    assert len(waited) == 2


def test_a_plan_travels_in_sealed_parameters_and_comes_back() -> None:
    given = plan("P", end_ns=2**62 - 1)
    assert Plan.from_json(given.to_json()) == given


@pytest.mark.parametrize(
    "change", [{"slot_ns": 999_999}, {"slot_ns": 61 * 10**9}, {"steps": 0}, {"uncounted": 0}, {"warmup_steps": 1 << 18}]
)
def test_a_plan_outside_its_limits_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        plan(**change)
    with pytest.raises(UsageError):
        Plan.from_json({**plan().to_json(), **change})


@pytest.mark.parametrize("change", [{"arm": "X"}, {"end_ns": "01"}, {"seed": "00"}, {"more": 1}])
def test_a_plan_of_another_form_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Plan.from_json({**plan().to_json(), **change})


def test_the_machines_own_clocks_agree_with_each_other() -> None:
    stamp = slots.MachineClocks().stamp()
    assert stamp.boot_ns > -MS
    assert stamp.at_ns <= slots.MachineClocks().monotonic_ns()
