"""The device that a workload trains on, and seeds, threads and algorithms of PyTorch."""

from __future__ import annotations

import os
from typing import Any

import torch

from glasshouse.errors import Code, PlatformError

__all__ = ["choose", "describe", "fix", "seed_only", "wait"]


def choose(wanted: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`.

    Raises:
        PlatformError: `device-missing` when a GPU was asked for and there is none.
    """
    available = torch.cuda.is_available() if wanted != "cpu" else False
    if wanted == "cuda" and not available:
        raise PlatformError(
            Code.DEVICE_MISSING,
            "the job asks for a GPU and PyTorch finds none it can use here",
            hint='rent a machine with a GPU, or set device = "auto" or "cpu" in [params]',
        )
    return torch.device("cuda" if available else "cpu")


def wait(device: torch.device) -> None:
    """Return when the device has done all that it was told, so that a clock may be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, Any]:
    """Return what a person wants to know about the device, for the log."""
    if device.type != "cuda":
        return {"device": "cpu", "threads": torch.get_num_threads()}
    return {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def seed_only(seed: int, *, threads: int | None) -> None:
    """Seed every generator and, when given, fix the number of CPU threads."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)


def fix(seed: int, *, threads: int | None) -> None:
    """Make results bit-equal from run to run on the same machine and versions.

    Args:
        seed: of every generator.
        threads: of the CPU: sums are taken in another order with another count; 1 when not given.
    """
    # Read when cuBLAS makes its first handle; without it the deterministic algorithms refuse to run.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    seed_only(seed, threads=threads or 1)
