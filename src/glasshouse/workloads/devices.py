"""Where tensors live."""

from __future__ import annotations

from typing import Any

import torch

from glasshouse.errors import Code, PlatformError

__all__ = ["choose", "wait"]


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
