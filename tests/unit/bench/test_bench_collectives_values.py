"""Samples become medians, ratios and verdicts; a kept measurement gives its numbers again from its raw samples."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from glasshouse.bench.collectives.measurement import Measurement, Memory, Start, bars
from glasshouse.bench.collectives.plan import Plan, full, judged, quick
from glasshouse.bench.collectives.run import _foreign, _merge
from glasshouse.bench.collectives.values import Cell, Found, Kind, Sample, Way
from glasshouse.errors import FormatError, UsageError
from simulators.collectives_measured import found, measurement

MIB = 1 << 20
CELL = Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=25 * MIB, ways=(Way.RAW, Way.RING, Way.DIRECT))


def test_a_ratio_is_of_medians_and_its_interval_holds_it() -> None:
    one = found(CELL, {Way.RAW: 0.010, Way.RING: 0.020, Way.DIRECT: 0.0101})
    ratio = one.ratio(Way.RING)
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.value == pytest.approx(2, rel=0.05)
    assert one.ratio(Way.RAW).low == one.ratio(Way.RAW).high == 1
    assert one.best() is Way.DIRECT
    assert one.ratio(Way.RING) == ratio  # the same draws each time


def test_a_disturbed_round_disturbs_every_way_and_hardly_the_ratio() -> None:
    calm = found(CELL, {Way.RAW: 0.010, Way.RING: 0.011}, rounds=21)
    disturbed = {
        way: [replace(one, wall_s=one.wall_s * (4 if place % 5 == 0 else 1)) for place, one in enumerate(samples)]
        for way, samples in calm.samples.items()
    }
    assert replace(calm, samples=disturbed).ratio(Way.RING).value == pytest.approx(calm.ratio(Way.RING).value, rel=0.03)


def test_processor_time_and_idleness_are_of_all_ranks() -> None:
    samples = [Sample(wall_s=1.0, user_s=0.6, system_s=0.4)] * 5
    one = Found(cell=CELL, samples={Way.RAW: samples}, counts={}, cores=2)
    assert one.cpu_s(Way.RAW) == pytest.approx(1.0)
    assert one.idle(Way.RAW) == pytest.approx(0.5)
    assert replace(one, cores=8).idle(Way.RAW) == pytest.approx(0.5)  # two ranks use two processors, whatever there is
    assert one.exposed_s(Way.RAW) is None


def test_a_repetition_lasts_from_the_first_begin_to_the_last_end() -> None:
    ranks = [[[10.0, 11.0, 0.5, 0.1]], [[10.2, 11.4, 0.3, 0.1]]]
    [merged] = _merge(ranks, batch=2)
    assert merged == Sample(wall_s=0.7, user_s=0.4, system_s=0.1)


def test_what_others_take_of_the_processors_is_told_and_never_negative() -> None:
    assert _foreign((0.0, 10.0, 1.0), (2.0, 14.0, 2.0)) == pytest.approx(1.5)
    assert _foreign((0.0, 10.0, 1.0), (2.0, 10.5, 2.0)) == 0
    assert _foreign(None, (2.0, 10.5, 2.0)) is None


def test_a_measurement_is_read_back_as_it_was_written() -> None:
    whole = measurement()
    text = json.dumps(whole.to_json())
    assert Measurement.parse(text).to_json() == whole.to_json()
    assert Measurement.parse(text).found[0].ratio(Way.RING) == whole.found[0].ratio(Way.RING)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "another"}', b"\xff"])
def test_what_is_no_measurement_is_refused(text: str | bytes) -> None:
    with pytest.raises(FormatError, match="not a measurement of collectives"):
        Measurement.parse(text)


def test_each_bar_is_judged_by_the_best_sealed_way_and_an_iteration_by_what_a_user_gets() -> None:
    by = {bar.what: bar for bar in bars(measurement())}
    assert by["iteration of gpt2-14m, 2 ranks, sealed to raw"].met
    assert by["start-up of 8 ranks beyond gloo's"].found == pytest.approx(0.25)
    assert by["peak extra memory to the bucket, sealed, 25 MiB, 2 ranks"].found == pytest.approx(0.4)
    assert {what for what in by if what.startswith("all-reduce")} == {
        f"all-reduce of {size} MiB, {ranks} ranks, best sealed to raw" for size in (1, 25) for ranks in (2, 4)
    }


def test_a_missed_bar_is_missed() -> None:
    slow = found(CELL, {Way.RAW: 0.010, Way.RING: 0.020, Way.PLAIN: 0.005})
    [bar] = bars(Measurement(system={}, found=(slow,)))
    assert not bar.met  # plain is not sealed: it is never the best
    late = Start(ranks=8, raw_s=(0.1,), sealed_s=(1.2,))
    [bar] = bars(Measurement(system={}, found=(), start=late))
    assert not bar.met
    heavy = Memory(way=Way.RING, ranks=2, bytes=MIB, extra_bytes=4 * MIB)
    raw = replace(heavy, way=Way.RAW)
    [bar] = bars(Measurement(system={}, found=(), memory=(raw, heavy)))
    assert bar.found == 4
    assert not bar.met


def test_other_types_and_other_buckets_are_measured_and_not_judged() -> None:
    narrow = found(replace(CELL, dtype="bfloat16"), {Way.RAW: 0.01, Way.RING: 0.02})
    assert bars(Measurement(system={}, found=(narrow,))) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 1},
        {"bytes": None},
        {"model": "gpt2"},
        {"kind": Kind.TRAIN},
        {"kind": Kind.TRAIN, "bytes": None},
    ],
)
def test_a_cell_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a cell of"):
        replace(CELL, **wrong)


def test_a_plan_begins_with_what_is_judged_and_starts_each_world_once() -> None:
    plan = full(time_s=600, seed=1)
    ranks = [cell.ranks for cell in plan.cells]
    assert ranks == sorted(ranks)
    for count in set(ranks):
        mine = [judged(cell) for cell in plan.cells if cell.ranks == count]
        assert mine == sorted(mine, reverse=True)
        assert any(mine)
    assert {cell.cap_mib for cell in plan.cells} == {None, 1, 5, 100, 250}
    assert len(set(plan.cells)) == len(plan.cells)


def test_the_time_is_shared_until_it_is_used() -> None:
    plan = full(time_s=100, seed=1, parts=("all-reduce",), ranks=(2,))
    left = plan.time_s
    for cell in plan.cells:
        share = plan.share_s(cell, left)
        assert 0 < share <= left
        left -= share
    assert left == pytest.approx(0, abs=1e-6)
    assert plan.share_s(plan.cells[0], -1) == 0


def test_a_quick_trial_has_every_kind_of_cell_and_sizes_enough_for_a_model() -> None:
    plan = quick(seed=1)
    assert {cell.kind for cell in plan.cells} == set(Kind)
    assert plan.quick
    assert all(plan.needed(cell) for cell in plan.cells)
    assert len({cell.bytes for cell in plan.cells if cell.kind is Kind.ALL_REDUCE}) >= 3


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        Plan(cells=(), time_s=10, seed=0)
    with pytest.raises(ValueError, match="do not lie together"):
        Plan(cells=(replace(CELL, ranks=4), CELL), time_s=10, seed=0)
