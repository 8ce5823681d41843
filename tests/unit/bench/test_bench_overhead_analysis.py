"""Whoever has the lines has the numbers; whoever changes either is found out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from glasshouse.bench.overhead.analysis import analyse, check_same
from glasshouse.bench.overhead.design import Arm, Design, Mode, Phase, WarmupRule
from glasshouse.bench.overhead.estimate import Word
from glasshouse.bench.overhead.slices import Outcome, Record, SessionEnd, Slice, read_lines
from glasshouse.errors import Code, VerificationError
from glasshouse.wire.canonical import Json, decode, encode
from simulators.simulate import NO_WARMUP, World, make_design, run_legs, run_world

DESIGN = make_design(sessions=4, blocks_per_session=10, warmup=NO_WARMUP)
SMALL = make_design(sessions=1, blocks_per_session=3, warmup=NO_WARMUP)


def _records(world: World | None = None, design: Design = DESIGN, **changes: Any) -> list[Record]:
    return run_world(world or World(overhead=0.02), design, np.random.default_rng(8), **changes)


def test_the_numbers_follow_from_the_lines_alone() -> None:
    records = _records()
    lines = [record.encode() + b"\n" for record in records]
    found = analyse(DESIGN, records).to_json()
    again = analyse(Design.from_json(DESIGN.to_json()), read_lines(lines)).to_json()
    assert encode(found) == encode(again)
    check_same(decode(encode(found), max_bytes=1 << 20), again)
    assert None not in (found["result"], found["claim"], found["sensitivity"], found["attempts"])


@pytest.mark.parametrize(("overhead", "word"), [(0.0, {Word.EQUIVALENT, Word.INCONCLUSIVE}), (0.02, {Word.OVERHEAD})])
def test_a_planted_overhead_is_found(overhead: float, word: set[Word]) -> None:
    found = analyse(DESIGN, _records(World(overhead=overhead, drift=0.05, steps=1, step_size=0.05)))
    assert found.result is not None
    wide = found.result.interval()
    assert wide is not None
    assert wide.holds(overhead)
    assert found.claim is not None
    assert found.claim.word in word


def test_a_null_run_makes_no_claim_of_overhead() -> None:
    design = make_design(sessions=4, blocks_per_session=10, warmup=NO_WARMUP, mode=Mode.NULL)
    found = analyse(design, _records(World(overhead=0.02), design))
    assert found.claim is not None
    assert (found.claim.word, found.claim.null) == (Word.BIAS_SUSPECTED, True)
    assert found.direct is None


def test_a_constant_factor_on_all_times_changes_no_number_of_the_result() -> None:
    slow = analyse(DESIGN, _records(step_ns=7e6)).result
    fast = analyse(DESIGN, _records(step_ns=7e7)).result
    assert slow is not None
    assert fast is not None
    assert slow.log_ratio == pytest.approx(fast.log_ratio, abs=1e-7)
    assert slow.session_means == pytest.approx(fast.session_means, abs=1e-7)


def _numbers(records: list[Record]) -> Json:
    return analyse(DESIGN, records).to_json()


@cache
def _expected() -> Json:
    return _numbers(_records())


def test_an_edited_time_is_another_result() -> None:
    records = _records()
    one = records[20]
    assert isinstance(one, Slice)
    expected = _expected()
    records[20] = replace(one, t1_ns=one.t1_ns - 10**7)
    with pytest.raises(VerificationError, match="is not what the slices give"):
        check_same(expected, _numbers(records))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("claim", "word"), "equivalent"),
        (("result", "log_ratio"), "1.99000000000e-02"),
        (("result", "sessions"), 5),
        (("result", "label"), "standard"),
        (("attempts", "blocks_started"), 39),
        (("attempts", "excluded"), {"steal": 1}),
        (("sensitivity", "randomisation"), None),
        (("no_steady_state",), []),
        (("result", "log_ratio"), 2),
    ],
)
def test_an_edited_analysis_is_refused(path: tuple[str, ...], value: Json) -> None:
    expected = _expected()
    edited: Any = decode(encode(expected), max_bytes=1 << 20)
    inner = edited
    for name in path[:-1]:
        inner = inner[name]
    assert inner[path[-1]] != value
    inner[path[-1]] = value
    with pytest.raises(VerificationError) as refused:
        check_same(edited, expected)
    assert refused.value.code is Code.ARTIFACT_INVALID
    assert path[0] in refused.value.message


def test_only_the_rounding_of_another_library_is_forgiven() -> None:
    check_same({"a": ["1.00000000000e+00"]}, {"a": ["1.00000000099e+00"]})
    with pytest.raises(VerificationError, match=r"analysis\.a"):
        check_same({"a": ["1.00000000000e+00"]}, {"a": ["1.00000010000e+00"]})
    with pytest.raises(VerificationError):
        check_same({"a": True}, {"a": 1})
    with pytest.raises(VerificationError):
        check_same({"a": []}, {"a": ["x"]})
    with pytest.raises(VerificationError):
        check_same({}, {"a": None})


def test_an_interrupted_run_keeps_what_is_complete() -> None:
    records = _records()
    whole = analyse(DESIGN, records)
    ends = [at for at, one in enumerate(records) if isinstance(one, SessionEnd)]
    cut = records[: ends[1] + 1 + 4 + 4 * 3 + 2]
    cut.append(
        SessionEnd(
            session=2,
            launched_first=DESIGN.launched_first(2),
            warmup_blocks=1,
            blocks_started=4,
            outcome=Outcome.INTERRUPTED,
            code=Code.INTERRUPTED,
        )
    )
    found = analyse(DESIGN, cut)
    assert found.result is not None
    assert whole.result is not None
    # Three blocks of ten are too few for that session to weigh as much as a whole one.
    assert found.result.session_means == whole.result.session_means[:2]
    assert (found.attempts.started, found.attempts.completed, found.attempts.incomplete) == (24, 23, 1)


def test_the_first_session_broken_off_is_still_worth_its_blocks() -> None:
    cut = _records()[: 4 + 4 * 3]
    cut.append(
        SessionEnd(
            session=0,
            launched_first=DESIGN.launched_first(0),
            warmup_blocks=1,
            blocks_started=3,
            outcome=Outcome.INTERRUPTED,
            code=Code.INTERRUPTED,
        )
    )
    found = analyse(DESIGN, cut).result
    assert found is not None
    assert (found.sessions, found.blocks, found.label) == (1, 3, "conditional on one process pair")


def test_a_run_in_which_no_block_counts_has_no_result() -> None:
    found = analyse(DESIGN, _records(foreign_processes=1))
    assert (found.result, found.claim, found.sensitivity) == (None, None, None)
    assert found.attempts.excluded[0][1] == 40
    assert analyse(DESIGN, []).attempts.sessions_started == 0


def test_direct_accounting_says_where_it_disagrees() -> None:
    records = _records(World(overhead=0.02, noise=0.001))
    hooks = [
        replace(one, hooks_ns=round(one.duration_ns * -math.expm1(-0.02)))
        if isinstance(one, Slice) and one.arm is Arm.PROTECTED
        else one
        for one in records
    ]
    found = analyse(DESIGN, hooks).direct
    assert found is not None
    assert found.slowdown == pytest.approx(math.expm1(0.02), abs=1e-6)
    assert found.disagrees is False
    less = [replace(one, hooks_ns=0) if isinstance(one, Slice) and one.hooks_ns is not None else one for one in hooks]
    small = analyse(DESIGN, less).direct
    assert small is not None
    assert small.disagrees is True
    assert analyse(DESIGN, records).direct is None


def test_a_parked_arm_that_works_is_shown() -> None:
    assert analyse(SMALL, _records(None, SMALL)).parked == 0
    assert analyse(SMALL, _records(None, SMALL, parked_cpu_ns=None)).parked is None
    assert (analyse(SMALL, _records(None, SMALL, parked_cpu_ns=7 * 10**7)).parked or 0) > 0.09


LEGS = make_design(
    mode=Mode.SEQUENTIAL,
    sessions=4,
    blocks_per_session=1,
    slice_steps=None,
    leg_ns=10**10,
    guard_steps=0,
    guard_ns=0,
    warmup=WarmupRule(least_ns=5 * 10**9),
)


def _legs(design: Design = LEGS) -> list[Record]:
    rng = np.random.default_rng(1)
    world = World(overhead=0.01, noise=0.0001, drift=0.03)
    return [one for session in range(design.sessions) for one in run_legs(world, design, session, rng)]


def test_sequential_legs_show_their_order_effect() -> None:
    found = analyse(LEGS, _legs())
    assert found.result is None
    assert found.claim is None
    assert found.sequential is not None
    assert found.sequential.units == 2
    assert found.sequential.log_ratio == pytest.approx(0.01, abs=0.001)
    assert found.sequential.order_effect == pytest.approx(0.03, abs=0.001)
    assert analyse(LEGS, []).sequential is None


def test_one_pair_of_legs_has_no_interval() -> None:
    found = analyse(LEGS, _legs()[:5]).sequential
    assert found is not None
    assert found.interval() is None
    assert found.label.startswith("n=1, no interval")
    assert found.log_ratio == pytest.approx(0.04 if found.pairs[0].first is Arm.RAW else -0.02, abs=0.001)


def test_a_leg_without_its_warm_up_or_its_time_is_refused() -> None:
    records = _legs()
    warm, measured = records[0], records[1]
    assert isinstance(warm, Slice)
    assert isinstance(measured, Slice)
    assert (warm.phase, measured.phase) == (Phase.WARMUP, Phase.MEASURED)
    with pytest.raises(VerificationError, match="too short a warm-up"):
        analyse(LEGS, [replace(warm, t1_ns=warm.t0_ns + 10**9), *records[1:]])
    with pytest.raises(VerificationError, match="ended before its time"):
        analyse(LEGS, [warm, replace(measured, t1_ns=measured.t0_ns + 10**9), *records[2:]])
