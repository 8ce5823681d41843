"""Each script of `benchmarks` runs to its end in its smallest size, and what it keeps is JSON with its bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glasshouse.evidence.receipt import LIFECYCLE

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def script(name: str, *arguments: str, output: Path) -> tuple[dict[str, Any], str]:
    """Run a script as its target of the Makefile does; return what it kept and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments, "-o", str(output)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    # 1 says that a bar was missed: a busy machine may miss one, and must not pass for one that cannot run.
    assert done.returncode in (0, 1), done.stderr
    kept: dict[str, Any] = json.loads(output.read_text())
    if "bars" in kept:
        assert (done.returncode == 0) is all(bar["met"] for bar in kept["bars"].values())
        assert all(bar["bar"] in done.stdout for bar in kept["bars"].values())
    return kept, done.stdout


def test_the_log_is_measured_event_by_event(tmp_path: Path) -> None:
    kept, out = script("evidence", "--events", "200", "--processes", "1", output=tmp_path / "evidence.json")
    assert len(kept["benchmarks"]) == 2
    assert kept["metadata"]["events"] == 200
    assert "append us" in out
    assert "≤ 100" in out


def test_a_package_is_measured_beside_the_bare_cipher(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    kept, _ = script("package", "--mib", "1", "--rounds", "2", "--folder", str(files), output=tmp_path / "package.json")
    assert {"open_to_cipher", "seal_to_cp", "reader_memory_mib"} <= kept["numbers"].keys()
    assert all(len(values) == 2 and min(values) > 0 for values in kept["seconds"].values())
    assert list(files.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="the memory of a hardened process is read by root")
def test_the_lifecycle_is_measured_over_real_runs(tmp_path: Path) -> None:
    kept, _ = script("lifecycle", "--runs", "1", "--train-seconds", "6", output=tmp_path / "lifecycle.json")
    numbers = kept["numbers"]
    assert {f"{step}_s" for step in LIFECYCLE} <= numbers.keys()
    assert 0 < numbers["total_without_imports_s"] <= numbers["total_s"] < numbers["command_s"]
    assert 0 < numbers["raw_without_imports_s"] < numbers["raw_command_s"]
    processes = kept["training"]["processes"]
    assert {"command", "agent", "broker"} < processes.keys()
    assert numbers["pss_mib"] == pytest.approx(sum(each["pss_mib"] for each in processes.values()), abs=0.01)
