"""What both training loops share: the device, and seeds and algorithms of PyTorch."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from glasshouse.errors import Code, PlatformError
from glasshouse.workloads.params import DeviceParams


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
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if available else torch.device("cpu")


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


def log(text: str) -> None:
    """Write a line to the sealed log."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def wait(device: torch.device) -> None:
    """Return when the device has done its work, so that a clock may be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Later:
    """A number that the device has yet to reach, read without waiting for what was queued behind it."""

    def __init__(self, value: Any) -> None:
        self._event = None
        self._value = value.detach() if isinstance(value, torch.Tensor) else value
        if isinstance(self._value, torch.Tensor) and self._value.device.type == "cuda":
            self._value = self._value.to("cpu", non_blocking=True)  # to page-locked memory
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> float:
        """Return the number, once the device has reached it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)
