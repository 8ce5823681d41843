"""Measures sealed weights opened on a GPU, against the way through host memory and against the upload alone."""

from __future__ import annotations

import io
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from benchmarks.package import seal
from glasshouse.collectives.kernels.rfc8439 import interpreted
from glasshouse.package.read import Package
from glasshouse.package.write import Source
from glasshouse.task.granted import GrantInputs
from glasshouse.task.tensors import load
from glasshouse.wire.crypto import RecipientKey, SigningKey, Suite
from glasshouse.workloads.builtin.weights import DeviceOpener

__all__ = ["measure_package"]

_NAME = "model.safetensors"
_MEMORY_FOLDER = Path("/dev/shm")
_TENSORS = 6
_RUNS = 5


def measure_package(cipher: Any, size: int) -> dict[str, Any]:
    """Seal weights of about `size` bytes, and load them both ways, alternately.

    Raises:
        SystemExit: a tensor that is not what was sealed.
    """
    device = cipher.device
    folder = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as file:
        wanted, inputs = _seal(cast(BinaryIO, file), size)
        opener = DeviceOpener(cipher)
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "gpu": lambda: load(inputs, _NAME, torch, opener=opener),
            "host": lambda: {name: tensor.to(device) for name, tensor in load(inputs, _NAME, torch).items()},
        }
        seconds: dict[str, list[float]] = {name: [] for name in (*ways, "upload")}
        for _ in range(1 if interpreted() else _RUNS + 1):
            for name, way in ways.items():
                taken, found = _timed(device, way)
                seconds[name].append(taken)
                for key, tensor in wanted.items():
                    if not torch.equal(found[key].cpu(), tensor):
                        raise SystemExit(f"{key}, opened by way of {name}, is not what was sealed")
            seconds["upload"].append(_upload(device, size))
    total = sum(tensor.numel() * tensor.element_size() for tensor in wanted.values())
    rates = {
        f"{name}_gb_per_s": round(total / statistics.median(taken[1:] or taken) / 1e9, 3)
        for name, taken in seconds.items()
    }
    return {"bytes": total, "tensors": len(wanted), "seconds": seconds} | rates


def _seal(out: BinaryIO, size: int) -> tuple[dict[str, Any], GrantInputs]:
    from safetensors.torch import save

    rows = size // _TENSORS // 64
    wanted = {f"layer.{index}": torch.randn(rows + index, 32).bfloat16() for index in range(_TENSORS)}
    content = save(wanted)
    owner, key, recipient = SigningKey.generate(), secrets.token_bytes(32), RecipientKey.generate().public
    source = Source(path=_NAME, bytes=len(content), open=lambda: io.BytesIO(content))
    chunk_bytes = (1 << 10) if interpreted() else (1 << 20)
    seal(out, source, owner=owner, recipient=recipient, key=key, suite=Suite.CHACHA20_POLY1305, chunk_bytes=chunk_bytes)
    package = Package.open(out)
    granted = package.grant(key, package.unlock(key)).encode()
    secret = os.memfd_create("grant")
    os.write(secret, granted)
    return wanted, GrantInputs(secret=secret, secret_bytes=len(granted), package=os.dup(out.fileno()))


def _timed(device: Any, run: Callable[[], dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    started = time.perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, found


def _upload(device: Any, size: int) -> float:
    """Return how long as many bytes take from page-locked memory to the device: no way is faster."""
    locked = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return _timed(device, lambda: {"": target.copy_(locked)})[0]
