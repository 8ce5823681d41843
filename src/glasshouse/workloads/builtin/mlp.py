"""`mlp`: the matched benchmark loop: a multilayer perceptron, one full-batch step an epoch."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from glasshouse.errors import Code, RunError
from glasshouse.task.handle import Task
from glasshouse.task.result import Result, decimal
from glasshouse.workloads.params import MlpParams

__all__ = ["run", "warm"]


class Data(NamedTuple):
    """Features and classes, on the device, split by the job's seed."""

    train_x: Any
    train_y: Any
    held_x: Any
    held_y: Any
    classes: int


def warm() -> None:
    """Import PyTorch, with the part that an optimiser's first step loads."""
    for name in ("torch._dynamo", "safetensors.torch"):
        importlib.import_module(name)


def run(task: Task, params: MlpParams, _on_stop: Callable[[Callable[[], None]], None]) -> Result:
    """Train, save ``model.safetensors`` and ``metrics.json``.

    Raises:
        RunError: `nonfinite-loss`.
        PlatformError: `device-missing`.
        UsageError: for a table that is missing or malformed.
    """
    from safetensors.torch import save

    from glasshouse.workloads.builtin import compute

    device = compute.choose(params.device)
    (compute.fix if params.deterministic else compute.seed_only)(params.seed, threads=params.threads)
    data = _data(task, params, device)
    model = _model(params, data).to(device)
    _say(f"mlp: {data.train_x.shape[0]} rows of {data.train_x.shape[1]} features; {compute.describe(device)}")
    result = _train(task, params, model, data, device)
    weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})
    digest = task.save_bytes("model.safetensors", weights)
    metrics = _metrics(model, data, result)
    task.save_bytes("metrics.json", (json.dumps(metrics, indent=2, sort_keys=True) + "\n").encode())
    _say(f"mlp: {json.dumps(metrics, sort_keys=True)}")
    return Result(
        unit="epoch",
        done=result.done,
        elapsed_us=result.elapsed_us,
        stop_reason=result.stop_reason,
        loss_first=result.loss_first,
        loss_final=result.loss_final,
        trainable=sum(parameter.numel() for parameter in model.parameters()),
        digests={"model": digest},
    )


def _train(task: Task, params: MlpParams, model: Any, data: Data, device: Any) -> Result:
    import torch

    from glasshouse.workloads.builtin import compute
    from glasshouse.workloads.measurement import phases

    phase = phases.ranges(params.profile)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate)
    measure = torch.nn.CrossEntropyLoss()
    task.progress(0, params.epochs, unit="epoch")
    compute.wait(device)
    started = time.perf_counter()
    deadline = math.inf if params.seconds is None else time.perf_counter() + params.seconds
    first: Any = None
    loss: Any = None
    done, reason = 0, "steps"
    while params.epochs is None or done < params.epochs:
        if task.should_stop():
            reason = task.stop_reason
            break
        if time.perf_counter() >= deadline:
            reason = "time"
            break
        with phase("forward"):
            loss = measure(model(data.train_x).float(), data.train_y)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done += 1
        loss = loss.detach()
        first = loss if first is None else first
        # The loss is looked at when it is reported, about once a second: looking waits for the GPU.
        if task.progress(done, params.epochs, loss, unit="epoch"):
            _check(loss, done)
    compute.wait(device)
    elapsed_us = int((time.perf_counter() - started) * 1e6)
    _check(loss, done)
    task.progress(done, done, loss, unit="epoch")
    return Result(
        unit="epoch",
        done=done,
        elapsed_us=elapsed_us,
        stop_reason=reason,
        loss_first=None if first is None else decimal(first),
        loss_final=None if loss is None else decimal(loss),
    )


def _check(loss: Any, epoch: int) -> None:
    if loss is not None and not math.isfinite(float(loss)):
        raise RunError(
            Code.NONFINITE_LOSS, f"the loss of epoch {epoch} is not a finite number", hint="lower learning_rate"
        )


def _model(params: MlpParams, data: Data) -> Any:
    import torch

    sizes = [data.train_x.shape[1], *[params.width] * params.depth]
    layers: list[Any] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], data.classes)).to(data.train_x.dtype)


def _data(task: Task, params: MlpParams, device: Any) -> Data:
    import torch

    from glasshouse.workloads.builtin.csv_tables import read_csv

    generator = torch.Generator().manual_seed(params.seed)
    if params.data is None:
        x = torch.randn(params.synthetic_rows, params.synthetic_features, generator=generator)
        true = torch.randn(params.synthetic_features, params.synthetic_classes, generator=generator)
        y, classes = (x @ true).argmax(dim=1), params.synthetic_classes
    else:
        with task.open(params.data) as stream:
            table = read_csv(stream, label=params.label, name=params.data)
        x = torch.frombuffer(table.features, dtype=torch.float64).view(table.rows, table.width).float()
        y, classes = torch.frombuffer(table.labels, dtype=torch.int64).clone(), len(table.classes)
    order = torch.randperm(x.shape[0], generator=generator)
    held = min(round(x.shape[0] * params.held_out), x.shape[0] - 1)
    held_rows, rows = order[:held], order[held:]
    mean, spread = x[rows].mean(dim=0), x[rows].std(dim=0, correction=0).clamp_min(1e-8)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[params.dtype]
    x = ((x - mean) / spread).to(dtype)
    return Data(
        train_x=x[rows].to(device),
        train_y=y[rows].to(device),
        held_x=x[held_rows].to(device),
        held_y=y[held_rows].to(device),
        classes=classes,
    )


def _metrics(model: Any, data: Data, result: Result) -> dict[str, Any]:
    import torch

    def accuracy(x: Any, y: Any) -> float | None:
        return round(float((model(x).argmax(dim=1) == y).float().mean()), 6) if len(y) else None

    with torch.no_grad():
        found = {"accuracy": accuracy(data.train_x, data.train_y), "held_out": accuracy(data.held_x, data.held_y)}
    elapsed_s = result.elapsed_us / 1e6
    return found | {
        "rows": len(data.train_y),
        "held_out_rows": len(data.held_y),
        "epochs": result.done,
        "epochs_per_s": round(result.done / elapsed_s, 3) if elapsed_s else None,
        "loss_first": result.loss_first,
        "loss_final": result.loss_final,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the sealed log
