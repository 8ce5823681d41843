"""What a rank repeats: an all-reduce, a training iteration under DDP, or the exchange of a large model's buckets.

Law: before anything is timed, every way has to give the right result; a fast wrong one is no result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from glasshouse.bench.collectives.buckets import Buckets, buckets_of, sample
from glasshouse.bench.collectives.models import MODELS
from glasshouse.bench.collectives.values import Cell, Kind, Way
from glasshouse.errors import Code, InternalError

__all__ = ["DTYPES", "Subject", "make"]

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
# A replayed iteration exchanges at most about so much; the rest of a large model repeats the same shapes.
MOST_REPLAY_BYTES = 128 << 20
LEARNING_RATE = 1e-3
_LOOKED_AT = 512  # elements of each gradient


class Subject(Protocol):
    """One cell on one rank."""

    @property
    def buckets(self) -> Buckets | None:
        """What an iteration exchanges; None for an all-reduce."""

    def check(self, way: Way, group: dist.ProcessGroup) -> None:
        """Raise `InternalError` where this way gives a wrong result."""

    def reset(self) -> None:
        """Prepare the next repetition; not timed."""

    def once(self, way: Way, group: dist.ProcessGroup) -> None:
        """Do it once, and return when its result is there."""


def make(cell: Cell, groups: Mapping[Way, dist.ProcessGroup], *, rank: int) -> Subject:
    """Return a cell's subject on this rank; all ranks make the same ones at the same time.

    Args:
        cell: which.
        groups: of every way; `Way.ALONE` has that of gloo.
        rank: ours.
    """
    if cell.kind is Kind.ALL_REDUCE:
        return AllReduce(cell, rank)
    if cell.kind is Kind.REPLAY:
        return Replay(cell, rank)
    return Train(cell, groups, rank)


def all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> None:
    """Sum a tensor over the ranks, as `torch.distributed.all_reduce` does."""
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    group.allreduce([tensor], options).wait()


def begin_all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> Any:
    """Begin an all-reduce as DDP does, and return what can be waited for."""
    return group.allreduce([tensor])


class AllReduce:
    """A blocking sum of one tensor."""

    def __init__(self, cell: Cell, rank: int) -> None:
        dtype = DTYPES[cell.dtype]
        elements = max(1, (cell.bytes or 0) // dtype.itemsize)
        # Small integers: exact in every type, and different on every rank and place.
        self._pattern = (torch.arange(elements) % 7 + rank).to(dtype)
        self._tensor = self._pattern.clone()
        self._ranks = cell.ranks

    @property
    def buckets(self) -> Buckets | None:
        return None

    def check(self, way: Way, group: dist.ProcessGroup) -> None:
        self.reset()
        self.once(way, group)
        elements = self._tensor.numel()
        below = sum(range(self._ranks))
        expected = (torch.arange(elements) % 7 * self._ranks + below).to(self._tensor.dtype)
        _hold(way, bool(torch.equal(self._tensor, expected)))

    def reset(self) -> None:
        self._tensor.copy_(self._pattern)

    def once(self, way: Way, group: dist.ProcessGroup) -> None:
        all_reduce(group, self._tensor)


class Replay:
    """The buckets of a model that is too large to be trained here: begun one after the other, then all awaited."""

    def __init__(self, cell: Cell, rank: int) -> None:
        dtype = DTYPES[cell.dtype]
        whole = buckets_of(MODELS[cell.model or ""], cap_mib=cell.cap_mib, dtype=dtype)
        self._found = sample(whole, most_elements=MOST_REPLAY_BYTES // dtype.itemsize)
        self._buckets = [torch.full((elements,), rank + 1, dtype=dtype) for elements in self._found.elements]
        self._rank, self._sum = rank, sum(range(1, cell.ranks + 1))

    @property
    def buckets(self) -> Buckets | None:
        return self._found

    def check(self, way: Way, group: dist.ProcessGroup) -> None:
        self.reset()
        self.once(way, group)
        _hold(way, all(bool((bucket == self._sum).all()) for bucket in self._buckets))

    def reset(self) -> None:
        for bucket in self._buckets:
            bucket.fill_(self._rank + 1)

    def once(self, way: Way, group: dist.ProcessGroup) -> None:
        for begun in [begin_all_reduce(group, bucket) for bucket in self._buckets]:
            begun.wait()


class Train:
    """Forward, backward and an optimiser's step under stock DDP, with a copy of the model for every way."""

    def __init__(self, cell: Cell, groups: Mapping[Way, dist.ProcessGroup], rank: int) -> None:
        model, self._dtype = MODELS[cell.model or ""], DTYPES[cell.dtype]
        self._found = buckets_of(model, cap_mib=cell.cap_mib, dtype=self._dtype)
        torch.manual_seed(1 + rank)
        inputs, self._targets = model.inputs()
        self._inputs = inputs.to(self._dtype) if inputs.is_floating_point() else inputs
        self._models: dict[Way, DistributedDataParallel] = {}
        self._optimisers: dict[Way, torch.optim.Optimizer] = {}
        for way, group in groups.items():
            torch.manual_seed(0)
            module = model.build().to(self._dtype)
            wrapped = DistributedDataParallel(module, process_group=group, bucket_cap_mb=cell.cap_mib)
            self._models[way] = wrapped
            self._optimisers[way] = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)

    @property
    def buckets(self) -> Buckets | None:
        return self._found

    def check(self, way: Way, group: dist.ProcessGroup) -> None:
        """Hold an iteration's gradients to the mean of what every rank computes alone.

        The first iteration also lets DDP rebuild its buckets.
        """
        wrapped = self._models[way]
        self.once(Way.ALONE, group, of=way, step=False)
        mean = _look(wrapped)
        # Summed by gloo, whatever is on trial; in float64 its rounding is none beside that of the exchange.
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        self.once(way, group, of=way, step=False)
        if way is not Way.ALONE:
            slack = 8 * torch.finfo(self._dtype).eps * (float(mean.abs().max()) or 1.0)
            _hold(way, bool(((_look(wrapped) - mean).abs() <= slack).all()))
        self.once(way, group)

    def reset(self) -> None:
        """Nothing: an iteration begins where the one before it ended."""

    def once(self, way: Way, group: dist.ProcessGroup, *, of: Way | None = None, step: bool = True) -> None:
        wrapped = self._models[of or way]
        wrapped.zero_grad()
        with wrapped.no_sync() if way is Way.ALONE else contextlib.nullcontext():
            outputs = wrapped(self._inputs)
            functional.cross_entropy(outputs.flatten(0, -2).float(), self._targets.flatten()).backward()
        if step:
            self._optimisers[of or way].step()


def _look(module: torch.nn.Module) -> Tensor:
    """Return the beginnings of all gradients, so that every bucket is looked at."""
    found = [one.grad.flatten()[:_LOOKED_AT].to(torch.float64) for one in module.parameters() if one.grad is not None]
    if not found:
        raise InternalError(Code.INTERNAL, "a model without gradients")
    return torch.cat(found)


def _hold(way: Way, right: bool) -> None:
    if not right:
        raise InternalError(Code.INTERNAL, f"{way} gave a wrong sum: nothing of it is measured")
