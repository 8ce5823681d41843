"""`lora` interrupted at twenty places, and gone on with: the same adapter and the same log, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulators.checkpoint_agent import CheckpointAgent, Line
from simulators.lora_legs import BY_EPOCHS, JOB, PACKED, leg, leg_of_two_ranks, log_of, stopped_and_gone_on
from simulators.trainer_script import TRAIN
from tools.line_in_memory import LineInMemory

pytestmark = [
    pytest.mark.usefixtures("framework"),
    # peft still calls what transformers has renamed; it is peft's to change.
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]
JOBS = {"steps": JOB, "packed": PACKED, "epochs": BY_EPOCHS}


@pytest.fixture
def framework() -> Any:
    """Put determinism and threads back after a workload ran in this process."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_stopped_at_twenty_places_goes_on_to_the_same_adapter(tmp_path: Path, name: str) -> None:
    alone, outputs = leg(tmp_path / "alone", JOBS[name])
    places = set()
    for looks in range(20):
        step, resumed, found = stopped_and_gone_on(tmp_path / str(looks), JOBS[name], looks)
        places.add(step)
        assert resumed.digests == alone.digests, looks
        assert log_of(found) == log_of(outputs), looks
        assert (resumed.done, resumed.stop_reason) == (alone.done, alone.stop_reason)
    assert len(places) >= 6


@pytest.mark.parametrize("name", JOBS)
def test_a_job_lost_after_each_of_its_steps_goes_on_to_the_same_adapter(tmp_path: Path, name: str) -> None:
    alone, outputs = leg(tmp_path / "alone", JOBS[name])
    line = LineInMemory()
    leg(tmp_path / "saved", JOBS[name], line=line)
    assert len(line.taken) >= 8
    for step in list(line.taken):
        resumed, found = leg(tmp_path / str(step), JOBS[name], line=line, resume=step)
        assert resumed.digests == alone.digests, step
        assert log_of(found) == log_of(outputs), step


def test_two_ranks_go_on_from_each_of_their_checkpoints(tmp_path: Path) -> None:
    alone, line = leg_of_two_ranks(tmp_path / "alone", Line(ranks=2)), Line(ranks=2)
    assert leg_of_two_ranks(tmp_path / "saved", line, saving=True)[0] == alone[0]
    assert len(line.counted) >= 3
    for step in list(line.counted):
        assert leg_of_two_ranks(tmp_path / str(step), line, resume=step) == alone, step


def test_trainer_in_two_ranks_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    params, files = {"script": "train.py", "arguments": ["3"], "deterministic": True}, {"train.py": TRAIN}
    line = Line(ranks=2)
    with CheckpointAgent(line, "script", params, files, tmp_path / "first", ranks=2) as agent:
        first = agent.run()
    assert first.exit_code == 0, first.log
    with CheckpointAgent(line, "script", params, files, tmp_path / "second", ranks=2, resume=2) as agent:
        second = agent.run()
    assert second.exit_code == 0, second.log
    assert second.outputs["model.safetensors"] == first.outputs["model.safetensors"]
