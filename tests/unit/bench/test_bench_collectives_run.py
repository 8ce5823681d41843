"""A run shares its time, leaves out what does not fit, and keeps what is complete when a rank fails later."""

from __future__ import annotations

from typing import Any

import pytest

from glasshouse.bench.collectives import run
from glasshouse.bench.collectives.plan import Plan
from glasshouse.bench.collectives.values import Cell, Kind, Way
from glasshouse.cli.bench_collectives_view import Silent
from glasshouse.errors import Code, InternalError

WAYS = (Way.RAW, Way.RING)
SMALL, LARGE = (Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=size, ways=WAYS) for size in (1_000, 2_000))


class Ranks:
    """Two ranks of a simulated world: each cell takes what `once_s` says, and `fails` names what none survives."""

    once_s: dict[int, float]
    fails: int | None
    orders: list[str]

    def __init__(self, size: int, ways: object, *, stopped: object) -> None:
        self.size, self.pids, self.cell = size, (), {}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_error: object) -> None:
        self.orders.append("closed")

    def order(self, do: str, *, timeout_s: float, **rest: Any) -> list[dict[str, Any]]:
        self.orders.append(do)
        if do == "prepare":
            self.cell = rest["cell"]
            if self.cell["bytes"] == self.fails:
                raise InternalError(Code.INTERNAL, "rank 1 of the benchmark ended early", hint="line\nthe last word")
            once = dict.fromkeys(self.cell["ways"], self.once_s[self.cell["bytes"]])
            return [{"once_s": once, "buckets": [], "share": 1.0, "whole_buckets": 0}] * self.size
        if do == "rounds":
            each = {way: [[1.0, 1.5, 0.2, 0.1]] * len(rest["orders"]) for way in self.cell["ways"]}
            assert all(sorted(turn) == sorted(self.cell["ways"]) for turn in rest["orders"])
            return [{"samples": each}] * self.size
        return [{"counts": {}}] * self.size


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> type[Ranks]:
    monkeypatch.setattr(run, "World", Ranks)
    Ranks.once_s, Ranks.fails, Ranks.orders = {1_000: 0.1, 2_000: 0.1}, None, []
    return Ranks


def plan(**changes: Any) -> Plan:
    return Plan(**{"cells": (SMALL, LARGE), "time_s": 0.01, "seed": 1, **changes})


def test_every_cell_gets_the_least_rounds_even_when_the_time_is_over(ranks: type[Ranks]) -> None:
    found = run.measure(plan(), Silent()).found
    assert [one.cell for one in found] == [SMALL, LARGE]
    assert {one.rounds for one in found} == {5}
    assert found[0].samples[Way.RING][0].user_s == pytest.approx(2 * 0.2)
    assert ranks.orders[-1] == "closed"


def test_what_would_take_far_longer_than_its_share_is_left_out_and_said(ranks: type[Ranks]) -> None:
    ranks.once_s = {1_000: 0.1, 2_000: 50.0}
    kept = run.measure(plan(), Silent())
    assert [one.cell for one in kept.found] == [SMALL]
    [left_out] = kept.not_measured
    assert left_out.cell == LARGE
    assert left_out.why == "5 rounds would take 500 s"


def test_a_rank_that_fails_later_leaves_what_is_complete_and_is_not_hidden(ranks: type[Ranks]) -> None:
    ranks.fails = 2_000
    kept = run.measure(plan(), Silent())
    assert [one.cell for one in kept.found] == [SMALL]
    assert kept.failed == "rank 1 of the benchmark ended early"
    assert [(one.cell, one.why) for one in kept.not_measured] == [
        (LARGE, "rank 1 of the benchmark ended early: the last word")
    ]
    assert ranks.orders[-1] == "closed"


def test_a_rank_that_fails_at_once_is_an_error(ranks: type[Ranks]) -> None:
    ranks.fails = 1_000
    with pytest.raises(InternalError, match="ended early"):
        run.measure(plan(), Silent())
    assert ranks.orders[-1] == "closed"


def test_the_same_seed_draws_the_same_orders(ranks: type[Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[list[str]]] = []
    plain = Ranks.order

    def order(self: Ranks, do: str, *, timeout_s: float, **rest: Any) -> list[dict[str, Any]]:
        if do == "rounds":
            drawn[-1] += rest["orders"]
        return plain(self, do, timeout_s=timeout_s, **rest)

    monkeypatch.setattr(Ranks, "order", order)
    for seed in (1, 1, 2):
        drawn.append([])
        run.measure(plan(seed=seed), Silent())
    assert drawn[0] == drawn[1] != drawn[2]
