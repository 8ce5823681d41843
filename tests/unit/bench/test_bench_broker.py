"""The broker benchmark counts every release, and nothing that is lost or doubled gets past it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from glasshouse.bench import broker
from glasshouse.bench.broker.bare import commits_us, cryptography_us
from glasshouse.bench.broker.counts import Kept, compare
from glasshouse.bench.broker.load import quantiles_ms
from glasshouse.errors import UsageError

HELD = [("run-1", "key-1"), ("run-2", "key-2"), ("run-3", "key-3")]
KEPT = Kept(
    releases=[("a", "run-1", "key-1"), ("a", "run-2", "key-2"), ("b", "run-3", "key-3")],
    counters={"a": 2, "b": 1, "unused": 0},
    audited=[("a", "run-1"), ("a", "run-2"), ("b", "run-3")],
    chain_holds=True,
)
BUDGETS = {"a": 2, "b": 5, "unused": 1}


def test_what_everybody_agrees_on_is_right() -> None:
    counts = compare(HELD, KEPT, BUDGETS)
    assert (counts.held, counts.released, counts.wrong) == (3, 3, 0)


def findings(held: list[tuple[str, str]] = HELD, budgets: dict[str, int] = BUDGETS, **kept: object) -> set[str]:
    counts = compare(held, replace(KEPT, **kept), budgets)
    assert counts.wrong > 0
    return {name for name, value in asdict(counts).items() if name not in ("held", "released", "chain_holds") and value}


def test_a_release_that_the_database_forgot_is_lost() -> None:
    assert "lost" in findings(releases=KEPT.releases[1:])
    assert findings([*HELD, ("run-4", "key-4")]) == {"lost"}


def test_a_release_that_nobody_holds_is_found() -> None:
    assert findings(HELD[1:]) == {"unheld"}


def test_a_release_to_two_keys_of_one_run_or_twice_to_one_key_is_doubled() -> None:
    second = ("a", "run-1", "key-9")
    both = findings(
        [*HELD, ("run-1", "key-9")],
        {**BUDGETS, "a": 3},
        releases=[*KEPT.releases, second],
        counters={**KEPT.counters, "a": 3},
        audited=[*KEPT.audited, ("a", "run-1")],
    )
    assert both == {"doubled"}
    assert {"doubled", "lost"} <= findings([*HELD, HELD[0]])


def test_a_counter_or_an_audit_log_that_says_another_number_is_found() -> None:
    assert findings(counters={**KEPT.counters, "a": 1}) == {"miscounted"}
    assert findings(audited=KEPT.audited[1:]) == {"miscounted"}


def test_a_budget_that_was_not_kept_is_found() -> None:
    assert findings(budgets={**BUDGETS, "a": 1}) == {"over_budget"}
    assert findings(budgets={"a": 2}) == {"over_budget"}, "a deployment without a budget has none"


def test_a_broken_audit_log_is_wrong_even_when_all_numbers_agree() -> None:
    assert compare(HELD, replace(KEPT, chain_holds=False), BUDGETS).wrong == 1


def test_percentiles_are_times_that_were_measured() -> None:
    assert quantiles_ms([5_000_000]) == {"p50": 5.0, "p90": 5.0, "p99": 5.0, "max": 5.0}
    times = [number * 1_000_000 for number in range(200, 0, -1)]
    assert quantiles_ms(times) == {"p50": 100.0, "p90": 180.0, "p99": 198.0, "max": 200.0}


def test_the_floors_are_measured_and_leave_nothing_behind(tmp_path: Path) -> None:
    assert cryptography_us(rounds=3) > 0
    assert commits_us(tmp_path, rounds=3) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"runtimes": ()}, {"runtimes": (0,)}, {"runtimes": (1000,)}, {"seconds": 0.0}])
def test_numbers_that_measure_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        broker.run(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_planted_loss_and_a_planted_double_fail_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Kept.read

    def planted(path: Path) -> Kept:
        kept = read(path)
        _, second, *others = kept.releases
        return replace(kept, releases=[second, second, *others])  # one forgotten, one there twice

    monkeypatch.setattr(Kept, "read", planted)
    found = broker.run(runtimes=(2,), seconds=0.3, warm_up_s=0.0, folder=tmp_path)
    json.dumps(found)
    assert (found["counts"]["lost"], found["counts"]["unheld"]) == (1, 1)
    assert found["counts"]["doubled"] == 2, "its run and its key"
    bar = found["bars"]["lost_doubled_or_failed"]
    assert (bar["met"], bar["found"] >= 4) == (False, True)
    assert list(tmp_path.iterdir()) == []
