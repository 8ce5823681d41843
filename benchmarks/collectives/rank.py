"""One rank of the benchmark: makes every group once, and repeats what its parent names until its pipe ends.

Laws: before a way is timed it has to give the right result; a repetition begins behind a barrier of gloo's; times are
from the clock that all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import resource
import time
import traceback
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collectives import models
from benchmarks.collectives.cells import Cell, Kind, Way
from benchmarks.collectives.groups import Groups
from glasshouse.workloads.process.environment import keep_freed_memory

__all__ = ["serve"]

TIMEOUT = timedelta(seconds=300)
# A replayed iteration exchanges at most so much; the rest of a large model repeats the same shapes.
MOST_REPLAY_BYTES = 128 << 20
_MEMORY_ROUNDS = 3
_LOOKED_AT = 512  # elements of each gradient


class Exchange:
    """Tensors that are summed: one and blocking for an all-reduce, a model's buckets begun in order for a replay."""

    def __init__(self, cell: Cell, rank: int) -> None:
        dtype = getattr(torch, cell.dtype)
        self.buckets = None
        elements: tuple[int, ...] = (max(1, (cell.bytes or 0) // dtype.itemsize),)
        if cell.model is not None:
            whole = models.buckets_of(cell.model, cap_mib=cell.cap_mib, dtype=dtype)
            self.buckets = models.sample(whole, most_elements=MOST_REPLAY_BYTES // dtype.itemsize)
            elements = self.buckets.elements
        # Small integers: exact in every type, and different on every rank and place.
        self._patterns = [(torch.arange(count) % 7 + rank).to(dtype) for count in elements]
        self._tensors = [pattern.clone() for pattern in self._patterns]
        self._rank, self._ranks, self._waits = rank, cell.ranks, cell.kind is Kind.ALL_REDUCE

    def check(self, way: Way, group: dist.ProcessGroup) -> None:
        """Raise where a way gives a wrong sum."""
        self.reset()
        self.once(way, group)
        below = sum(range(self._ranks))
        for tensor, pattern in zip(self._tensors, self._patterns, strict=True):
            if not torch.equal(tensor, (pattern - self._rank) * self._ranks + below):
                raise ValueError(f"{way} gave a wrong sum: nothing of it is measured")

    def reset(self) -> None:
        """Prepare the next repetition; not timed."""
        for tensor, pattern in zip(self._tensors, self._patterns, strict=True):
            tensor.copy_(pattern)

    def once(self, _way: Way, group: dist.ProcessGroup) -> None:
        if self._waits:
            all_reduce(group, self._tensors[0])
            return
        for begun in [group.allreduce([tensor]) for tensor in self._tensors]:  # as DDP does
            begun.wait()


class Train:
    """Forward, backward and an optimiser's step under stock DDP, with a copy of the model for every way."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self._name, self._cap_mib, self._dtype = cell.model or "", cell.cap_mib, getattr(torch, cell.dtype)
        self.buckets = models.buckets_of(self._name, cap_mib=cell.cap_mib, dtype=self._dtype)
        torch.manual_seed(1 + rank)
        inputs, self._targets = models.inputs(self._name)
        self._inputs = inputs.to(self._dtype) if inputs.is_floating_point() else inputs
        self._models: dict[tuple[Way, dist.ProcessGroup], tuple[Any, torch.optim.Optimizer]] = {}

    def check(self, way: Way, group: dist.ProcessGroup) -> None:
        """Raise where an iteration's gradients are not the mean of what every rank computes alone.

        The first iteration also lets DDP rebuild its buckets.
        """
        torch.manual_seed(0)
        module = models.build(self._name).to(self._dtype)
        wrapped = DistributedDataParallel(module, process_group=group, bucket_cap_mb=self._cap_mib)
        self._models[way, group] = wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3)
        self._backward(wrapped, exchange=False)
        mean = _look(wrapped)
        # Summed by gloo, whatever is on trial; in float64 its rounding is none beside that of the exchange.
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if way is not Way.ALONE:
            self._backward(wrapped, exchange=True)
            slack = 8 * torch.finfo(self._dtype).eps * (float(mean.abs().max()) or 1.0)
            if not bool(((_look(wrapped) - mean).abs() <= slack).all()):
                raise ValueError(f"{way} gave a wrong mean of gradients: nothing of it is measured")
        self.once(way, group)

    def reset(self) -> None:
        """An iteration begins where the one before it ended."""

    def once(self, way: Way, group: dist.ProcessGroup) -> None:
        wrapped, optimiser = self._models[way, group]
        self._backward(wrapped, exchange=way is not Way.ALONE)
        optimiser.step()

    def _backward(self, wrapped: Any, *, exchange: bool) -> None:
        wrapped.zero_grad()
        with contextlib.nullcontext() if exchange else wrapped.no_sync():
            outputs = wrapped(self._inputs).logits
            functional.cross_entropy(outputs.flatten(0, -2).float(), self._targets.flatten()).backward()


def all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Sum a tensor over the ranks, as `torch.distributed.all_reduce` does."""
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    group.allreduce([tensor], options).wait()


def _look(module: torch.nn.Module) -> torch.Tensor:
    """Return the beginnings of all gradients, so that every bucket is looked at."""
    return torch.cat([one.grad.flatten()[:_LOOKED_AT].to(torch.float64) for one in module.parameters()])


class Rank:
    """What one rank keeps between two orders of its parent; each method that has no underscore is an order."""

    def __init__(self, groups: Groups, rank: int) -> None:
        self._groups, self._rank = groups, rank
        self._subject: Exchange | Train | None = None

    def prepare(self, cell: Cell) -> dict[str, Any]:
        """Check every way of a cell; return how long each takes about, and what an iteration exchanges."""
        subject = self._make(cell)
        once_s = {}
        for way in cell.ways:
            group = self._groups.of(way)
            subject.check(way, group)
            begin, end, _, _ = self._timed(way, 1)
            once_s[way] = end - begin
        buckets = subject.buckets
        return {
            "once_s": once_s,
            "buckets": [] if buckets is None else list(buckets.elements),
            "share": 1.0 if buckets is None else buckets.share,
            "whole_buckets": 0 if buckets is None else buckets.whole_count,
        }

    def rounds(self, orders: list[list[Way]], batch: int) -> list[dict[Way, tuple[float, float, float, float]]]:
        """Repeat rounds in the orders that the parent drew; return begin, end, user and system time of each way."""
        return [{way: self._timed(way, batch) for way in order} for order in orders]

    def count(self, cell: Cell) -> dict[str, dict[str, float]]:
        """Return what one repetition of every sealed way took on this rank, counted."""
        subject, found = self._make(cell), {}
        for way in cell.ways:
            if way not in (Way.RAW, Way.ALONE):
                group = self._groups.counted(way)
                subject.check(way, group)
                subject.reset()
                found[way.value] = self._groups.count(way, partial(subject.once, way, group))
        return found

    def memory(self, ways: list[Way], size: int) -> dict[Way, int]:
        """Return how much more memory than before each way's all-reduce needed at its peak, in bytes."""
        found = {}
        for way in ways:
            group, tensor = self._groups.of(way), torch.ones(size // 4)
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
            before = _status("VmRSS")
            dist.barrier()
            for _ in range(_MEMORY_ROUNDS):
                all_reduce(group, tensor)
            found[way] = max(0, _status("VmHWM") - before)
        return found

    def _make(self, cell: Cell) -> Exchange | Train:
        self._subject = None
        gc.collect()  # before the next one is given memory
        self._subject = (Train if cell.kind is Kind.TRAIN else Exchange)(cell, self._rank)
        return self._subject

    def _timed(self, way: Way, batch: int) -> tuple[float, float, float, float]:
        if self._subject is None:
            raise ValueError("nothing was prepared")
        group = self._groups.of(way)
        self._subject.reset()
        dist.barrier()
        used, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        for _ in range(batch):
            self._subject.once(way, group)
        end, now = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        return begin, end, now.ru_utime - used.ru_utime, now.ru_stime - used.ru_stime


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def serve(pipe: Connection, rank: int, size: int, port: int, secret: bytes) -> None:
    """Answer orders, each a method of `Rank` and its arguments, until the parent is gone or wants no more."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.enable()  # a parent that has waited too long aborts us: where each thread stood is printed
    torch.set_num_threads(1)  # as torchrun does: the ranks share the cores
    keep_freed_memory()
    gc.freeze()  # later collections do not walk what was imported
    try:
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        served = Rank(Groups(store, rank, size, secret), rank)
        pipe.send((True, None))
        while True:
            do, arguments = pipe.recv()
            pipe.send((True, getattr(served, do)(**arguments)))
    except (EOFError, BrokenPipeError):
        pass
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))
    # Groups wait for each other when they are destroyed; the parent is gone or has its answer: nothing is awaited.
    os._exit(0)
