"""What both training loops share: the device, seeds and algorithms of PyTorch, and the loop itself."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from glasshouse.errors import Code, PlatformError, RunError
from glasshouse.task.handle import Task, decimal
from glasshouse.workloads.params import DeviceParams
from glasshouse.workloads.process.job_control import Result


def prepare(params: DeviceParams) -> torch.device:
    """Set seeds, threads and algorithms for this process, and return the device that the job asks for.

    In deterministic mode, results are bit-equal from run to run on the same machine and versions.

    Raises:
        PlatformError: `device-missing` when a GPU was asked for and there is none.
    """
    available = params.device != "cpu" and torch.cuda.is_available()
    if params.device == "cuda" and not available:
        raise PlatformError(
            Code.DEVICE_MISSING,
            "the job asks for a GPU and PyTorch finds none it can use here",
            hint='rent a machine with a GPU, or set device = "auto" or "cpu" in [params]',
        )
    seed(params.seed, threads=params.threads, deterministic=params.deterministic)
    return torch.device("cuda" if available else "cpu")


def seed(number: int, *, threads: int | None, deterministic: bool) -> None:
    """Seed every generator, and fix threads of the CPU and algorithms where that is asked for."""
    if deterministic:
        # Read when cuBLAS makes its first handle; without it the deterministic algorithms refuse to run.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        threads = threads or 1  # another count adds in another order
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(number)


def describe(device: torch.device) -> dict[str, Any]:
    """Return the device's facts for the log."""
    if device.type != "cuda":
        return {"device": "cpu", "threads": torch.get_num_threads()}
    return {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def trainable(model: Any) -> int:
    """Return the number of parameters that training changes."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def loop(
    task: Task,
    device: torch.device,
    params: Any,
    *,
    step: Callable[[int], Any],
    after: Callable[[int, Any, bool], None],
    check: Callable[[Any, int], None],
) -> Result:
    """Train until a target of the job's parameters is reached or the owner stops the job.

    Args:
        step: takes how many steps are done, does one more, and returns its loss, detached.
        after: takes the new count, the loss, and whether they were reported.
        check: refuses the last loss, or None without a step, with the count.
    """
    name = params.TARGET[0]  # `steps` or `epochs`
    unit, count, seconds = name.removesuffix("s"), getattr(params, name), params.seconds
    task.progress(0, count, unit=unit)
    _wait(device)
    started = time.perf_counter()
    first: Any = None
    loss: Any = None
    done, reason = 0, "steps"
    while count is None or done < count:
        if task.should_stop():
            reason = task.stop_reason
            break
        if seconds is not None and time.perf_counter() - started >= seconds:
            reason = "time"
            break
        loss = step(done)
        done += 1
        first = loss if first is None else first
        after(done, loss, task.progress(done, count, loss, unit=unit))
    _wait(device)
    elapsed_us = int((time.perf_counter() - started) * 1e6)
    check(loss, done)
    task.progress(done, done, loss, unit=unit)
    return Result(
        unit=unit,
        done=done,
        elapsed_us=elapsed_us,
        stop_reason=reason,
        loss_first=None if first is None else decimal(first),
        loss_final=None if loss is None else decimal(loss),
    )


def check_finite(loss: Any, which: str, hint: str) -> None:
    """Refuse a loss that is no finite number; raises `RunError` (`nonfinite-loss`)."""
    if loss is not None and not math.isfinite(float(loss)):
        raise RunError(Code.NONFINITE_LOSS, f"the loss of {which} is not a finite number", hint=hint)


def log(text: str) -> None:
    """Write a line to the sealed log."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _wait(device: torch.device) -> None:
    """Return when the device has done its work, so that a clock may be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
