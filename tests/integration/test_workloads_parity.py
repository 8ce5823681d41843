"""Raw and protected legs end with the same bytes; the clinic's jobs run; weights load in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools.fake_agent import Ended, FakeAgent, run_raw

CLINIC = Path(__file__).parents[2] / "examples" / "clinic"


def job(name: str, **params: Any) -> tuple[str, dict[str, Any], dict[str, bytes]]:
    table = tomllib.loads((CLINIC / f"{name}.toml").read_text())
    files = {inside: (CLINIC / source).read_bytes() for inside, source in table["inputs"].items()}
    return table["workload"], table["params"] | params, files


def protected(tmp_path: Path, kind: str, params: dict[str, Any], files: dict[str, bytes]) -> Ended:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    with FakeAgent(kind, params, files, workspace) as agent:
        return agent.run()


@pytest.mark.parametrize(
    ("name", "short"), [("lora", {"max_steps": 4, "per_device_train_batch_size": 2}), ("mlp", {"epochs": 20})]
)
def test_a_raw_and_a_protected_run_end_with_the_same_digest(tmp_path: Path, name: str, short: dict[str, Any]) -> None:
    kind, params, files = job(name, **short)
    assert params["deterministic"] is True
    one = protected(tmp_path, kind, params, files)
    two = run_raw(kind, params, files, tmp_path)
    assert (one.exit_code, two.exit_code) == (0, 0), one.log + two.log
    digests = [ended.one("finished")["digests"] for ended in (one, two)]
    assert digests[0] == digests[1] != {}
    weights = [name for name in one.outputs if name.endswith(".safetensors")]
    assert weights
    kept = [name for name in one.outputs if name != "metrics.json"]  # which says how fast it was
    assert all(one.outputs[name] == two.outputs[name] for name in kept)
    assert one.types() == two.types()
    assert one.one("imported")["us"] > 0


def test_the_clinics_script_reports_held_out_accuracy(tmp_path: Path) -> None:
    kind, params, files = job("script")
    ended = protected(tmp_path, kind, params, files)
    assert ended.exit_code == 0, ended.log
    metrics = json.loads(ended.outputs["metrics.json"])
    assert metrics["held_out_accuracy"] > 0.93
    assert metrics["held_out_patients"] == 113
    assert "held-out accuracy" in ended.log
    assert ended.outputs["model.safetensors"][8:9] == b"{"


def test_the_clinics_data_is_what_its_generator_writes(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(CLINIC)!r}); import make_data, pathlib; make_data.main(pathlib.Path('.'))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in (CLINIC / "data").iterdir()}
    assert sum(map(len, written.values())) < 200_000


MEASURE = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from glasshouse.task.granted import GrantInputs
from glasshouse.task.tensors import load

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

secret, package = os.open("grant", os.O_RDONLY), os.open("package", os.O_RDONLY)
inputs = GrantInputs(secret=secret, secret_bytes=os.path.getsize("grant"), package=package)
torch.empty(1)
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = status("VmRSS")
tensors = load(inputs, "model.safetensors", torch)
size = sum(t.numel() * t.element_size() for t in tensors.values())
assert all(float(t[0].float().mean()) == 1.0 for t in tensors.values())
print(size, status("VmHWM") - before - size)
"""


def test_weights_load_from_a_package_in_less_than_64_mib_beyond_the_tensors(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save

    from tools.fake_agent import sealed_package

    tensors = {f"layer{n}": torch.ones(16 << 10, 1 << 10, dtype=torch.bfloat16) for n in range(6)}
    package, grant = sealed_package({"model.safetensors": save(tensors)}, {}, "lora")
    (tmp_path / "package").write_bytes(package)
    (tmp_path / "grant").write_bytes(grant)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(Path(__file__).parents[1])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, extra = map(int, done.stdout.split())
    assert size == 6 * (32 << 20)
    assert extra < 64 << 20


RECORDS = b"".join(
    json.dumps({"prompt": f"Even? {n}", "completion": "no" if n % 2 else "yes, it is"}).encode() + b"\n"
    for n in range(24)
)
TINY = {"model": "config:qwen2-tiny", "dtype": "float32", "device": "cpu", "deterministic": True}


def test_two_ranks_train_the_adapter_that_one_process_trains(tmp_path: Path) -> None:
    params = TINY | {"num_train_epochs": 1, "learning_rate": "0.01", "save_steps": 3, "logging_steps": 2}
    files = {"train.jsonl": RECORDS}
    ends = []
    for each, ranks, name in ((4, None, "one"), (2, 2, "two")):
        (tmp_path / name).mkdir()
        table = params | {"per_device_train_batch_size": each}
        ends.append(run_raw("lora", table, files, tmp_path / name, ranks=ranks))
    assert [one.exit_code for one in ends] == [0, 0], ends[1].log
    alone, ranked = ends
    assert alone.outputs.keys() == ranked.outputs.keys()
    assert ranked.one("finished")["work"]["done"] == 6
    assert ranked.one("finished")["trainable"] == 7168
    losses = [[line["loss"] for line in json.loads(one.outputs["log_history.json"])] for one in ends]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # Of its first step and of its last, what a run reports is the mean of the ranks, and not what rank 0 has.
    reported = [{end: float(value) for end, value in one.one("finished")["loss"].items()} for one in ends]
    assert reported[0] == pytest.approx(reported[1], rel=1e-5)
    assert ranked.log.count("trainable parameters") == 1
    first, second = (safetensors_of(one.outputs["adapter_model.safetensors"]) for one in ends)
    assert max(abs(one - other) for one, other in zip(first, second, strict=True)) < 1e-5 < max(map(abs, first))


@pytest.mark.long
def test_ranks_that_the_clock_ends_end_at_the_same_step(tmp_path: Path) -> None:
    ended = run_raw("lora", TINY | {"seconds": "0.3"}, {"train.jsonl": RECORDS}, tmp_path, ranks=2)
    assert ended.exit_code == 0, ended.log
    assert ended.one("finished")["work"]["stop_reason"] == "time"
    assert "adapter_model.safetensors" in ended.outputs


def safetensors_of(data: bytes) -> list[float]:
    """Return every number of a file of float32."""
    header = int.from_bytes(data[:8], "little")
    return list(memoryview(data[8 + header :]).cast("f"))
