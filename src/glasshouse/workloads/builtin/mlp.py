"""`mlp`: the matched benchmark loop: a multilayer perceptron, one full-batch step an epoch."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import math
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

from glasshouse.errors import Code, PackageError, RunError
from glasshouse.task.handle import Task, decimal
from glasshouse.workloads.job_keys import choice, integer, job_invalid, needs, number
from glasshouse.workloads.params import COUNT, NAME, SECONDS, DeviceParams, Example, PlainFile
from glasshouse.workloads.process.job_control import JobControl, Result

FRAMEWORKS = ("torch",)
_FOLDER, _STATE = "checkpoint", "state.pt"
# Of the five seconds that a job has when its owner stops it, those in which its last checkpoint may begin.
_ENDING_S = 4.0
EXAMPLE = Example(
    params={"data": "data.csv", "epochs": 20},
    files={
        "data.csv": "x,y,label\n" + "".join(f"{n / 10},{(n * 7 % 10) / 10},{int(n >= 16)}\n" for n in range(32)),
    },
)


@dataclass(frozen=True, kw_only=True)
class MlpParams(DeviceParams):
    """Parameters of `mlp`."""

    RULES = (needs("label", "data"), *DeviceParams.RULES)
    TARGET = ("epochs", 200)
    ENDS = ("epochs", "seconds", "slots")
    INPUTS = ("data",)

    data: Annotated[
        str | None, NAME, "Input with a CSV table with a header line; without it the data is synthetic."
    ] = None
    label: Annotated[str | None, NAME, "Its column to predict; the last one by default."] = None
    synthetic_rows: Annotated[int, integer(2, 10**8), "Rows of synthetic data."] = 4096
    synthetic_features: Annotated[int, integer(1, 10**5), "Columns of synthetic data."] = 32
    synthetic_classes: Annotated[int, integer(2, 10**4), "Classes of synthetic data."] = 2
    held_out: Annotated[float, number(0.0, 0.9), "Share of the rows kept to report accuracy on."] = 0.0
    width: Annotated[int, integer(1, 10**6), "Units of a hidden layer."] = 64
    depth: Annotated[int, integer(1, 1000), "Hidden layers."] = 2
    epochs: Annotated[int | None, COUNT, "When to stop; 200 where neither this nor `seconds` is given."] = None
    seconds: Annotated[float | None, SECONDS, "When to stop, if that comes first."] = None
    learning_rate: Annotated[float, number(1e-9, 100.0), "Of Adam."] = 1e-3
    dtype: Annotated[str, choice("float32", "bfloat16"), "Of weights and data."] = "float32"


Params = MlpParams


class CsvTable(NamedTuple):
    """Features row by row, and one class for each row."""

    features: array[float]  # row-major
    width: int  # features in a row
    labels: array[int]  # the class of each row, an index into `classes`
    classes: tuple[str, ...]  # the label column's different values, sorted


class Data(NamedTuple):
    """Features and classes, on the device, split by the job's seed."""

    train_x: Any
    train_y: Any
    held_x: Any
    held_y: Any
    classes: int


def examine(params: MlpParams, files: Mapping[str, PlainFile]) -> list[str]:
    """Read the table as the run will; raises as `read_csv`."""
    if params.data is not None:
        with files[params.data].open() as stream:
            read_csv(stream, label=params.label, name=params.data)
    return []


def requirements(_params: MlpParams, _names: Iterable[str]) -> dict[str, str]:
    """Return nothing: PyTorch is all."""
    return {}


def prepare(_task: Task, _params: MlpParams) -> None:
    """Do nothing."""


def warm() -> None:
    """Import PyTorch, with the part that an optimiser's first step loads."""
    for name in ("torch._dynamo", "safetensors.torch"):
        importlib.import_module(name)


def run(task: Task, params: MlpParams, _control: JobControl) -> Result:
    """Train, save ``model.safetensors`` and ``metrics.json``.

    Raises:
        RunError: `nonfinite-loss`.
        PlatformError: `device-missing`.
        UsageError: for a table that is missing or malformed.
    """
    from safetensors.torch import save

    from glasshouse.workloads.builtin import training

    device = training.prepare(params)
    data = _data(task, params, device)
    model = _model(params, data).to(device)
    training.log(f"mlp: {data.train_x.shape[0]} rows of {data.train_x.shape[1]} features; {training.describe(device)}")
    result = _train(task, params, model, data, device)
    weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})
    digest = task.save_bytes("model.safetensors", weights)
    metrics = _metrics(model, data, result)
    task.save_bytes("metrics.json", (json.dumps(metrics, indent=2, sort_keys=True) + "\n").encode())
    training.log(f"mlp: {json.dumps(metrics, sort_keys=True)}")
    return replace(result, trainable=training.trainable(model), digests={"model": digest})


def _train(task: Task, params: MlpParams, model: Any, data: Data, device: Any) -> Result:
    """Train until a target of the job's parameters is reached or the owner stops the job."""
    import torch

    from glasshouse.workloads.builtin import training
    from glasshouse.workloads.measurement.measured_steps import ranges

    phase = ranges(params.profile)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate)
    measure = torch.nn.CrossEntropyLoss()
    training.wait(device)
    started = time.perf_counter()
    first: Any = None
    loss: Any = None
    done, saved, reason = 0, 0, "steps"
    if task.resume is not None:
        state = torch.load(_state_file(task), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = saved = state["done"]
        first, loss = state["first"].to(device), state["loss"].to(device)
        started -= state["elapsed_s"]
    task.progress(done, params.epochs, unit="epoch")

    def save(wait_s: float = 0.0) -> None:
        nonlocal saved
        _check(loss, done)
        part = task.checkpoints.begin(step=done, wait_s=wait_s, paths=[_FOLDER]) if done > saved else None
        if part is not None:
            saved = done
            elapsed_s, content = time.perf_counter() - started, io.BytesIO()
            state = {"done": done, "elapsed_s": elapsed_s, "first": first, "loss": loss}
            torch.save(state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, content)
            with part:
                part.begin(f"{_FOLDER}/{_STATE}")
                part.write(content.getbuffer())

    while params.epochs is None or done < params.epochs:
        if task.should_stop():
            reason = task.stop_reason
            save(_ENDING_S)
            break
        if params.seconds is not None and time.perf_counter() - started >= params.seconds:
            reason = "time"
            break
        with phase("forward"):
            found = measure(model(data.train_x).float(), data.train_y)
        with phase("backward"):
            found.backward()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss = found.detach()
        done += 1
        first = loss if first is None else first
        if task.checkpoints.due():
            save()
        # The loss is looked at when it is reported, about once a second: looking waits for the GPU.
        if task.progress(done, params.epochs, loss, unit="epoch"):
            _check(loss, done)
    training.wait(device)
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


def _state_file(task: Task) -> Path:
    folder = None if task.resume is None else task.resume.path
    if folder is None or not (folder / _STATE).is_file():
        raise PackageError(Code.CHECKPOINT_TAMPERED, f"a checkpoint without {_STATE}")
    return folder / _STATE


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

    generator = torch.Generator().manual_seed(params.seed)
    if params.data is None:
        x = torch.randn(params.synthetic_rows, params.synthetic_features, generator=generator)
        true = torch.randn(params.synthetic_features, params.synthetic_classes, generator=generator)
        y, classes = (x @ true).argmax(dim=1), params.synthetic_classes
    else:
        with task.open(params.data) as stream:
            table = read_csv(stream, label=params.label, name=params.data)
        x = torch.frombuffer(table.features, dtype=torch.float64).view(-1, table.width).float()
        y, classes = torch.frombuffer(table.labels, dtype=torch.int64).clone(), len(table.classes)
    order = torch.randperm(x.shape[0], generator=generator)
    held = min(round(x.shape[0] * params.held_out), x.shape[0] - 1)
    held_rows, rows = order[:held], order[held:]
    mean, spread = x[rows].mean(dim=0), x[rows].std(dim=0, correction=0).clamp_min(1e-8)
    x = ((x - mean) / spread).to(getattr(torch, params.dtype))
    return Data(x[rows].to(device), y[rows].to(device), x[held_rows].to(device), y[held_rows].to(device), classes)


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


def read_csv(stream: BinaryIO, *, label: str | None, name: str) -> CsvTable:
    """Read a table with a header line; every column but the label, the last one when None, holds numbers.

    Raises:
        UsageError: `job-invalid`, naming line and column.
    """
    text = io.TextIOWrapper(stream, "utf-8", newline="")
    try:
        return _read(csv.reader(text), label, name)
    except (csv.Error, UnicodeDecodeError) as error:
        raise job_invalid(f"{name} is not a CSV table in UTF-8") from error
    finally:
        text.detach()  # the stream is the caller's to close


def _read(lines: Iterable[list[str]], label: str | None, name: str) -> CsvTable:
    rows = iter(lines)
    header = next(rows, [])
    if not header:
        raise job_invalid(f"{name} has no usable row: it is empty, or begins with an empty line")
    wanted = header[-1] if label is None else label
    if len(header) < 2 or wanted not in header:
        raise job_invalid(f"{name} needs a header line with the label column {wanted!r} and others")
    at = header.index(wanted)
    features, found = array("d"), []
    for line, row in enumerate(rows, start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise job_invalid(f"{name} line {line} has {len(row)} columns where the header has {len(header)}")
        found.append(row.pop(at))
        for column, text in zip((*header[:at], *header[at + 1 :]), row, strict=True):
            features.append(_number(text, f"{name} line {line} column {column!r}"))
    if not found:
        raise job_invalid(f"{name} has no usable row: there is nothing below its header line")
    classes = tuple(sorted(set(found)))
    if len(classes) < 2:
        raise job_invalid(f"{name} has fewer than two different values in the column {wanted!r}")
    index = {value: position for position, value in enumerate(classes)}
    return CsvTable(features, len(header) - 1, array("q", (index[value] for value in found)), classes)


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise job_invalid(f"{where} is not a finite number")
    return value
