"""The design is fixed before the first slice, and anybody can draw its schedule again."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from glasshouse.bench.overhead.design import (
    SEQUENCES,
    Arm,
    Design,
    LaunchOrder,
    Level,
    Mode,
    Phase,
    WarmupRule,
    default_margin_ppm,
)
from glasshouse.bench.overhead.draws import stream
from glasshouse.errors import FormatError, UsageError
from simulators.simulate import make_design

SEED = bytes(range(32))
SPEC = Path(__file__).parents[3] / "spec" / "overhead-artifact.md"


def _by_hand(purpose: bytes, first: int, second: int, index: int) -> bytes:
    counters = b"".join(number.to_bytes(8, "big") for number in (first, second, index))
    return hashlib.sha256(b"glasshouse/overhead/v1/" + purpose + b"\0" + SEED + counters).digest()


def test_the_stream_is_what_the_spec_says() -> None:
    expected = _by_hand(b"measured", 3, 7, 0) + _by_hand(b"measured", 3, 7, 1)
    assert stream(SEED, "measured", 3, 7, 40) == expected[:40]
    assert stream(SEED, "measured", 3, 7, 0) == b""
    with pytest.raises(ValueError, match="31 bytes"):
        stream(SEED[1:], "measured", 0, 0, 1)


def test_each_block_is_drawn_by_itself() -> None:
    design = make_design(seed=SEED, sessions=2, blocks_per_session=8)
    for session, ways in enumerate(design.schedule()):
        assert list(ways) == [SEQUENCES[_by_hand(b"measured", session, block, 0)[0] & 3] for block in range(8)]
    longer = make_design(seed=SEED, sessions=5, blocks_per_session=100)
    assert longer.schedule()[1][:8] == design.schedule()[1]


def test_the_example_in_the_spec_is_drawn_by_the_code() -> None:
    text = SPEC.read_text()
    found = re.search(r"^session 0: ([RP ]+)$\n^session 1: ([RP ]+)$\n^launched first: ([RP ]+)$", text, re.MULTILINE)
    assert found is not None
    design = make_design(seed=SEED, sessions=4, blocks_per_session=8)
    assert [" ".join(ways) for ways in design.schedule()[:2]] == [found[1], found[2]]
    assert " ".join(design.launched_first(session).value for session in range(4)) == found[3]


def test_the_four_sequences_are_equally_likely_and_balanced() -> None:
    ways = Counter(way for row in make_design(sessions=8, blocks_per_session=500).schedule() for way in row)
    assert set(ways) == set(SEQUENCES)
    assert all(abs(number - 1000) < 120 for number in ways.values())
    assert all(way.count("P") == way.count("R") == 2 for way in SEQUENCES)


def test_warm_up_blocks_have_a_draw_of_their_own() -> None:
    design = make_design(seed=SEED)
    warm = [design.sequence(Phase.WARMUP, 0, block) for block in range(64)]
    assert warm != [design.sequence(Phase.MEASURED, 0, block) for block in range(64)]


def test_the_launch_order_alternates() -> None:
    design = make_design()
    orders = [design.launched_first(session) for session in range(6)]
    assert orders[0] is not orders[1]
    assert orders[::2] == [orders[0]] * 3
    assert {make_design(number).launched_first(0) for number in range(20)} == set(Arm)
    assert make_design(launch_order=LaunchOrder.RAW_FIRST).launched_first(1) is Arm.RAW
    assert make_design(launch_order=LaunchOrder.PROTECTED_FIRST).launched_first(1) is Arm.PROTECTED


def test_a_sequential_block_is_its_two_legs_in_launch_order() -> None:
    design = _sequential()
    assert {design.sequence(Phase.MEASURED, session, 0) for session in (0, 1)} == {"RP", "PR"}
    assert design.slices_per_block == 2


@pytest.mark.parametrize("design", [make_design(), make_design(mode=Mode.NULL, sessions=1), None])
def test_a_design_survives_its_json(design: Design | None) -> None:
    design = design or _sequential()
    assert Design.from_json(design.to_json()) == design
    assert Design.from_json(design.to_json()).sha256 == design.sha256


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": bytes(31)},
        {"sessions": 0},
        {"blocks_per_session": 0},
        {"slice_steps": 0},
        {"slice_steps": None},
        {"leg_ns": 10**9},
        {"guard_steps": 2},
        {"guard_ns": 249_999_999},
        {"margin_ppm": 0},
        {"mode": Mode.SEQUENTIAL},
        {"mode": Mode.SEQUENTIAL, "blocks_per_session": 1, "leg_ns": 1},
        {"mode": Mode.SEQUENTIAL, "blocks_per_session": 1},
    ],
)
def test_a_design_that_measures_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_design(**changes)


@pytest.mark.parametrize(
    "changes", [{"least_ns": 2, "cap_ns": 1}, {"window_blocks": 4}, {"window_blocks": 33}, {"drift_ppm": 0}]
)
def test_a_warm_up_that_cannot_be_judged_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        WarmupRule(**changes)


def test_unknown_and_missing_members_are_refused() -> None:
    value = make_design().to_json()
    with pytest.raises(FormatError):
        Design.from_json(value | {"more": 1})
    del value["seed"]
    with pytest.raises(FormatError):
        Design.from_json(value)


def test_changing_anything_changes_the_digest() -> None:
    designs = [make_design(), make_design(1), make_design(margin_ppm=2500), make_design(blocks_per_session=21)]
    assert len({design.sha256 for design in designs}) == len(designs)


def test_margins_and_levels() -> None:
    assert default_margin_ppm(sessions=12, measured_s=3600) == 2500
    assert default_margin_ppm(sessions=12, measured_s=3599) == 5000
    assert default_margin_ppm(sessions=1, measured_s=36000) == 5000
    assert [make_design(sessions=number).level for number in (1, 2, 12)] == [Level.QUICK, Level.SHORT, Level.STANDARD]


def _sequential() -> Design:
    return make_design(
        mode=Mode.SEQUENTIAL, blocks_per_session=1, slice_steps=None, leg_ns=10**10, guard_steps=0, guard_ns=0
    )
