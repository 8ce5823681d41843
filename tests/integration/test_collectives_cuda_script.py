"""The benchmark script for a CUDA machine, tried out where there is none: all of its steps, none of its numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "collectives_cuda.sh"


def run(out: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SMALL": "1", "PYTHON": sys.executable}
    return subprocess.run(["bash", SCRIPT, out], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_script_measures_everything_it_says(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run(out)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_bytes())
    assert document["machine"].startswith("no GPU (Triton's interpreter), ")
    result = document["result"]
    assert result.keys() == {
        "bars", "copy", "correct", "kernel", "many", "package", "seconds", "shapes", "sizes",
    }  # fmt: skip
    assert result["bars"] == {}, "nothing that the interpreter does is held against a bar"
    for item in (*result["sizes"], result["many"]):
        assert all(seconds > 0 for way in ("seal", "open") for seconds in item[way]["seconds"])
    assert result["package"]["gpu_gb_per_s"] > 0
    assert "weights are opened on the GPU" in done.stderr
    assert "opened on the device" in done.stdout


def test_a_result_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    out.write_text("earlier")
    done = run(out)
    assert done.returncode == 2
    assert "is there already" in done.stderr
    assert out.read_text() == "earlier"
