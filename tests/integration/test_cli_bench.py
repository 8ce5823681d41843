"""`glasshouse bench` prints one object with its bars, from real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulators.command_line import Shell

pytestmark = pytest.mark.slow


def test_the_broker_is_measured_under_concurrent_runtimes_and_every_release_is_counted(tmp_path: Path) -> None:
    answer = Shell(tmp_path).ask(
        "bench", "broker", "--runtimes", "1,2", "--seconds", "0.5", "--warm-up", "0.1", "--json", timeout_s=120
    )
    found = answer.object
    assert [level["runtimes"] for level in found["levels"]] == [1, 2]
    for level in [*found["levels"], found["bare_requests"]]:
        times = level["exchange_ms"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
        assert level["per_s"] > 0
        assert level["failed"] == 0
        assert level["challenge_ms"]["p50"] < times["max"]
        assert level["evidence_ms"]["p50"] < times["max"]
    counts = found["counts"]
    assert counts["held"] == counts["released"] >= sum(level["exchanges"] for level in found["levels"]) > 0
    assert found["contested_budget"] == {"budget": 2, "asked": 4, "released": 2, "refused": 2, "exact": True}
    assert found["bars"]["lost_doubled_or_failed"]["met"] is True
    assert (answer.code == 0) is all(bar["met"] for bar in found["bars"].values())
    assert found["ratios"].keys() >= {"rate_to_bare_requests", "broker_cpu_to_cryptography"}


def test_a_number_of_runtimes_that_is_none_is_refused(tmp_path: Path) -> None:
    assert Shell(tmp_path).ask("bench", "broker", "--runtimes", "1,many", "--json").code == 2
