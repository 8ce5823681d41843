"""Samples become medians, ratios and verdicts; a plan begins with what is judged."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.collectives.cells import DTYPES, MIB, REPLAYED, TRAINED, Cell, Kind, Way, bars, numbers, plan

CELL = Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=25 * MIB)


def found(cell: Cell, seconds: dict[Way, float], *, rounds: int = 9, disturbed: int = 0) -> dict[str, Any]:
    """Return a cell whose ways take about these times, and every few rounds four times as long."""
    chance = random.Random(3)
    samples: dict[str, list[list[float]]] = {way.value: [] for way in seconds}
    for number in range(rounds):
        slower = 4 if disturbed and number % disturbed == 0 else 1
        for way, value in seconds.items():
            wall = value * slower * chance.uniform(0.98, 1.02)
            samples[way.value].append([wall, wall * 0.6, wall * 0.4])
    kept = asdict(cell) | {"cores": 2, "samples": samples}
    return kept | numbers(kept)


def judged(*cells: dict[str, Any], memory: tuple[dict[str, Any], ...] = ()) -> dict[str, bool]:
    return {bar["what"]: bar["met"] for bar in bars({"cells": cells, "memory": memory})}


def test_a_ratio_is_of_medians_and_its_interval_holds_it() -> None:
    one = found(CELL, {Way.RAW: 0.010, Way.RING: 0.020})
    value, low, high = one["ratio_to_raw"]["ring"]
    assert low <= value <= high
    assert value == pytest.approx(2, rel=0.05)
    assert one["ratio_to_raw"]["raw"] == [1, 1, 1]
    assert numbers(one)["ratio_to_raw"] == one["ratio_to_raw"]  # the same draws each time


def test_a_disturbed_round_disturbs_every_way_and_hardly_the_ratio() -> None:
    times = {Way.RAW: 0.010, Way.RING: 0.011}
    calm, disturbed = (found(CELL, times, rounds=21, disturbed=every) for every in (0, 5))
    assert disturbed["ratio_to_raw"]["ring"][0] == pytest.approx(calm["ratio_to_raw"]["ring"][0], rel=0.03)


def test_processor_time_and_idleness_are_of_all_ranks() -> None:
    kept = asdict(CELL) | {"cores": 8, "samples": {"raw": [[1.0, 0.6, 0.4]] * 5}}
    one = numbers(kept)
    assert one["cpu_s"]["raw"] == pytest.approx(1.0)
    assert one["idle"]["raw"] == pytest.approx(0.5)  # two ranks use two processors, whatever there is


def test_what_is_exposed_is_the_iteration_less_its_computation() -> None:
    cell = Cell(kind=Kind.TRAIN, ranks=2, model="gpt2-14m")
    one = found(cell, {Way.RAW: 0.2, Way.SEALED: 0.3, Way.ALONE: 0.1})
    assert one["exposed_s"].keys() == {"raw", "sealed"}
    assert one["exposed_s"]["sealed"] == pytest.approx(0.2, rel=0.1)


def test_an_all_reduce_is_judged_by_its_best_sealed_way_and_plain_is_none() -> None:
    what = "all-reduce of 25 MiB, 2 ranks, best sealed to raw"
    assert judged(found(CELL, {Way.RAW: 0.010, Way.RING: 0.020, Way.DIRECT: 0.008})) == {what: True}
    assert judged(found(CELL, {Way.RAW: 0.010, Way.RING: 0.020, Way.PLAIN: 0.005})) == {what: False}


def test_an_iteration_is_judged_by_what_a_user_gets() -> None:
    cell = Cell(kind=Kind.TRAIN, ranks=2, model="gpt2-14m")
    one = found(cell, {Way.RAW: 0.2, Way.SEALED: 0.4, Way.DIRECT: 0.2})
    assert judged(one) == {"iteration of gpt2-14m, 2 ranks, sealed to raw": False}


def test_memory_is_judged_by_the_worst_sealed_way() -> None:
    memory = tuple(
        {"bytes": MIB, "extra_bytes": extra * MIB, "ranks": 2, "way": way}
        for way, extra in (("raw", 9), ("direct", 1), ("ring", 4))
    )
    assert judged(memory=memory) == {"peak extra memory to the bucket, ring, 1 MiB, 2 ranks": False}


@pytest.mark.parametrize(
    "cell",
    [
        Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=25 * MIB, dtype="bfloat16"),
        Cell(kind=Kind.TRAIN, ranks=2, model="gpt2-14m", cap_mib=5),
        Cell(kind=Kind.TRAIN, ranks=4, model="gpt2-14m"),
        Cell(kind=Kind.REPLAY, ranks=2, model="gpt2-xl"),
    ],
    ids=lambda cell: f"{cell.kind} {cell.dtype} {cell.ranks} {cell.cap_mib}",
)
def test_other_types_buckets_and_ranks_are_measured_and_not_judged(cell: Cell) -> None:
    assert judged(found(cell, {Way.RAW: 0.01, Way.SEALED: 0.02})) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": Kind.ALL_REDUCE},
        {"kind": Kind.ALL_REDUCE, "bytes": 1, "model": "gpt2"},
        {"kind": Kind.TRAIN, "bytes": 1},
        {"kind": Kind.TRAIN},
    ],
)
def test_a_cell_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a cell of"):
        Cell(ranks=2, **wrong)


def test_a_plan_begins_with_what_is_judged_and_starts_each_world_once() -> None:
    cells = plan(
        ranks=[4, 2], parts=list(Kind), sizes=[MIB, 4 * MIB, 25 * MIB], models=[*REPLAYED, *TRAINED],
        caps=[None, 1, 250], dtypes=DTYPES[:2],
    )  # fmt: skip
    ranks = [cell.ranks for cell in cells]
    assert ranks == sorted(ranks)
    for count in (2, 4):
        mine = [cell.bar is not None for cell in cells if cell.ranks == count]
        assert mine == sorted(mine, reverse=True)
        assert any(mine)
    assert len(set(cells)) == len(cells)
    assert {cell.model for cell in cells if cell.ranks == 4} == {None, *TRAINED, *REPLAYED}
    assert {(cell.model, cell.cap_mib) for cell in cells if cell.cap_mib == 250} == {
        ("gpt2-14m", 250), ("resnet-50", 250), ("gpt2-xl", 250),
    }  # fmt: skip
