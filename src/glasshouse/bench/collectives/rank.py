"""One rank of the benchmark: a process that makes every group once and then repeats what its parent names.

It reads one JSON object a line on standard input and answers each with one on what was its standard output. It ends
with its input. Laws: a repetition begins behind a barrier of gloo's; times are from the clock that all processes of a
machine share; nothing is counted while something is timed.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from glasshouse.bench.collectives.arms import Arms
from glasshouse.bench.collectives.subjects import DTYPES, Subject, all_reduce, make
from glasshouse.bench.collectives.values import Cell, Way
from glasshouse.workloads.allocator import keep_freed_memory

__all__ = ["Rank", "main"]

TIMEOUT = timedelta(seconds=300)
_MEMORY_ROUNDS = 3


class Rank:
    """What one rank keeps between two orders of its parent.

    Args:
        rank, size: its place.
        store: where the ranks find each other.
        arms: every way's group.
    """

    def __init__(self, rank: int, size: int, store: dist.TCPStore, arms: Arms) -> None:
        self.rank, self.size, self._store, self._arms = rank, size, store, arms
        self._cell: Cell | None = None
        self._subject: Subject | None = None

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the parent says and return the answer."""
        found: dict[str, Any] = getattr(self, f"do_{order['do']}")(order)
        return found

    def do_prepare(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Make a cell's subject, see that every way is right, and say how long each takes about."""
        cell = Cell.from_json(order["cell"])
        groups = {way: self._arms.group(way) for way in cell.ways}
        self._cell, self._subject = cell, make(cell, groups, rank=self.rank)
        once: dict[str, float] = {}
        for way in cell.ways:
            self._subject.check(way, groups[way])
            self._subject.reset()
            self._arms.barrier()
            begin = time.monotonic()
            self._subject.once(way, groups[way])
            once[way.value] = time.monotonic() - begin
        buckets = self._subject.buckets
        return {
            "once_s": once,
            "buckets": [] if buckets is None else list(buckets.elements),
            "share": 1.0 if buckets is None else buckets.share,
            "whole_buckets": 0 if buckets is None else buckets.whole_count,
        }

    def do_rounds(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Repeat rounds in the orders that the parent drew; answer with [begin, end, user, system] of each."""
        samples: dict[str, list[list[float]]] = {}
        for turn in order["orders"]:
            for name in turn:
                samples.setdefault(name, []).append(self._timed(Way(name), batch=order["batch"]))
        return {"samples": samples}

    def do_count(self, _order: Mapping[str, Any]) -> dict[str, Any]:
        """Repeat every sealed way with its counters on, and answer with what one repetition took."""
        if self._cell is None:
            raise ValueError("nothing was prepared")
        self._subject = None
        groups = {way: group for way in self._cell.ways if (group := self._arms.counted(way)) is not None}
        if not groups:
            return {"counts": {}}
        subject = make(self._cell, groups, rank=self.rank)
        counts: dict[str, dict[str, float]] = {}
        for way, group in groups.items():
            subject.check(way, group)
            subject.reset()
            counts[way.value] = self._arms.count(way, partial(subject.once, way, group))
        return {"counts": counts}

    def do_drop(self, _order: Mapping[str, Any]) -> dict[str, Any]:
        """Forget the cell."""
        self._cell = self._subject = None
        gc.collect()
        return {}

    def do_memory(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Answer with how much more memory than before each way's all-reduce needed at its peak, None if unknown."""
        found: dict[str, int | None] = {}
        for name in order["ways"]:
            group = self._arms.group(Way(name))
            tensor = torch.ones(order["bytes"] // 4, dtype=torch.float32)
            gc.collect()
            before = _status("VmRSS") if _reset_peak() else None
            self._arms.barrier()
            for _ in range(_MEMORY_ROUNDS):
                all_reduce(group, tensor)
            peak = _status("VmHWM")
            found[name] = None if before is None or peak is None else max(0, peak - before)
        return {"extra_bytes": found}

    def do_start(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Make a group of gloo's and a sealed one, several times; answer with begin and end of each."""
        times: dict[str, list[list[float]]] = {"raw": [], "sealed": []}
        for number in range(order["repeats"]):
            for name in ("raw", "sealed") if number % 2 == 0 else ("sealed", "raw"):
                self._arms.barrier()
                begin = time.monotonic()
                close = self._arms.another(name)
                times[name].append([begin, time.monotonic()])
                self._arms.barrier()
                close()
        return {"times": times}

    def _timed(self, way: Way, *, batch: int) -> list[float]:
        if self._subject is None:
            raise ValueError("nothing was prepared")
        group = self._arms.group(way)
        self._subject.reset()
        self._arms.barrier()
        used = resource.getrusage(resource.RUSAGE_SELF)
        begin = time.monotonic()
        for _ in range(batch):
            self._subject.once(way, group)
        end = time.monotonic()
        now = resource.getrusage(resource.RUSAGE_SELF)
        return [begin, end, now.ru_utime - used.ru_utime, now.ru_stime - used.ru_stime]


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)


def _open(first: Mapping[str, Any], answer: TextIO) -> Rank:
    """Meet the other ranks: rank 0 holds the store and tells its parent where; the others are told."""
    rank, size = int(first["rank"]), int(first["size"])
    wait = {"timeout": TIMEOUT, "wait_for_workers": False}
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, **wait)
        _say(answer, {"port": store.port})
    else:
        store = dist.TCPStore("127.0.0.1", int(first["port"]), size, is_master=False, **wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    ways = tuple(Way(way) for way in first["ways"])
    arms = Arms(store=store, rank=rank, size=size, ways=ways, secret=bytes.fromhex(first["secret"]))
    return Rank(rank, size, store, arms)


def _say(answer: TextIO, value: Mapping[str, Any]) -> None:
    answer.write(json.dumps(value) + "\n")
    answer.flush()


def main() -> None:
    """Answer orders until the input ends."""
    # Libraries that print must not talk into the answers.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)  # as torchrun does: the ranks share the cores
    keep_freed_memory()
    faulthandler.register(signal.SIGUSR1)  # a parent that has waited too long asks where everybody stands
    first = json.loads(sys.stdin.readline())
    rank = _open(first, answer)
    _say(answer, {"ready": True, "dtypes": sorted(DTYPES)})
    for line in sys.stdin:
        _say(answer, rank.obey(json.loads(line)))
    answer.flush()
    # Groups wait for each other when they are destroyed; the parent is gone or wants no more, so nothing is waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
