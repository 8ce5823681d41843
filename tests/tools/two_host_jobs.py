"""What the ranks on the two hosts do: an ordinary training script, and a loop of collectives to be attacked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["JOBS", "PATIENT", "warm_up"]

STEPS = 4
PATIENT = "the patient's record that a sample of the data set holds as text, number %08d"


def warm_up() -> None:
    """Have torch import what it imports late, without a thread that would not survive a fork."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


class Notebook:
    """Keeps the bytes of every tensor that the job does not want on the wire."""

    def __init__(self) -> None:
        self._kept: dict[str, list[bytes]] = {"data": [], "gradients": [], "parameters": []}

    def keep(self, kind: str, tensor: Any) -> None:
        self._kept[kind].append(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def write(self, folder: Path, rank: int) -> None:
        for kind, pieces in self._kept.items():
            (folder / f"{kind}-{rank}.plain").write_bytes(b"".join(pieces))


def train(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Scatter a data set, train on it with DDP, send a message, gather the result; note what was secret."""
    torch.manual_seed(rank)
    notes = Notebook()
    share = torch.empty(64, 96)
    whole = list(torch.randn(size, 64, 96).unbind()) if rank == 0 else None
    dist.scatter(share, whole, src=0)
    notes.keep("data", share)
    record = [PATIENT % 7] if rank == 0 else [None]
    dist.broadcast_object_list(record, src=0)
    assert record == [PATIENT % 7]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 64)))
    for parameter in model.parameters():
        notes.keep("parameters", parameter)
        parameter.register_hook(lambda gradient: _note_gradient(notes, gradient, size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(share).square().mean().backward()
        for parameter in model.parameters():
            notes.keep("gradients", parameter.grad)
        optimizer.step()
        for parameter in model.parameters():
            notes.keep("parameters", parameter)
    after = (rank + 1) % size
    got = torch.empty(64, 96)
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, share, after), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    ):
        request.wait()
    assert not torch.equal(got, share)
    everyone: list[Any] = [None] * size
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    dist.all_gather_object(everyone, state)
    notes.write(folder, rank)
    digests = {hashlib.sha256(b"".join(_bytes(value) for value in each.values())).hexdigest() for each in everyone}
    return {"digest": digests.pop(), "others": len(digests)}


def loop(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """All-reduce until somebody interferes; say what was left in the output."""
    for step in range(12):
        tensor = torch.full((1 << 20,), float(rank + step))
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            return _failed(error) | {"output": _left(tensor, own=float(rank + step)), "step": step}
        assert tensor.eq(sum(range(size)) + size * step).all().item()
    return {"step": 12}


def post(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Exchange messages with the rank on the other host until somebody interferes."""
    other = (rank + size // 2) % size
    for step in range(12):
        sent, got = torch.full((1 << 17,), float(rank + step)), torch.ones(1 << 17)
        try:
            for request in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
            ):
                request.wait()
            dist.barrier()
        except RuntimeError as error:
            # Zero, or whole because it had arrived, or untouched because receiving had not begun.
            sound = any(got.eq(value).all().item() for value in (0.0, float(other + step), 1.0))
            return _failed(error) | {"sound": sound, "step": step}
        assert got.eq(float(other + step)).all().item()
    return {"step": 12}


def train_attacked(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """DDP until somebody interferes; say whether the model was touched by what they sent."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        try:
            model(torch.randn(8, 1024)).square().mean().backward()
        except RuntimeError as error:
            same = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            return _failed(error) | {"model_untouched": same, "step": step}
        optimizer.step()
    return {"step": 12}


def idle(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Nothing but the meeting."""
    return {}


def _note_gradient(notes: Notebook, gradient: Any, size: int) -> None:
    """A rank's own gradient, and what DDP puts into the bucket."""
    notes.keep("gradients", gradient)
    notes.keep("gradients", gradient / size)


def _left(tensor: Any, own: float) -> str:
    """Return what a failed operation left in its output: zeros, what this rank had put in, or something else."""
    return next((what for what, value in (("zeros", 0.0), ("own", own)) if tensor.eq(value).all().item()), "else")


def _failed(error: RuntimeError) -> dict[str, Any]:
    code, about = str(getattr(error, "code", "")), getattr(error, "rank", None)
    return {"about": about, "code": code, "message": str(error), "type": type(error).__name__}


def _bytes(tensor: Any) -> bytes:
    data: bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data


JOBS = {"idle": idle, "loop": loop, "post": post, "train": train, "train-attacked": train_attacked}
