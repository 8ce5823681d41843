"""What transformers' Trainer costs `lora`, at its start and at each step: ``make bench-trainer``.

Laws: the arms take turns, each start in a fresh process, so that drift meets both; what is compared is one turn's, and
the median of that is told; every raw time is kept. What is judged is processor time, which other work on the machine
does not lengthen, and on a GPU the clock's. The arms without Trainer are what `lora` did before it had one.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.kept import Bar, finish, kept, options
from glasshouse.task import Task
from glasshouse.task.channel import EventLines
from glasshouse.task.inputs import FolderInputs
from glasshouse.workloads.lora import lora
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.process.job_control import JobControl
from glasshouse.workloads.registry import canonical

BARS = {
    "start_more_s": Bar(0.1),
    "start_more_mb": Bar(5.0),
    "unwanted_modules": Bar(0.0),
    "step_more_ms": Bar(5.0),
}
UNWANTED = ("datasets", "pandas", "pyarrow", "trl")
UNCOUNTED = 5  # of the first steps of each training
MIB = 1 << 20

_BEFORE = """
for name in ("torch._dynamo", "safetensors.torch", "peft", "transformers"):
    importlib.import_module(name)
import transformers
transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.Qwen2ForCausalLM
"""
_START = f"""
import importlib, json, psutil, sys, time
from glasshouse.workloads.lora import lora
rss, wall, processor = psutil.Process().memory_info().rss, time.perf_counter(), time.process_time()
WARM
wall, processor = time.perf_counter() - wall, time.process_time() - processor
found = [name for name in {UNWANTED!r} if sys.modules.get(name) is not None]
print(json.dumps([processor, wall, (psutil.Process().memory_info().rss - rss) / {MIB}, found]))
"""


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of both arms, after one that is thrown away")
    parser.add_argument("--steps", type=int, default=60, help="counted steps of each training")
    parser.add_argument("--only", choices=("start", "step"), help="one of the two comparisons")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the steps are taken")
    asked = parser.parse_args()
    if asked.rounds < 1 or asked.steps < 1:
        parser.error("--rounds and --steps must be positive")
    numbers: dict[str, float] = {}
    raw: dict[str, Any] = {"rounds": asked.rounds}
    if asked.only != "step":
        starts = _turns({"before": lambda: _start(_BEFORE), "lora": lambda: _start("lora.warm()")}, asked.rounds)
        for at, unit in enumerate(("s", "wall_s", "mb")):
            numbers |= _compared("start", unit, {arm: [one[at] for one in turns] for arm, turns in starts.items()})
        numbers["unwanted_modules"] = float(max(len(found) for *_, found in starts["lora"]))
        raw["starts"] = starts
    if asked.only != "start":
        arms = {"before": bare, "lora": lambda task, params: lora.run(task, params, JobControl(lambda *_: 0))}
        trained = {name: _timed(arm, asked.steps, asked.device) for name, arm in arms.items()}
        turns = _turns(trained, asked.rounds)
        numbers |= _compared("step", "ms", {arm: list(map(statistics.median, each)) for arm, each in turns.items()})
        raw |= {"device": asked.device, "step_ms": turns}
    made = {name: bar for name, bar in BARS.items() if name in numbers}
    return finish(kept(numbers, made, **raw), asked.output)


def _turns(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Have the arms take turns; return what each found, but for the first round."""
    found: dict[str, list[Any]] = {name: [] for name in arms}
    order = list(arms)
    for _ in range(rounds + 1):
        for name in order:
            found[name].append(arms[name]())
        order.reverse()
    return {name: values[1:] for name, values in found.items()}


def _compared(what: str, unit: str, found: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each arm, and of how much more one took than the other in the same turn."""
    more = statistics.median(after - before for before, after in zip(found["before"], found["lora"], strict=True))
    medians = {f"{what}_{arm}_{unit}": round(statistics.median(values), 3) for arm, values in found.items()}
    return medians | {f"{what}_more_{unit}": round(more, 3)}


def _start(warm: str) -> list[Any]:
    """Return the seconds by processor and clock, MiB and unwanted modules of a start."""
    code = _START.replace("WARM", warm)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


def _timed(train: Callable[[Task, LoraParams], Any], steps: int, device: str) -> Callable[[], list[float]]:
    """Return what trains a small model and returns the milliseconds of each counted step."""
    table = {
        "model": "config:qwen2-tiny",
        "dtype": "float32",
        "max_steps": UNCOUNTED + steps,
        "device": device,
        "threads": 1,
    }

    clock = time.process_time if device == "cpu" else time.perf_counter

    def timed() -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "in").mkdir()
            # All of one length, so that the order in which they come makes no difference.
            records = ({"instruction": f"What comes after {n}?", "output": str(n + 1)} for n in range(100, 164))
            (Path(folder) / "in" / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
            task = Task(
                params=canonical("lora", table),
                inputs=FolderInputs(Path(folder) / "in"),
                channel=EventLines(None, Path(folder) / "out"),
                workspace=Path(folder) / "workspace",
            )
            stamps: list[float] = []
            report = task.progress

            def stamped(*given: Any, **named: Any) -> bool:
                stamps.append(clock())
                return report(*given, **named)

            task.progress = stamped  # type: ignore[method-assign]
            train(task, LoraParams.read(table))
        pairs = zip(stamps[UNCOUNTED : UNCOUNTED + steps], stamps[UNCOUNTED + 1 :], strict=False)
        return [1000 * (end - start) for start, end in pairs]

    return timed


def bare(task: Task, params: LoraParams) -> None:
    """Train as `lora` did in a loop of its own, with the optimiser that it has now."""
    import torch

    from glasshouse.workloads.builtin import training
    from glasshouse.workloads.lora import models
    from glasshouse.workloads.lora.data_forms import read_records
    from glasshouse.workloads.lora.encoding import encode_records

    device = training.prepare(params)
    model, tokenizer = models.base_model(task, params, device)
    examples = encode_records(read_records(task.open, task.inputs, params.data), params.data, tokenizer, params)
    model.config.use_cache = False
    model = models.attach(model, params)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=params.learning_rate, weight_decay=params.weight_decay, fused=True)
    batches, before, total = _batches(torch, examples, params, device), None, params.max_steps or 0
    task.progress(0, total)
    for done in range(1, total + 1):
        if task.should_stop():
            return
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, params.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if before is not None and not math.isfinite(float(before)):
            raise RuntimeError(f"the loss of step {done - 1} is not a finite number")
        before = loss.detach()
        task.progress(done, total, before)


def _batches(torch: Any, examples: Any, params: LoraParams, device: Any) -> Iterator[dict[str, Any]]:
    """Yield batches for ever: every epoch in another order, which the seed alone decides."""
    order = torch.Generator().manual_seed(params.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < params.per_device_train_batch_size:
            waiting += torch.randperm(len(examples), generator=order).tolist()
        chosen = waiting[: params.per_device_train_batch_size]
        waiting = waiting[params.per_device_train_batch_size :]
        rows = [examples.example(index) for index in chosen]
        shape = (len(rows), max(len(ids) for ids, _ in rows))
        ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, -100, dtype=torch.long)
        for row, (tokens, counted) in enumerate(rows):
            values = torch.tensor(tokens, dtype=torch.long)
            ids[row, : len(tokens)] = values
            mask[row, : len(tokens)] = 1
            labels[row, : len(tokens)] = values.masked_fill(~torch.tensor(counted, dtype=torch.bool), -100)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


if __name__ == "__main__":
    sys.exit(main())
