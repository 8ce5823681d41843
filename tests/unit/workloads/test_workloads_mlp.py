"""The benchmark loop: it learns, it counts epochs, and it stops when it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.workloads.builtin import mlp
from glasshouse.workloads.process.job_control import JobControl, Result
from tools.line_in_memory import LineInMemory
from tools.recorder import Recorder, recorded_task

pytestmark = pytest.mark.usefixtures("framework")

TABLE = b"x,y,kind\n" + b"".join(
    f"{n % 7 + 0.5},{(n * 3) % 11},{'even' if n % 7 > 3 else 'odd'}\n".encode() for n in range(120)
)
SMALL = {"width": 16, "depth": 1, "epochs": 60, "learning_rate": 0.05, "device": "cpu"}


def run(tmp_path: Path, files: dict[str, bytes] | None = None, **params: Any) -> tuple[Result, Recorder]:
    task, found, channel = recorded_task("mlp", SMALL | params, files or {}, tmp_path)
    result = mlp.run(task, found, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    task.close()
    return result, channel


def test_it_learns_a_table_and_says_how_well_on_rows_it_has_not_seen(tmp_path: Path) -> None:
    result, channel = run(tmp_path, {"t.csv": TABLE}, data="t.csv", held_out=0.25)
    metrics = json.loads(channel.outputs["metrics.json"])
    assert metrics["held_out"] > 0.9
    assert (metrics["rows"], metrics["held_out_rows"], metrics["epochs"]) == (90, 30, 60)
    assert (result.unit, result.done, result.stop_reason) == ("epoch", 60, "steps")
    assert result.loss_first is not None
    assert result.loss_final is not None
    assert float(result.loss_final) < float(result.loss_first) / 2
    weights = load(channel.outputs["model.safetensors"])
    assert {tuple(tensor.shape) for tensor in weights.values()} == {(16,), (16, 2), (2,), (2, 16)}
    assert result.trainable == sum(tensor.numel() for tensor in weights.values())


def test_a_label_in_the_middle_is_found_by_name(tmp_path: Path) -> None:
    table = b"kind,x\n" + b"".join(f"{'a' if n > 5 else 'b'},{n}\n".encode() for n in range(12))
    result, _ = run(tmp_path, {"t.csv": table}, data="t.csv", label="kind")
    assert result.trainable == 16 * 1 + 16 + 16 * 2 + 2


def test_synthetic_data_needs_no_input(tmp_path: Path) -> None:
    result, channel = run(tmp_path, synthetic_rows=64, synthetic_features=8, synthetic_classes=3, epochs=5)
    assert result.done == 5
    assert json.loads(channel.outputs["metrics.json"])["held_out"] is None


def test_a_training_that_goes_on_elsewhere_ends_with_the_same_model(tmp_path: Path) -> None:
    alone, _ = run(tmp_path / "alone", deterministic=True)
    line = LineInMemory()
    for name, resume in (("saved", None), ("resumed", 7)):
        task, found, _ = recorded_task("mlp", SMALL | {"deterministic": True}, {}, tmp_path / name)
        task.checkpoints.line = line
        if resume is not None:
            task._resume = line.restore(resume, tmp_path / name)  # as the worker has it
        ended = mlp.run(task, found, JobControl(lambda *_: 0))  # type: ignore[arg-type]
        assert (ended.digests, ended.done, ended.loss_first) == (alone.digests, 60, alone.loss_first)
    assert set(line.taken) == set(range(1, 61))


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    digests = [
        run(tmp_path / str(number), deterministic=True, seed=seed, epochs=5)[0].digests["model"]
        for number, seed in enumerate([1, 1, 2])
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_time_target_ends_the_run(tmp_path: Path) -> None:
    table = {key: value for key, value in SMALL.items() if key != "epochs"}
    task, params, _ = recorded_task("mlp", table | {"seconds": 0.3}, {}, tmp_path)
    result = mlp.run(task, params, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    assert result.stop_reason == "time"
    assert result.elapsed_us >= 300_000


def test_the_owner_may_stop_it(tmp_path: Path) -> None:
    task, params, channel = recorded_task("mlp", SMALL, {}, tmp_path)
    channel.stopping = True
    result = mlp.run(task, params, JobControl(lambda *_: 0))  # type: ignore[arg-type]
    assert (result.done, result.stop_reason, result.loss_first) == (0, "stopped", None)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.CrossEntropyLoss, "forward", lambda *_: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(RunError) as failed:
        run(tmp_path)
    assert failed.value.code is Code.NONFINITE_LOSS


def test_bfloat16_is_the_users_choice(tmp_path: Path) -> None:
    _, channel = run(tmp_path, dtype="bfloat16", epochs=2)
    assert {tensor.dtype for tensor in load(channel.outputs["model.safetensors"]).values()} == {torch.bfloat16}


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"t\.csv"):
        run(tmp_path, data="t.csv")
