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
    assert document["device"] == "no GPU (Triton's interpreter)"
    assert document["machine"]["cores"] > 0
    assert document["bars"] == {}, "nothing that the interpreter does is held against a bar"
    assert [batch["load"] for batch in document["batches"]] == ["200B", "2x64B"]
    assert all(
        seconds > 0 for batch in document["batches"] for way in ("seal", "open") for seconds in batch[way]["seconds"]
    )
    assert document["package"]["gpu_gb_per_s"] >= 0
    assert {"copy_read_and_written_gb_per_s", "package_upload_gb_per_s"} < document["numbers"].keys()
    assert "weights are opened on the GPU" in done.stderr
    assert "package gpu gb per s" in done.stdout


def test_a_result_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    out.write_text("earlier")
    done = run(out)
    assert done.returncode == 2
    assert "is there already" in done.stderr
    assert out.read_text() == "earlier"
