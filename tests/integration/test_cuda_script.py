"""The benchmark script for a CUDA machine: what it does with a folder and with a time, tried where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cuda.sh"


def run(out: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SMALL": "1", "PYTHON": sys.executable} | settings
    return subprocess.run(["bash", SCRIPT, out], env=environment, capture_output=True, text=True, timeout=600)


def test_a_machine_that_is_gone_in_a_moment_is_left_with_a_summary_and_the_next_goes_on_as_the_same_owner(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    keys = []
    for _ in range(2):
        done = run(out, QUICK="1", LIMIT="10")
        assert (done.returncode, "no time is left" in done.stderr) == (1, True), done.stderr
        assert json.loads((out / "summary.json").read_bytes())["overhead"] == {}
        keys.append([(path.name, path.read_bytes()) for path in sorted((out / "home").glob("*.pub"))])
    assert keys[0] == keys[1] != []


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = run(tmp_path)
    assert done.returncode == 2
    assert "is there already" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
