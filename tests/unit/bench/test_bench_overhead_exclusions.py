"""Which blocks count is decided by fixed rules that cannot see the arm, and every attempt stays in the account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.bench.overhead.blocks import count, replay
from glasshouse.bench.overhead.design import Phase
from glasshouse.bench.overhead.exclusions import Rule, broken_rules
from glasshouse.bench.overhead.slices import Outcome, Record, SessionEnd, Slice, Throttle
from glasshouse.errors import Code, VerificationError
from simulators.simulate import NO_WARMUP, World, make_design, run_world

DESIGN = make_design(sessions=2, blocks_per_session=5, warmup=NO_WARMUP)


def _records() -> list[Record]:
    return run_world(World(), DESIGN, np.random.default_rng(1))


def _block(session: int = 1, index: int = 3) -> list[Slice]:
    return [
        one
        for one in _records()
        if isinstance(one, Slice) and (one.session, one.block, one.phase) == (session, index, Phase.MEASURED)
    ]


CHANGES: list[tuple[dict[str, Any], Rule]] = [
    ({"clock_skew_ns": 3_000_000}, Rule.CLOCK),
    ({"clock_skew_ns": -3_000_000}, Rule.CLOCK),
    ({"t1_ns": 0}, Rule.CLOCK),
    ({"t0_ns": 0}, Rule.CLOCK),
    ({"loss_finite": False}, Rule.NONFINITE),
    ({"steps": 99}, Rule.WORK),
    ({"done_after": 7}, Rule.WORK),
    ({"first_batch": 1}, Rule.WORK),
    ({"state_sha256": bytes(32)}, Rule.WORK),
    ({"ecc_errors": 1}, Rule.ECC),
    ({"throttle": (Throttle.THERMAL,)}, Rule.THERMAL),
    ({"throttle": (Throttle.POWER_BRAKE,)}, Rule.POWER),
    ({"foreign_processes": 1}, Rule.FOREIGN),
    ({"steal_ppm": 50_001}, Rule.STEAL),
]


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize(("change", "rule"), CHANGES)
def test_each_rule_excludes_a_block_whichever_slice_broke_it(change: dict[str, Any], rule: Rule, position: int) -> None:
    slices = _block()
    assert broken_rules(DESIGN, slices) == ()
    changed = replace(slices[position], **change)
    found = broken_rules(DESIGN, [*slices[:position], changed, *slices[position + 1 :]], previous_ns=1)
    assert rule in found
    assert set(found) <= {rule, Rule.CLOCK}


def test_at_the_limit_a_block_still_counts() -> None:
    slices = [replace(one, steal_ppm=50_000, clock_skew_ns=1_000_000, throttle=(), ecc_errors=0) for one in _block()]
    assert broken_rules(DESIGN, slices) == ()


def test_a_slow_slice_is_data() -> None:
    slices = _block()
    slow = replace(slices[3], t1_ns=slices[3].t1_ns * 100)
    assert broken_rules(DESIGN, [*slices[:3], slow]) == ()


def test_guard_steps_that_nobody_reported_are_work_of_another_amount() -> None:
    slices = _block()
    late = [
        slices[0],
        *(replace(one, done_before=one.done_before + 1, done_after=one.done_after + 1) for one in slices[1:]),
    ]
    assert broken_rules(DESIGN, late) == (Rule.WORK,)


def test_states_are_compared_where_both_arms_have_done_the_same() -> None:
    same = [replace(one, state_sha256=one.done_after.to_bytes(32, "big")) for one in _block()]
    assert broken_rules(DESIGN, same) == ()
    assert broken_rules(DESIGN, [replace(same[0], state_sha256=bytes(32)), *same[1:]]) == (Rule.WORK,)


def test_a_slice_that_began_before_the_last_block_ended_is_a_clock_anomaly() -> None:
    slices = _block()
    assert broken_rules(DESIGN, slices, previous_ns=slices[0].t0_ns) == ()
    assert broken_rules(DESIGN, slices, previous_ns=slices[0].t0_ns + 1) == (Rule.CLOCK,)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(CHANGES)), max_size=4))
def test_the_rules_are_blind_to_the_arm(changes: Sequence[tuple[int, tuple[dict[str, Any], Rule]]]) -> None:
    slices = _block()
    for position, (change, _) in changes:
        slices[position] = replace(slices[position], **change)
    swapped = [replace(one, arm=one.arm.other) for one in slices]
    assert broken_rules(DESIGN, slices) == broken_rules(DESIGN, swapped)


def test_the_account_adds_up() -> None:
    records = _records()
    _spoil(records, session=0, block=1, loss_finite=False, steal_ppm=60_000)
    _spoil(records, session=0, block=2, steal_ppm=60_000)
    _spoil(records, session=1, block=0, ecc_errors=2)
    # The second session loses its worker in the middle of its last block.
    del records[-2]
    end = records[-1]
    assert isinstance(end, SessionEnd)
    records[-1] = replace(end, outcome=Outcome.FAILED, code=Code.WORKER_FAILED)
    found = count(DESIGN, replay(DESIGN, records))
    assert found.to_json() == {
        "blocks_completed": 9,
        "blocks_included": 6,
        "blocks_incomplete": 1,
        "blocks_planned": 10,
        "blocks_started": 10,
        "excluded": {"nonfinite-loss": 1, "ecc-error": 1, "steal": 1},
        "sessions_completed": 1,
        "sessions_ended_by": {"worker-failed": 1},
        "sessions_planned": 2,
        "sessions_started": 2,
        "unobserved_rules": ["ecc-error", "thermal-throttle", "power-brake", "foreign-gpu-process"],
    }
    assert found.started == found.completed + found.incomplete
    assert found.completed == found.included + sum(number for _, number in found.excluded)


def test_excluding_a_block_leaves_the_others_and_the_attempts_as_they_were() -> None:
    records = _records()
    whole = replay(DESIGN, records)
    _spoil(records, session=0, block=1, loss_finite=False)
    less = replay(DESIGN, records)
    assert count(DESIGN, less).started == count(DESIGN, whole).started
    assert len(less[0].included) == len(whole[0].included) - 1
    assert less[1] == whole[1]


def _cut_slice(records: list[Record]) -> None:
    del records[9]


def _cut_block(records: list[Record]) -> None:
    del records[8:12]


def _cut_last_block(records: list[Record]) -> None:
    del records[-5:-1]


def _cut_last_block_and_say_so(records: list[Record]) -> None:
    del records[-5:-1]
    end = records[-1]
    assert isinstance(end, SessionEnd)
    records[-1] = replace(end, blocks_started=end.blocks_started - 1)


def _hide_two_blocks_behind_a_failure(records: list[Record]) -> None:
    del records[-9:-1]
    end = records[-1]
    assert isinstance(end, SessionEnd)
    records[-1] = replace(end, outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED)


def _cut_session(records: list[Record]) -> None:
    del records[: len(records) // 2]


def _cut_end(records: list[Record]) -> None:
    del records[-1]


def _swap_two(records: list[Record]) -> None:
    records[9], records[10] = records[10], records[9]


def _other_arm(records: list[Record]) -> None:
    one = records[9]
    assert isinstance(one, Slice)
    records[9] = replace(one, arm=one.arm.other)


def _short_guard(records: list[Record]) -> None:
    one = records[9]
    assert isinstance(one, Slice)
    records[9] = replace(one, guard_ns=1)


def _other_launch(records: list[Record]) -> None:
    end = records[-1]
    assert isinstance(end, SessionEnd)
    records[-1] = replace(end, launched_first=end.launched_first.other)


def _once_more(records: list[Record]) -> None:
    records.append(records[-1])


def _too_many_blocks(records: list[Record]) -> None:
    end = records[-1]
    assert isinstance(end, SessionEnd)
    records[-1] = replace(end, blocks_started=6)


ATTACKS = [
    _cut_slice,
    _cut_block,
    _cut_last_block,
    _cut_last_block_and_say_so,
    _hide_two_blocks_behind_a_failure,
    _cut_session,
    _cut_end,
    _swap_two,
    _other_arm,
    _short_guard,
    _other_launch,
    _once_more,
    _too_many_blocks,
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_records_that_do_not_follow_the_design_are_refused(attack: Any) -> None:
    records = _records()
    attack(records)
    with pytest.raises(VerificationError) as refused:
        replay(DESIGN, records)
    assert refused.value.code is Code.ARTIFACT_INVALID


def test_a_schedule_that_was_drawn_again_is_refused() -> None:
    other = make_design(77, sessions=2, blocks_per_session=5, warmup=NO_WARMUP)
    with pytest.raises(VerificationError, match=r"is not what the schedule has next|launched in another order"):
        replay(other, _records())


def test_a_run_that_ended_early_shows_what_was_planned() -> None:
    records = _records()
    found = count(DESIGN, replay(DESIGN, records[: len(records) // 2]))
    assert (found.sessions_started, found.sessions_planned) == (1, 2)
    assert (found.started, found.blocks_planned) == (5, 10)


def test_a_session_that_died_before_its_first_slice_is_in_the_account() -> None:
    end = SessionEnd(
        session=0,
        launched_first=DESIGN.launched_first(0),
        warmup_blocks=0,
        blocks_started=0,
        outcome=Outcome.FAILED,
        code=Code.DEVICE_MISSING,
    )
    found = count(DESIGN, replay(DESIGN, [end]))
    assert (found.sessions_started, found.sessions_completed, found.started) == (1, 0, 0)
    assert found.ended == ((Code.DEVICE_MISSING, 1),)


def _spoil(records: list[Record], *, session: int, block: int, **changes: Any) -> None:
    for at, one in enumerate(records):
        if isinstance(one, Slice) and (one.session, one.block, one.phase) == (session, block, Phase.MEASURED):
            records[at] = replace(one, **changes)
            return
