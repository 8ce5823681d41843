"""A line of slices.jsonl says one thing in one way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.bench.overhead.design import Arm, Phase
from glasshouse.bench.overhead.slices import Outcome, SessionEnd, Slice, Throttle, parse, read_lines, tree
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import MAX_INTEGER, decode, encode
from glasshouse.wire.merkle import leaf_hash, verify_inclusion
from simulators.simulate import NO_WARMUP, World, make_design, run_world

COUNT = st.integers(0, MAX_INTEGER)
MAYBE = st.none() | COUNT
SLICES = st.builds(
    Slice,
    session=COUNT,
    block=COUNT,
    position=st.integers(0, 3),
    arm=st.sampled_from(Arm),
    phase=st.sampled_from(Phase),
    steps=st.integers(1, MAX_INTEGER),
    guard_steps=COUNT,
    guard_ns=COUNT,
    t0_ns=COUNT,
    t1_ns=COUNT,
    done_before=COUNT,
    done_after=COUNT,
    first_batch=COUNT,
    loss_finite=st.booleans(),
    clock_skew_ns=st.integers(-MAX_INTEGER, MAX_INTEGER),
    parked_cpu_ns=MAYBE,
    hooks_ns=MAYBE,
    steal_ppm=st.none() | st.integers(0, 1_000_000),
    throttle=st.sampled_from([None, (), (Throttle.THERMAL,), tuple(Throttle)]),
    ecc_errors=MAYBE,
    foreign_processes=MAYBE,
    state_sha256=st.none() | st.binary(min_size=32, max_size=32),
)


@given(SLICES)
def test_a_slice_survives_its_line(one: Slice) -> None:
    assert parse(one.encode()) == one
    assert parse(one.encode()).encode() == one.encode()


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse(data)


def test_the_end_of_a_session_survives_its_line() -> None:
    end = _end(outcome=Outcome.FAILED, code=Code.WORKER_FAILED)
    assert parse(end.encode()) == end


@pytest.mark.parametrize(
    ("outcome", "code"), [(Outcome.COMPLETE, Code.WORKER_FAILED), (Outcome.FAILED, None), (Outcome.INTERRUPTED, None)]
)
def test_an_end_says_why_exactly_if_it_is_not_complete(outcome: Outcome, code: Code | None) -> None:
    with pytest.raises(FormatError):
        _end(outcome=outcome, code=code)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("arm", "Q"),
        ("steps", 0),
        ("position", 4),
        ("t0_ns", -1),
        ("loss_finite", None),
        ("throttle", ["power-brake", "thermal"]),
        ("throttle", ["thermal", "thermal"]),
        ("throttle", ["hot"]),
        ("steal_ppm", 1_000_001),
        ("kind", "sliver"),
        ("state_sha256", "00"),
        ("clock_skew_ns", None),
    ],
)
def test_a_field_out_of_its_range_is_refused(name: str, value: object) -> None:
    good = decode(_records()[0].encode(), max_bytes=4096)
    assert isinstance(good, dict)
    with pytest.raises(FormatError):
        parse(encode(good | {name: value}))  # type: ignore[dict-item]


def test_a_line_that_was_cut_off_is_refused() -> None:
    lines = [record.encode() + b"\n" for record in _records()]
    assert list(read_lines(lines)) == _records()
    with pytest.raises(FormatError, match="line 9 of the slices is cut off"):
        list(read_lines([*lines[:8], lines[8][:-1]]))


def test_every_line_is_a_leaf_and_an_edited_time_is_another_root() -> None:
    records = _records()
    grown = tree(records)
    assert len(grown) == len(records)
    verify_inclusion(
        leaf=leaf_hash(records[2].encode()),
        index=2,
        size=len(grown),
        root=grown.root(),
        proof=grown.inclusion_proof(2, len(grown)),
    )
    first = records[0]
    assert isinstance(first, Slice)
    assert tree([replace(first, t1_ns=first.t1_ns - 1), *records[1:]]).root() != grown.root()


def test_a_line_stays_below_its_limit() -> None:
    first = _records()[0]
    assert isinstance(first, Slice)
    big = dict.fromkeys(("t0_ns", "t1_ns", "done_before", "done_after", "hooks_ns", "parked_cpu_ns"), MAX_INTEGER)
    assert len(replace(first, **big, throttle=tuple(Throttle), state_sha256=bytes(32)).encode()) < 1024


def _end(**changes: object) -> SessionEnd:
    values: dict[str, object] = {
        "session": 0,
        "launched_first": Arm.RAW,
        "warmup_blocks": 1,
        "blocks_started": 2,
        "outcome": Outcome.COMPLETE,
    }
    return SessionEnd(**(values | changes))  # type: ignore[arg-type]


def _records() -> list[object]:
    design = make_design(sessions=1, blocks_per_session=2, warmup=NO_WARMUP)
    return list(run_world(World(), design, np.random.default_rng(0)))
