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
from tools.sshd import needs_sshd
from tools.two_hosts import unavailable

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def script(name: str, *arguments: str, output: Path, timeout_s: float = 180) -> tuple[dict[str, Any], str]:
    """Run a script as its target of the Makefile does; return what it kept and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments, "-o", str(output)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
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


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="this machine shows a hardened process's memory to root alone")
def test_the_lifecycle_is_measured_over_real_runs(tmp_path: Path) -> None:
    kept, _ = script("lifecycle", "--runs", "1", "--train-seconds", "6", output=tmp_path / "lifecycle.json")
    numbers = kept["numbers"]
    assert {f"{step}_s" for step in LIFECYCLE} <= numbers.keys()
    assert 0 < numbers["total_without_imports_s"] <= numbers["total_s"] < numbers["command_s"]
    assert 0 < numbers["raw_without_imports_s"] < numbers["raw_command_s"]
    processes = kept["training"]["processes"]
    assert {"command", "agent", "broker"} < processes.keys()
    assert numbers["pss_mib"] == pytest.approx(sum(each["pss_mib"] for each in processes.values()), abs=0.01)


@pytest.mark.long
def test_a_step_of_lora_is_measured_beside_the_bare_loop(tmp_path: Path) -> None:
    kept, _ = script("trainer", "--only", "step", "--rounds", "1", "--steps", "3", output=tmp_path / "trainer.json")
    assert kept["bars"].keys() == {"step_more_ms"}
    assert [[len(steps) for steps in turns] for turns in kept["step_ms"].values()] == [[3], [3]]


TWO_HOSTS = pytest.mark.skipif(os.geteuid() != 0 or unavailable() is not None, reason="two hosts need root, namespaces")
EXACT = ("cuts_lost_or_doubled", "kills_told_wrong", "kills_left_there", "kills_released_twice")


@pytest.mark.long
@TWO_HOSTS
@needs_sshd
def test_every_part_of_a_machine_over_ssh_is_measured(tmp_path: Path) -> None:
    kept, _ = script(
        *("places", "--pairs", "1", "--uploads", "1", "--mib", "16", "--train-seconds", "5"),
        *("--cuts", "1", "--seconds", "2", "--kills", "2"),
        output=tmp_path / "places.json",
        timeout_s=600,  # it runs nine jobs, one after the other
    )
    assert {name: kept["numbers"][name] for name in EXACT} == dict.fromkeys(EXACT, 0), kept
    for name in ("command_ssh_s", "upload_to_cat", "machine_cpu_percent", "back_after_cut_s"):
        assert kept["numbers"][name] > 0
    assert {"agent", "keeper", "place"} < kept["training"]["of_the_bar"].keys()


def test_the_gate_is_measured_under_concurrent_runtimes_and_every_release_is_counted(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    kept, out = script(
        *("gate", "runtimes", "--runtimes", "1,2", "--exchanges", "30", "--folder", str(files)),
        output=tmp_path / "gate.json",
    )
    assert [level["runtimes"] for level in kept["levels"]] == [1, 2]
    for level in [*kept["levels"], kept["bare_requests"]]:
        assert 0 < level["p50_ms"] <= level["p90_ms"] <= level["p99_ms"] <= level["max_ms"]
        assert (level["failed"], level["per_s"] > 0) == (0, True)
        assert len(level["times_ms"]) == level["exchanges"]
    # Three processes of thirty-six each, with the warm-up, and the two of the contested budget.
    assert kept["counts"]["held"] == kept["counts"]["released"] == 110
    assert kept["contested_budget"] == {"budget": 2, "asked": 4, "released": 2, "refused": 2, "exact": True}
    assert kept["bars"]["lost_doubled_or_failed"]["met"] is True
    assert kept["numbers"].keys() >= {"rate_to_bare_requests", "broker_cpu_to_cryptography"}
    assert list(files.iterdir()) == []
    assert "runtimes 2, per s" in out


PLANTED = """\
import sys
from dataclasses import replace
from benchmarks import gate
read = gate.Kept.read
def planted(path):
    kept = read(path)
    return replace(kept, releases={releases})
gate.Kept.read = planted
sys.exit(gate.main())
"""


@pytest.mark.parametrize(
    ("releases", "findings"),
    [
        ("kept.releases[1:]", {"lost": 1, "miscounted": 1}),
        ("[*kept.releases, kept.releases[0]]", {"doubled": 2, "unheld": 1, "miscounted": 1}),
    ],
    ids=["a planted loss", "a planted double"],
)
def test_a_release_that_is_lost_or_doubled_fails_the_run(
    releases: str, findings: dict[str, int], tmp_path: Path
) -> None:
    output = tmp_path / "gate.json"
    # One runtime: its window holds all its exchanges, however busy the machine is.
    arguments = ["runtimes", "--runtimes", "1", "--exchanges", "5", "--folder", str(tmp_path), "-o", str(output)]
    done = subprocess.run(
        [sys.executable, "-c", PLANTED.format(releases=releases), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, output.exists()) == (1, True), done.stderr
    kept = json.loads(output.read_text())
    assert "lost doubled or failed" in done.stdout
    assert kept["bars"]["lost_doubled_or_failed"]["met"] is False
    assert {name: kept["counts"][name] for name in findings} == findings


def test_an_honest_runtime_is_measured_beside_strangers(tmp_path: Path) -> None:
    kept, _ = script("gate", "strangers", "--rounds", "1", "--only", "both", output=tmp_path / "strangers.json")
    (scenario,) = kept["strangers"].values()
    assert scenario["ratio"] == scenario["ratios"][0] > 0
    assert len(scenario["quiet_ms"]) > 0
    assert len(scenario["load_ms"]) > 0
    assert kept["numbers"].keys() == kept["bars"].keys()
