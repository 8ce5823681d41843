"""`glasshouse bench` prints one object with its bars, from real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulators.command_line import Shell

pytestmark = pytest.mark.slow


def test_the_lifecycle_is_measured_over_real_runs(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    answer = shell.ask("bench", "lifecycle", "--runs", "1", "--train-seconds", "0", "--json", timeout_s=120)
    found = answer.object
    assert (found["runs"], found["training"], len(found["each"])) == (1, None, 1)
    assert found["package_bytes"] == 10 << 20
    # The numbers are for a machine that does nothing else; here it matters that they are measured.
    assert 0 < found["total_without_imports_s"] <= found["lifecycle_s"]["total"] < found["command_s"] < 60
    bar = found["bars"]["total_without_imports_s"]
    assert (answer.code == 0) is bar["met"]
    assert (bar["at_most"], bar["goal"]) == (2.0, 1.0)


def test_the_log_is_measured_too(tmp_path: Path) -> None:
    found = Shell(tmp_path).ask("bench", "evidence", "--events", "1000", "--json").object
    assert found["bars"].keys() == {"append_us", "verify_100k_s"}
