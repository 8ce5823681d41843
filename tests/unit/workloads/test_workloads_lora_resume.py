"""`lora` goes on elsewhere, and ends with the same adapter, bit by bit, and the same log."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasshouse.errors import PackageError
from simulators.checkpoint_agent import Line
from simulators.lora_legs import JOB, leg, leg_of_two_ranks, log_of, stopped_and_gone_on
from tools.line_in_memory import LineInMemory

pytestmark = [
    pytest.mark.usefixtures("framework"),
    # peft still calls what transformers has renamed; it is peft's to change.
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]


def test_a_lost_machine_s_run_goes_on_to_the_same_adapter_and_the_same_log(tmp_path: Path) -> None:
    alone, outputs = leg(tmp_path / "alone", JOB)
    line = LineInMemory()
    saved, _ = leg(tmp_path / "saved", JOB, line=line)
    assert saved.digests == alone.digests
    assert list(line.taken) == list(range(1, 9))
    for step in (1, 4, 6):  # within an epoch, at its end and after an evaluation, within the steps of a line of the log
        resumed, found = leg(tmp_path / str(step), JOB, line=line, resume=step)
        assert resumed.digests == alone.digests, step
        assert (resumed.done, resumed.loss_first, resumed.loss_final) == (9, alone.loss_first, alone.loss_final)
        assert log_of(found) == log_of(outputs)
        assert next(one["done"] for one in found.messages if one["type"] == "progress") == step
    for looks in (0, 2, 3):  # before the first step; before an evaluation that is due; within it
        step, resumed, found = stopped_and_gone_on(tmp_path / f"looks-{looks}", JOB, looks)
        assert step == min(looks, 2)
        assert resumed.digests == alone.digests, looks
        assert log_of(found) == log_of(outputs)


@pytest.mark.long
def test_two_ranks_go_on_to_the_same_adapter_and_the_same_log(tmp_path: Path) -> None:
    line = Line(ranks=2)
    alone = leg_of_two_ranks(tmp_path / "saved", line, saving=True)
    assert leg_of_two_ranks(tmp_path / "gone-on", line, resume=sorted(line.counted)[1]) == alone


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "scheduler.pt", "job_0.json", "best.safetensors"])
def test_a_checkpoint_that_is_not_whole_ends_the_run(tmp_path: Path, name: str) -> None:
    line = LineInMemory()
    leg(tmp_path / "saved", {**JOB, "max_steps": 2}, line=line)
    del line.taken[1][f"trainer-checkpoint/{name}"]
    with pytest.raises(PackageError, match=f"checkpoint-tampered.*{name}|{name}") as caught:
        leg(tmp_path / "resumed", {**JOB, "max_steps": 2}, line=line, resume=1)
    assert caught.value.code == "checkpoint-tampered"
