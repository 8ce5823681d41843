"""The broker benchmark counts every release, and nothing that is lost or doubled gets past it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gate import Crowd, Record, cryptography_us, main, result
from benchmarks.gate_counts import Kept, compare
from benchmarks.kept import quantiles

HELD = [("run-1", "key-1"), ("run-2", "key-2"), ("run-3", "key-3")]
KEPT = Kept(
    releases=[("a", "run-1", "key-1"), ("a", "run-2", "key-2"), ("b", "run-3", "key-3")],
    counters={"a": 2, "b": 1, "unused": 0},
    audited=[("a", "run-1"), ("a", "run-2"), ("b", "run-3")],
    chain_holds=True,
)
MISTAKES = ("lost", "unheld", "doubled", "miscounted", "over_budget", "broken")
BUDGETS = {"a": 2, "b": 5, "unused": 1}


def test_what_everybody_agrees_on_is_right() -> None:
    assert compare(HELD, KEPT, BUDGETS) == {"held": 3, "released": 3, **dict.fromkeys(MISTAKES, 0)}


def findings(held: list[tuple[str, str]] = HELD, budgets: dict[str, int] = BUDGETS, **kept: object) -> set[str]:
    counts = compare(held, replace(KEPT, **kept), budgets)
    return {name for name in MISTAKES if counts[name]}


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
    assert findings(chain_holds=False) == {"broken"}


def test_percentiles_are_times_that_were_measured() -> None:
    assert quantiles([5.0]) == {"p50_ms": 5.0, "p90_ms": 5.0, "p99_ms": 5.0, "max_ms": 5.0}
    times = [float(number) for number in range(200, 0, -1)]
    assert quantiles(times) == {"p50_ms": 100.0, "p90_ms": 180.0, "p99_ms": 198.0, "max_ms": 200.0}


def record(begin_ms: int, end_ms: int, *, code: str = "", requests: int = 2) -> Record:
    return Record(float(end_ms - begin_ms), end_ms * 10**6, requests, code, (f"run-{end_ms}", "key"))


def test_the_rate_counts_what_ended_inside_the_window_and_every_release_is_counted_all_the_same() -> None:
    measured = [record(10, 30), record(30, 60, requests=4), record(60, 110), record(70, 500)]
    crowd = Crowd(
        warm_up=[record(0, 9)],
        measured=measured,
        open_ns=10 * 10**6,
        close_ns=110 * 10**6,
        server_s=0.2,
        clients_s=0.4,
        runtimes=2,
    )
    numbers = crowd.numbers()
    assert (numbers["exchanges"], numbers["seconds"], numbers["per_s"]) == (3, 0.1, 30.0)
    assert (numbers["p50_ms"], numbers["max_ms"]) == (30.0, 50.0)
    assert (numbers["server_cpu_ms"], numbers["client_cpu_ms"]) == (50.0, 100.0)
    assert (numbers["tried_again"], numbers["failed"]) == (1, 0)
    assert len(crowd.held) == 5


def test_an_exchange_without_a_release_holds_nothing_and_is_a_failure() -> None:
    crowd = Crowd(
        warm_up=[],
        measured=[record(0, 5), record(5, 9, code="release-budget")],
        open_ns=0,
        close_ns=10**7,
        server_s=0.0,
        clients_s=0.0,
        runtimes=1,
    )
    assert (crowd.numbers()["failed"], crowd.held) == (1, [("run-5", "key")])


def found(*, counts: dict[str, int], failed: int = 0, exact: bool = True) -> dict[str, Any]:
    level = {"runtimes": 8, "per_s": 150.0, "p99_ms": 80.0, "server_cpu_ms": 6.0, "failed": failed}
    return {
        "levels": [{**level, "runtimes": 1}, level, {**level, "runtimes": 16, "per_s": 10.0}],
        "bare_requests": {"per_s": 1000.0, "server_cpu_ms": 1.0},
        "counts": {"held": 7, "released": 7, **counts},
        "contested_budget": {"exact": exact},
        "cryptography_us": 750.0,
    }


def test_ratios_are_of_the_level_that_the_bars_are_about() -> None:
    numbers = result(found(counts={"lost": 0}))["numbers"]
    assert numbers["releases_per_s"] == 150.0
    assert numbers["rate_to_bare_requests"] == 0.15
    assert numbers["broker_cpu_to_bare_requests"] == 6.0
    assert numbers["broker_cpu_to_cryptography"] == 8.0
    assert numbers["lost_doubled_or_failed"] == 0


@pytest.mark.parametrize(
    "wrong", [{"counts": {"doubled": 1}}, {"counts": {}, "failed": 1}, {"counts": {}, "exact": False}]
)
def test_one_release_too_many_one_failure_or_a_budget_that_was_not_exact_misses_the_bar(wrong: dict[str, Any]) -> None:
    assert result(found(**wrong))["bars"]["lost_doubled_or_failed"]["met"] is False


def test_an_exchange_that_costs_too_much_or_a_lease_that_would_have_ended_misses_its_bar() -> None:
    scenario = {"ratio": 2.5, "bar": 2.0, "longest_without_head_s": 5.5}
    bars = result({"strangers": {"idle": scenario}})["bars"]
    assert {name: bar["met"] for name, bar in bars.items()} == {"idle: ratio": False, "idle: s without a head": False}


def test_the_floor_is_measured() -> None:
    assert cryptography_us(rounds=3) > 0


@pytest.mark.parametrize(
    "wrong",
    [["--runtimes", "1,many"], ["--runtimes", "65"], ["--exchanges", "0"], ["--only", "none"], ["--rounds", "0"]],
)
def test_numbers_that_measure_nothing_are_refused(wrong: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gate", *wrong])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
