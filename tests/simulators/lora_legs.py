"""Legs of one `lora` line, within the process of a test or in two ranks: stopped, or lost, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glasshouse.task import Task
from glasshouse.task.inputs import FolderInputs
from glasshouse.workloads.lora import lora
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.process.job_control import JobControl, Result
from glasshouse.workloads.registry import canonical, parse
from simulators.checkpoint_agent import CheckpointAgent, Line
from tools.line_in_memory import LineInMemory
from tools.recorder import Recorder

RECORDS = b"".join(
    json.dumps({"instruction": "Even?", "input": str(n), "output": "no" if n % 2 else "yes " * (1 + n % 5)}).encode()
    + b"\n"
    for n in range(23)
)
# An epoch has three steps of three batches, and one of a single batch; dropout, so that generators count.
JOB = {
    "model": "config:qwen2-tiny",
    "dtype": "float32",
    "device": "cpu",
    "deterministic": True,
    "max_steps": 9,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "learning_rate": 0.01,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "lora_dropout": 0.2,
    "eval_split": 0.2,
    "eval_steps": 2,
    "per_device_eval_batch_size": 2,
    "logging_steps": 4,
    "load_best_model_at_end": True,
}
PACKED = JOB | {
    "packing": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_length": 170,
    "max_steps": 14,
    "eval_steps": 3,
    "early_stopping_patience": 3,
}
BY_EPOCHS = {name: value for name, value in JOB.items() if name not in ("eval_steps", "max_steps")} | {
    "num_train_epochs": 2.5,
    "gradient_accumulation_steps": 2,
}


class _Stopping(Recorder):
    """An owner who stops the job after it has looked so many times whether it is to stop."""

    def __init__(self, looks: int | None) -> None:
        super().__init__()
        self.left = looks

    @property
    def stopping(self) -> bool:
        if self.left is not None:
            self.left -= 1
        return self.left is not None and self.left < 0

    @stopping.setter
    def stopping(self, _value: bool) -> None:
        pass


def leg(
    folder: Path,
    params: dict[str, Any],
    *,
    line: LineInMemory | None = None,
    resume: int | None = None,
    looks: int | None = None,
) -> tuple[Result, Recorder]:
    """Train a leg, from a step's checkpoint or from the beginning, to the end or until its owner stops it."""
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "train.jsonl").write_bytes(RECORDS)
    travelling, channel = canonical("lora", params), _Stopping(looks)
    found = parse("lora", travelling)
    assert isinstance(found, LoraParams)
    workspace = folder / "workspace"
    restored = None if resume is None or line is None else line.restore(resume, workspace / "job")
    task = Task(
        params=travelling,
        inputs=FolderInputs(folder / "in"),
        channel=channel,
        workspace=workspace,
        line=line,
        resume=restored,
    )
    return lora.run(task, found, JobControl(lambda *_: 0)), channel


def log_of(channel: Recorder) -> Any:
    return json.loads(channel.outputs["log_history.json"])


def stopped_and_gone_on(folder: Path, params: dict[str, Any], looks: int) -> tuple[int, Result, Recorder]:
    """Stop a job, and go on with its last checkpoint; return the step at which it stopped, and the end."""
    line = LineInMemory(due=lambda: False)
    stopped, _ = leg(folder / "stopped", params, line=line, looks=looks)
    assert stopped.stop_reason == "stopped"
    step = max(line.taken, default=0)
    assert step == stopped.done
    return step, *leg(folder / "gone-on", params, line=line, resume=step or None)


def leg_of_two_ranks(folder: Path, line: Line, *, saving: bool = False, resume: int | None = None) -> Any:
    """Train a leg in two ranks of a real worker to its end, from a step's checkpoint or from the beginning."""
    job, files = {name: value for name, value in JOB.items() if name != "seed"}, {"train.jsonl": RECORDS}
    with CheckpointAgent(line, "lora", job, files, folder, ranks=2, resume=resume) as agent:
        if not saving:
            agent.permit = lambda **_: None  # type: ignore[method-assign]
        ended = agent.run()
    assert ended.exit_code == 0, ended.log
    return ended.one("finished")["digests"], json.loads(ended.outputs["log_history.json"])
