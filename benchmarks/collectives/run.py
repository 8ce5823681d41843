"""Runs the characterisation: worlds of ranks, and in each the cells, until the time of each is used.

Laws: a cell gets at least `LEAST_ROUNDS` or is named as not measured; a rank that dies or gives no answer ends the
benchmark, with nothing left running; what was complete by then, or at an interrupt, is kept.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import secrets
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.collectives.cells import WAYS, Cell, Kind, Way, bars, numbers
from benchmarks.collectives.models import MODULES
from benchmarks.collectives.rank import serve
from benchmarks.kept import machine

__all__ = ["FORMAT", "RankError", "World", "measure"]

FORMAT = "glasshouse collectives measurement 1"
LEAST_ROUNDS, MOST_ROUNDS = 5, 150
SAMPLE_S, MOST_BATCH = 0.004, 32  # a shorter sample is mostly the skew of the barrier before it
ANSWER_S = 600.0


class RankError(RuntimeError):
    """A rank died, failed, or did not answer."""


class World:
    """Processes of ranks that wait for orders; use it in a `with`, which ends them.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Forked from a process that has imported everything once, and has no threads and no secret.
        context, secret = multiprocessing.get_context("forkserver"), secrets.token_bytes(32)
        context.set_forkserver_preload(["benchmarks.collectives.rank", *MODULES])
        self._pipes, self._ranks = [], []
        # An interrupt is this process's to handle: the ranks inherit that it is ignored.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, args=(theirs, rank, size, self._store.port, secret), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._ranks.append(process)
        finally:
            signal.signal(signal.SIGINT, before)

    def __enter__(self) -> World:
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._ranks:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank."""
        return tuple(process.pid for process in self._ranks if process.pid)

    def order(self, do: str, **arguments: Any) -> list[Any]:
        """Give an order to every rank and return their answers, by rank; raises `RankError`."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((do, arguments))
            except OSError:
                raise RankError(f"rank {rank} ended early") from None
        return self._answers()

    def _answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        end = time.monotonic() + ANSWER_S
        while len(found) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                for pid in self.pids:
                    os.kill(pid, signal.SIGABRT)
                raise RankError(f"rank {min(waiting.values())} did not answer within {ANSWER_S:g} s")
            for pipe, rank in waiting.items():
                if pipe in ready:
                    try:
                        good, answer = pipe.recv()
                    except (EOFError, OSError):
                        raise RankError(f"rank {rank} ended early") from None
                    if not good:
                        raise RankError(f"rank {rank} failed: {answer}")
                    found[rank] = answer
        return [found[rank] for rank in range(self.size)]


def measure(
    cells: Sequence[Cell],
    *,
    seconds: float,
    seed: int,
    memory: Sequence[int] = (),
) -> dict[str, Any]:
    """Measure cells, and return everything that is kept of them.

    Args:
        cells: those of one number of ranks lie together, because their processes are started once.
        seconds: how long rounds of a cell are repeated, beyond the least number of them.
        seed: of the orders of the ways.
        memory: sizes in bytes whose peak memory is looked at.
    """
    began, chance = time.monotonic(), random.Random(seed)
    document: dict[str, Any] = {
        "cells": [], "failed": None, "format": FORMAT, "memory": [], "not_measured": [], "seed": seed,
        "system": machine() | {"torch": torch.__version__},
    }  # fmt: skip
    todo = list(cells)
    try:
        for ranks, group in itertools.groupby(cells, key=lambda cell: cell.ranks):
            with World(ranks) as world:
                document["memory"] += _memory(world, memory)
                for cell in group:
                    document["cells"].append(_measure(world, cell, seconds, chance))
                    todo.remove(cell)
                    _print_cell(document["cells"][-1], len(document["cells"]), len(cells))
    except KeyboardInterrupt:
        document["failed"] = "stopped"
    except RankError as error:
        document["failed"] = str(error).strip()
    document["not_measured"] = [asdict(cell) | {"why": document["failed"]} for cell in todo]
    document |= {"took_s": round(time.monotonic() - began, 1), "created_us": time.time_ns() // 1_000}
    judged = {bar["what"]: {name: bar[name] for name in ("at_most", "found", "met")} for bar in bars(document)}
    return document | {"bars": judged}


def _measure(world: World, cell: Cell, seconds: float, chance: random.Random) -> dict[str, Any]:
    prepared = world.order("prepare", cell=cell)
    once = {way: max(answer["once_s"][way] for answer in prepared) for way in cell.ways}
    batch = 1
    if cell.kind is Kind.ALL_REDUCE:
        batch = min(MOST_BATCH, max(1, math.ceil(SAMPLE_S / max(once[cell.ways[0]], 1e-6))))
    round_s = sum(once.values()) * batch + 0.001
    # The first round warms caches and grows buffers; it is thrown away.
    world.order("rounds", orders=[_order(cell, chance)], batch=batch)
    samples: dict[str, list[list[float]]] = {way.value: [] for way in cell.ways}
    end, done, before = time.monotonic() + seconds, 0, _busy(world.pids)
    more = LEAST_ROUNDS
    while more > 0:
        orders = [_order(cell, chance) for _ in range(min(more, max(1, int(1 / round_s))))]
        for ranks in zip(*world.order("rounds", orders=orders, batch=batch), strict=True):
            for way in cell.ways:
                samples[way.value].append(_together([rank[way] for rank in ranks], batch))
        done += len(orders)
        fitting = min(int((end - time.monotonic()) / round_s), MOST_ROUNDS - done)
        more = max(LEAST_ROUNDS - done, fitting)
    after = _busy(world.pids)
    counts = world.order("count", cell=cell)
    found = asdict(cell) | {
        "buckets": prepared[0]["buckets"],
        "cores": len(os.sched_getaffinity(0)),
        "counts": {way: _total([rank[way] for rank in counts]) for way in counts[0]},
        # Processors that other programs kept busy meanwhile, in the mean.
        "foreign_cpu": round(max(0.0, (after[1] - before[1] - after[2] + before[2]) / (after[0] - before[0])), 3),
        "samples": samples,
        "share": prepared[0]["share"],
        "whole_buckets": prepared[0]["whole_buckets"],
    }
    return found | numbers(found)


def _order(cell: Cell, chance: random.Random) -> list[Way]:
    return chance.sample(cell.ways, len(cell.ways))


def _together(ranks: Sequence[tuple[float, float, float, float]], batch: int) -> list[float]:
    """Return wall, user and system time of all ranks together for one repetition, as exactly as the clocks know it."""
    wall = max(one[1] for one in ranks) - min(one[0] for one in ranks)
    return [round(value / batch, 7) for value in (wall, sum(one[2] for one in ranks), sum(one[3] for one in ranks))]


def _total(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the counts of all ranks added; the number of all-reduces is that of each."""
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return total | {"all_reduces": ranks[0]["all_reduces"]}


def _memory(world: World, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the most that a rank needed beyond what it had, by way and size."""
    found = []
    for size in sizes:
        answers = world.order("memory", ways=list(WAYS[Kind.ALL_REDUCE]), size=size)
        for way in answers[0]:
            extra = max(answer[way] for answer in answers)
            found.append({"bytes": size, "extra_bytes": extra, "ranks": world.size, "way": way.value})
    return found


def _busy(pids: Iterable[int]) -> tuple[float, float, float]:
    """Return now, the busy time of all processors, and that of these processes and ours, in seconds."""
    cpu, ours = psutil.cpu_times(), [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *pids)]
    busy = cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq + cpu.steal
    return time.monotonic(), busy, sum(one.user + one.system for one in ours)


def _print_cell(found: dict[str, Any], number: int, of: int) -> None:
    from benchmarks.collectives.tables import cell_words, ratios

    print(f"{number}/{of}  {cell_words(found)}: {ratios(found)}, {found['rounds']} rounds", flush=True)
