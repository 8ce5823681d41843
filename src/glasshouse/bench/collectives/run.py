"""Runs the characterisation: worlds of ranks, cells in their order of importance, rounds until the time is used.

Laws: all ways of a cell are sampled in every round, in an order drawn anew from a seed; a cell gets at least
the plan's least rounds or is told as not measured; what was complete when somebody stopped it is kept.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

from glasshouse.bench.collectives.measurement import Measurement, Memory, NotMeasured, Start
from glasshouse.bench.collectives.plan import Plan
from glasshouse.bench.collectives.values import Cell, Counts, Found, Kind, Sample, Way
from glasshouse.bench.collectives.world import World
from glasshouse.bench.harness.machine import describe
from glasshouse.errors import InternalError

__all__ = ["Viewer", "measure"]

MOST_ROUNDS = 150
# A sample shorter than this is mostly the skew of the barrier before it.
SAMPLE_S = 0.004
MOST_BATCH = 32
# A cell that takes no longer is measured even where no time is left.
ALWAYS_S = 2.0
_ORDER_S = 600.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Viewer(Protocol):
    """Somebody who looks on."""

    def world(self, ranks: int) -> None:
        """Processes are started."""

    def cell(self, cell: Cell, number: int, of: int) -> None:
        """A cell begins."""

    def rounds(self, done: int, seconds_left: float) -> None:
        """Rounds of the cell were done."""

    def found(self, found: Found) -> None:
        """A cell is complete."""

    def skipped(self, one: NotMeasured) -> None:
        """A cell was left out."""

    def doing(self, what: str) -> None:
        """Something else begins."""


@dataclass(slots=True)
class _Run:
    """What a run has so far."""

    _: KW_ONLY
    plan: Plan
    viewer: Viewer
    stopped: Callable[[], bool]
    end: float
    random: random.Random
    found: list[Found]
    skipped: list[NotMeasured]
    failure: InternalError | None = None


def measure(plan: Plan, viewer: Viewer, *, stopped: Callable[[], bool] = lambda: False) -> Measurement:
    """Measure what a plan says.

    Args:
        plan: cells, time and seed.
        viewer: is told what happens.
        stopped: says whether to stop; what is complete is kept.

    Raises:
        InternalError: a rank failed, or a way gave a wrong sum, before any cell was complete.
    """
    began = time.monotonic()
    run = _Run(
        plan=plan,
        viewer=viewer,
        stopped=stopped,
        end=began + plan.time_s,
        random=random.Random(plan.seed),  # noqa: S311 - the order of samples is no secret
        found=[],
        skipped=[],
    )
    memory: list[Memory] = []
    start: Start | None = None
    try:
        for ranks, cells in itertools.groupby(plan.cells, key=lambda cell: cell.ranks):
            memory += _in_world(run, ranks, list(cells))
        if plan.start_ranks:
            start = _start(run, plan.start_ranks)
    except KeyboardInterrupt:
        _leave_out(run, plan.cells, "stopped")
    return Measurement(
        system=dict(describe(None)),
        found=tuple(run.found),
        not_measured=tuple(run.skipped),
        memory=tuple(memory),
        start=start,
        seed=plan.seed,
        quick=plan.quick,
        failed=None if run.failure is None else run.failure.message,
        took_s=round(time.monotonic() - began, 1),
        created_us=time.time_ns() // 1_000,
    )


def _in_world(run: _Run, ranks: int, cells: Sequence[Cell]) -> list[Memory]:
    """Start the ranks once, look at memory while nothing else was exchanged, then measure every cell."""
    run.viewer.world(ranks)
    ways = tuple(dict.fromkeys(way for cell in cells for way in cell.ways))
    memory: list[Memory] = []
    try:
        with World(ranks, ways, stopped=run.stopped) as world:
            memory = _memory(run, world, [way for way in ways if way is not Way.ALONE])
            for cell in cells:
                if run.stopped():
                    raise KeyboardInterrupt
                left = run.plan.share_s(cell, run.end - time.monotonic())
                run.viewer.cell(cell, run.plan.cells.index(cell) + 1, len(run.plan.cells))
                _measure_cell(run, world, cell, left)
    except InternalError as error:
        # What other cells gave stands; without any of them the reason is all there is to tell.
        if not run.found:
            raise
        run.failure = error
        _leave_out(run, cells, f"{error.message}: {error.hint.splitlines()[-1] if error.hint else error.code}"[:200])
    return memory


def _leave_out(run: _Run, cells: Sequence[Cell], why: str) -> None:
    """Say of every cell that has no numbers yet why it will have none."""
    done = {found.cell for found in run.found} | {one.cell for one in run.skipped}
    for cell in cells:
        if cell not in done:
            run.skipped.append(NotMeasured(cell=cell, why=why))
            run.viewer.skipped(run.skipped[-1])


def _measure_cell(run: _Run, world: World, cell: Cell, share_s: float) -> None:
    begin = time.monotonic()
    prepared = world.order("prepare", timeout_s=_ORDER_S, cell=cell.to_json())
    once = {way: max(answer["once_s"][way.value] for answer in prepared) for way in cell.ways}
    left = share_s - (time.monotonic() - begin)
    batch = 1
    if cell.kind is Kind.ALL_REDUCE:
        batch = min(MOST_BATCH, max(1, math.ceil(SAMPLE_S / max(once[cell.ways[0]], 1e-6))))
    least = run.plan.least_rounds
    turn_s = sum(once.values()) * batch + 0.001
    if turn_s * least > max(3 * share_s, ALWAYS_S) and not run.plan.needed(cell):
        why = f"{least} rounds would take {turn_s * least:.0f} s"
        run.skipped.append(NotMeasured(cell=cell, why=why))
        run.viewer.skipped(run.skipped[-1])
        world.order("drop", timeout_s=_ORDER_S)
        return
    samples, foreign = _rounds(run, world, cell, batch=batch, seconds=left, turn_s=turn_s)
    counts = world.order("count", timeout_s=_ORDER_S)
    world.order("drop", timeout_s=_ORDER_S)
    first = prepared[0]
    found = Found(
        cell=cell,
        samples=samples,
        counts=_sum_counts([answer["counts"] for answer in counts], first["buckets"]),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        share=first["share"],
        buckets=tuple(first["buckets"]),
        whole_buckets=first["whole_buckets"],
        foreign_cpu=foreign,
    )
    run.found.append(found)
    run.viewer.found(found)


def _rounds(
    run: _Run, world: World, cell: Cell, *, batch: int, seconds: float, turn_s: float
) -> tuple[dict[Way, list[Sample]], float | None]:
    """Do rounds until the time is used; return the samples, and how many processors others kept busy meanwhile."""
    # The first round goes to warm caches and grow buffers; it is thrown away.
    world.order("rounds", timeout_s=_ORDER_S, orders=[_turn(run, cell)], batch=batch)
    samples: dict[Way, list[Sample]] = {way: [] for way in cell.ways}
    end, done, more = time.monotonic() + seconds, 0, run.plan.least_rounds
    before = _busy(world.pids)
    while more > 0:
        orders = [_turn(run, cell) for _ in range(min(more, max(1, int(1 / turn_s))))]
        answers = world.order("rounds", timeout_s=_ORDER_S, orders=orders, batch=batch)
        for way in cell.ways:
            samples[way] += _merge([answer["samples"][way.value] for answer in answers], batch)
        done += len(orders)
        left = end - time.monotonic()
        run.viewer.rounds(done, max(0.0, left))
        more = max(run.plan.least_rounds - done, min(int(left / turn_s), MOST_ROUNDS - done))
    return samples, _foreign(before, _busy(world.pids))


def _turn(run: _Run, cell: Cell) -> list[str]:
    turn = [way.value for way in cell.ways]
    run.random.shuffle(turn)
    return turn


def _merge(ranks: Sequence[Sequence[Sequence[float]]], batch: int) -> list[Sample]:
    """Return the samples of all ranks together, for one repetition each, as exactly as the clocks know them."""
    return [
        Sample(
            wall_s=round((max(one[1] for one in times) - min(one[0] for one in times)) / batch, 7),
            user_s=round(sum(one[2] for one in times) / batch, 7),
            system_s=round(sum(one[3] for one in times) / batch, 7),
        )
        for times in zip(*ranks, strict=True)
    ]


def _sum_counts(ranks: Sequence[Mapping[str, Mapping[str, float]]], buckets: Sequence[int]) -> dict[Way, Counts]:
    found = {}
    for name in ranks[0]:
        total: dict[str, float] = {}
        for member in ranks[0][name]:
            total[member] = sum(rank[name][member] for rank in ranks)
        total["all_reduces"] = ranks[0][name]["all_reduces"]
        found[Way(name)] = Counts(**total)
    if buckets and Way.RAW not in found:
        found[Way.RAW] = Counts(all_reduces=len(buckets))
    return found


def _memory(run: _Run, world: World, ways: Sequence[Way]) -> list[Memory]:
    found = []
    for bytes_ in run.plan.memory_bytes:
        run.viewer.doing(f"peak memory of an all-reduce of {bytes_ >> 20} MiB, {world.size} ranks")
        answers = world.order("memory", timeout_s=_ORDER_S, bytes=bytes_, ways=[way.value for way in ways])
        for way in ways:
            extras = [answer["extra_bytes"][way.value] for answer in answers]
            if None not in extras:
                found.append(Memory(way=way, ranks=world.size, bytes=bytes_, extra_bytes=max(extras)))
    return found


def _start(run: _Run, ranks: int) -> Start:
    run.viewer.doing(f"start-up of a group of {ranks} ranks")
    with World(ranks, (), stopped=run.stopped) as world:
        answers = world.order("start", timeout_s=_ORDER_S, repeats=run.plan.start_repeats)
    times = {
        name: tuple(
            round(max(one[1] for one in each) - min(one[0] for one in each), 6)
            for each in zip(*(answer["times"][name] for answer in answers), strict=True)
        )
        for name in ("raw", "sealed")
    }
    return Start(ranks=ranks, raw_s=times["raw"], sealed_s=times["sealed"])


def _busy(pids: Iterable[int]) -> tuple[float, float, float] | None:
    """Return now, the busy time of all processors, and that of these processes and ours, in seconds."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        ours = sum(os.times()[:2])
        for pid in pids:
            after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ours += (int(after[11]) + int(after[12])) / _TICKS_PER_S
    except (OSError, ValueError, IndexError):
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = fields
    return time.monotonic(), (user + nice + system + irq + soft + steal) / _TICKS_PER_S, ours


def _foreign(before: tuple[float, float, float] | None, after: tuple[float, float, float] | None) -> float | None:
    if before is None or after is None or after[0] <= before[0]:
        return None
    others = (after[1] - before[1]) - (after[2] - before[2])
    return max(0.0, others / (after[0] - before[0]))
