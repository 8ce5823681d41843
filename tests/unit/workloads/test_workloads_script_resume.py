"""A script of `transformers.Trainer` that is not changed but for one line goes on elsewhere, or is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glasshouse.errors import RunError
from glasshouse.task.checkpoints import Checkpoints, Restored
from glasshouse.workloads.process.trainer_saves import TrainerSaves
from simulators.checkpoint_agent import CheckpointAgent, Line
from simulators.trainer_script import TRAIN
from tools.line_in_memory import LineInMemory


def leg(line: Line, folder: Path, *arguments: str, resume: int | None = None) -> CheckpointAgent:
    params = {"script": "train.py", "arguments": list(arguments), "deterministic": True}
    return CheckpointAgent(line, "script", params, {"train.py": TRAIN}, folder, resume=resume)


def test_trainer_goes_on_to_the_same_weights_or_not_at_all(tmp_path: Path) -> None:
    line = Line()
    with leg(line, tmp_path / "first", "3") as agent:
        first = agent.run()
    assert first.exit_code == 0, first.log
    assert set(line.counted) >= {2}
    with leg(line, tmp_path / "second", "3", resume=2) as agent:
        second = agent.run()
    assert second.exit_code == 0, second.log
    assert second.outputs["model.safetensors"] == first.outputs["model.safetensors"]
    done = [message["done"] for message in second.messages if message["type"] == "progress"]
    assert (done[0], done[-1]) == (2, 7)
    with leg(line, tmp_path / "otherwise", "4", resume=2) as agent:
        ended = agent.run()
    assert ended.one("failed")["code"] == "script-failed"
    assert "per_device_train_batch_size was 3 and is 4" in ended.log
    assert "have the script set what differs as it was" in ended.log
    assert "GLASSHOUSE_RESUME" not in ended.log.rpartition("as it was: ")[2], "it has that line"


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A Trainer that has saved a whole checkpoint, and what takes it."""
    args = SimpleNamespace(
        output_dir=str(tmp_path / "scratch"),
        world_size=1,
        process_index=0,
        local_process_index=0,
        fp16=False,
        ignore_data_skip=False,
        restore_callback_states_from_checkpoint=False,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=2,
    )
    state = SimpleNamespace(
        global_step=4,
        max_steps=9,
        num_train_epochs=3,
        best_model_checkpoint=None,
        stateful_callbacks={"TrainerControl": {}},
    )
    for step in (2, 4):
        folder = tmp_path / "scratch" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"):
            (folder / name).write_bytes(b"x")
    line = LineInMemory()
    saves = TrainerSaves(Checkpoints(line, tmp_path), None)
    return SimpleNamespace(args=args, state=state, line=line, saves=saves, folder=folder)


def test_the_best_checkpoint_comes_along(saved: Any) -> None:
    saved.state.best_model_checkpoint = str(saved.folder.parent / "checkpoint-2")
    saved.saves.saved(saved.args, saved.state)
    files = {name.removeprefix("scratch/").partition("/")[0] for name in saved.line.taken[4]}
    assert files == {"checkpoint-2", "checkpoint-4"}


def test_a_trainer_that_begins_anew_in_the_place_of_one_that_goes_on_is_refused(saved: Any) -> None:
    saved.saves.saved(saved.args, saved.state)
    restored = Restored(step=4, path=saved.folder, files=frozenset())
    saves = TrainerSaves(Checkpoints(None, saved.folder), restored)
    saves.began(saved.args, saved.state, None)  # as it was
    saves.began(SimpleNamespace(output_dir="other"), saved.state, None)  # another Trainer of the script
    with pytest.raises(RunError, match="step was 4 and is 0") as caught:
        saves.began(saved.args, SimpleNamespace(**{**vars(saved.state), "global_step": 0}), None)
    assert caught.value.code == "script-failed"
    assert "GLASSHOUSE_RESUME" in caught.value.hint


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"])
def test_a_folder_that_lacks_something_is_not_taken_and_the_log_has_it_once(
    saved: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.folder / name).unlink()
    saved.saves.saved(saved.args, saved.state)
    saved.saves.saved(saved.args, saved.state)
    assert saved.line.taken == {}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("glasshouse: checkpoint-4 is no checkpoint of the line: it lacks ")


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: setattr(saved.args, "ignore_data_skip", True),
        lambda saved: setattr(saved.args, "fp16", True),
        lambda saved: saved.state.stateful_callbacks.update(EarlyStoppingCallback={}),
    ],
    ids=["data", "scaler", "callback"],
)
def test_what_trainer_would_pass_over_is_not_taken(saved: Any, change: Any) -> None:
    change(saved)
    saved.saves.saved(saved.args, saved.state)
    assert saved.line.taken == {}
