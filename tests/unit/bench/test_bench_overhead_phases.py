"""Where a step's time goes: parts that are known are found again, and what was not looked at is not invented."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from glasshouse.bench.overhead.analysis import check_same
from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.phases import Bound, Phases, analyse_phases, parse, read_phase_slices
from glasshouse.bench.overhead.slices import tree
from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.wire.canonical import decode, encode
from simulators.measurement import phase_slices


def test_the_parts_of_a_step_are_found_and_so_is_what_no_stamp_covers() -> None:
    found = analyse_phases(phase_slices())
    raw, protected = found.arms[Arm.RAW], found.arms[Arm.PROTECTED]
    assert raw.phases_ns == {"forward": 1e6, "backward": 2e6}
    assert raw.step_ns == 3_500_000
    assert raw.residual_ns == pytest.approx(535_500)
    assert protected.residual_ns - raw.residual_ns == pytest.approx(100_000)
    assert raw.stamped_step_ns == pytest.approx(sum(raw.phases_ns.values()) + raw.residual_ns)
    assert raw.steps_per_s == pytest.approx(1e9 / 3_500_000)
    assert raw.cpu_share == pytest.approx(0.9)
    assert raw.rss_bytes == (200 << 20) + 3


def test_what_the_stamps_cost_is_measured_with_an_interval() -> None:
    raw = analyse_phases(phase_slices()).arms[Arm.RAW]
    truth = (math.log(3_535_000 / 3_500_000) + math.log(3_536_000 / 3_500_000)) / 2
    assert raw.perturbation == pytest.approx(truth)
    assert raw.perturbation_interval is not None
    assert raw.perturbation_interval.holds(truth)
    assert not raw.perturbation_interval.holds(0.0)
    assert raw.blocks == 4


def test_one_block_has_no_interval_and_stamps_alone_say_nothing_of_themselves() -> None:
    one = analyse_phases(phase_slices(blocks=1)).arms[Arm.RAW]
    assert (one.perturbation is None, one.perturbation_interval) == (False, None)
    alone = analyse_phases([found for found in phase_slices() if found.stamped]).arms[Arm.RAW]
    assert (alone.perturbation, alone.blocks, alone.step_ns) == (None, 0, None)
    assert alone.steps_per_s == pytest.approx(1e9 / alone.stamped_step_ns)


@pytest.mark.parametrize(
    ("device", "wait", "bound", "reason"),
    [
        (False, None, Bound.HOST, "no-device"),
        (True, None, Bound.UNKNOWN, "not-observed"),
        (True, 0.6, Bound.GPU, "host-waits"),
        (True, 0.02, Bound.HOST, "device-waits"),
    ],
)
def test_the_bound_is_said_with_its_reason_and_only_if_somebody_looked(
    device: bool, wait: float | None, bound: Bound, reason: str
) -> None:
    slices = phase_slices(device=device)
    if wait is not None:
        slices = [replace(one, wait_ppm=round(wait * 1_000_000) if one.stamped else None) for one in slices]
    found = analyse_phases(slices)
    assert (found.bound, found.reason) == (bound, reason)
    if wait is not None:
        assert found.waiting == pytest.approx(wait, rel=1e-6)


def test_a_device_has_its_memory_and_its_energy() -> None:
    raw = analyse_phases(phase_slices(device=True)).arms[Arm.RAW]
    assert raw.device_bytes == (1 << 30) + 3
    assert raw.energy_mj == pytest.approx(250)


def test_the_numbers_follow_from_the_lines_alone() -> None:
    slices = phase_slices(device=True)
    lines = [one.encode() + b"\n" for one in slices]
    again = list(read_phase_slices(lines))
    assert again == slices
    assert tree(again).root() == tree(slices).root()
    found: Phases = analyse_phases(again)
    check_same(decode(encode(found.to_json()), max_bytes=1 << 20), analyse_phases(slices).to_json())


def test_slices_out_of_place_are_refused() -> None:
    slices = phase_slices()
    for wrong in (
        [slices[1], slices[0], *slices[2:]],
        [slices[0], *slices],
        [replace(slices[0], t1_ns=slices[1].t0_ns + 1), *slices[1:]],
        [],
        [one for one in slices if not one.stamped],
    ):
        with pytest.raises(VerificationError) as caught:
            analyse_phases(wrong)
        assert caught.value.code is Code.ARTIFACT_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"phases": None},
        {"phases": {"Forward pass": 1}},
        {"phases": {"forward": -1}},
        {"phases": {"forward": "1"}},
        {"phases": {f"p{number}": 1 for number in range(17)}},
        {"phases": [1]},
        {"stamped": False},
        {"steps": 0},
        {"t1_ns": 0},
        {"position": 4},
        {"arm": "Q"},
        {"kind": "slice"},
        {"cpu_ns": -1},
        {"wait_ppm": 1_000_001},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_line_that_is_no_phase_slice(changes: dict[str, Any]) -> None:
    whole = phase_slices()[0].to_json()
    with pytest.raises(FormatError) as caught:
        parse(encode({**whole, **changes}))
    assert caught.value.code is Code.SCHEMA
    for name in whole:
        with pytest.raises(FormatError):
            parse(encode({key: value for key, value in whole.items() if key != name}))


def test_a_line_that_was_cut_off() -> None:
    line = phase_slices()[0].encode()
    with pytest.raises(FormatError, match="cut off"):
        list(read_phase_slices([line]))
    with pytest.raises(FormatError):
        parse(line + b" ")
