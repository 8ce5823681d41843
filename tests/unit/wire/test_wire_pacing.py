"""Pacing messages: closed, bounded, and nothing in them but numbers and known names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import Code, FormatError
from glasshouse.wire import canonical, pacing
from glasshouse.wire.canonical import MAX_INTEGER
from glasshouse.wire.pacing import PHASES, End, Go, Parked, Slice

COUNT = st.integers(0, MAX_INTEGER)
DAY_NS = 86_400 * 10**9
GO = Go(origin_ns=5, until=3, steps=10, least_ns=None, guard_ns=0, burn_ns=0, stamps=False)
SLICE = Slice(
    done_before=3, done_after=13, t0_ns=1, t1_ns=2, guard_steps=3, guard_ns=4, skew_ns=-5, hooks_ns=6, loss_finite=True,
    steps=10, cpu_ns=7, device_bytes=None, wait_ppm=None, phases={"forward": 1, "residual": 0},
)  # fmt: skip
ORDERS = st.one_of(
    st.builds(End, until=COUNT),
    st.builds(
        Go,
        origin_ns=st.integers(0, 10**19 - 1),
        until=COUNT,
        steps=st.integers(1, MAX_INTEGER),
        least_ns=st.none(),
        guard_ns=st.integers(0, 3600 * 10**9),
        burn_ns=st.integers(0, 10**9),
        stamps=st.booleans(),
    ),
)
SLICES = st.builds(
    Slice,
    **dict.fromkeys(("done_before", "done_after", "guard_steps", "guard_ns", "t0_ns", "t1_ns"), COUNT),
    **dict.fromkeys(("cpu_ns", "hooks_ns"), COUNT),
    wait_ppm=st.none() | st.integers(0, 1_000_000),
    skew_ns=st.integers(-MAX_INTEGER, MAX_INTEGER),
    loss_finite=st.booleans(),
    steps=COUNT,
    device_bytes=st.none() | COUNT,
    phases=st.none() | st.dictionaries(st.sampled_from(PHASES), COUNT),
)


@given(ORDERS)
def test_an_order_is_read_as_it_was_written(order: pacing.Order) -> None:
    assert pacing.order(pacing.encode(order)) == order


@given(st.builds(Parked, done=COUNT) | SLICES)
def test_a_report_is_read_as_it_was_written_and_fits(report: pacing.Report) -> None:
    data = pacing.encode(report)
    assert pacing.report(data) == report
    assert len(data) <= pacing.MAX_BYTES


def test_the_longest_report_fits_into_a_message() -> None:
    numbers = {name: MAX_INTEGER for name, value in SLICE.to_json().items() if type(value) is int}
    longest = SLICE.to_json() | numbers | {"device_bytes": MAX_INTEGER, "phases": dict.fromkeys(PHASES, MAX_INTEGER)}
    assert len(canonical.encode(longest)) < pacing.MAX_BYTES // 4


@pytest.mark.parametrize(
    "change",
    [
        {"type": "pace-stop"},
        {"type": "pace-slice"},
        {"more": 1},
        {"until": -1},
        {"until": True},
        {"until": "3"},
        {"steps": 0},
        {"steps": None},
        {"least_ns": 1},
        {"steps": None, "least_ns": DAY_NS + 1},
        {"guard_ns": 3600 * 10**9 + 1},
        {"burn_ns": 10**9 + 1},
        {"origin_ns": 5},
        {"origin_ns": "-5"},
        {"origin_ns": "05"},
        {"origin_ns": "1" * 20},
        {"stamps": 1},
    ],
    ids=str,
)
def test_an_order_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        pacing.order(canonical.encode(GO.to_json() | change))
    assert caught.value.code is Code.SCHEMA


@pytest.mark.parametrize(
    "change",
    [
        {"type": "pace-go"},
        {"name": "Jane Doe"},
        {"t0_ns": -1},
        {"loss_finite": 1},
        {"loss_finite": "0.693"},
        {"device_bytes": -1},
        {"wait_ppm": 1_000_001},
        {"phases": {"forward": 1, "patients": 2}},
        {"phases": {"forward": "long"}},
        {"phases": []},
        {"skew_ns": None},
    ],
    ids=str,
)
def test_a_report_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        pacing.report(canonical.encode(SLICE.to_json() | change))
    assert caught.value.code is Code.SCHEMA


@pytest.mark.parametrize("missing", [*GO.to_json(), *SLICE.to_json()])
def test_nothing_may_be_left_out(missing: str) -> None:
    for message, read in ((GO, pacing.order), (SLICE, pacing.report)):
        left = {name: value for name, value in message.to_json().items() if name != missing}
        if len(left) < len(message.to_json()):
            with pytest.raises(FormatError):
                read(canonical.encode(left))
