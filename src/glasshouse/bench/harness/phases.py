"""Measures where a step's time goes, in slices of their own: some with stamps and some without, in either arm.

Laws: nothing of this enters the headline result; every slice stands in the file before the next one begins; a file
that is left behind has a whole block; both arms have ended when this returns, however it returns.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from glasshouse.bench.harness.arms import Runner, process_cpu_ns
from glasshouse.bench.harness.machine import Gpu
from glasshouse.bench.harness.pace import ArmLostError
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.harness.store import append_line, opened
from glasshouse.bench.overhead.design import LEAST_GUARD_NS, LEAST_GUARD_STEPS, SEQUENCES, SLICES_PER_BLOCK, Arm
from glasshouse.bench.overhead.draws import stream
from glasshouse.bench.overhead.phases import Phases, PhaseSlice, analyse_phases
from glasshouse.errors import Code, RunError, UsageError
from glasshouse.task.outputs import MAX_OUTPUTS
from glasshouse.wire import pacing
from glasshouse.wire.pacing import Go

__all__ = ["BLOCKS", "PhaseRun", "PhaseWish", "expected_s", "measure_phases", "order_of"]

BLOCKS = 6
SLICE_S = 0.5
_GUARD_S = 0.35
_LONGEST_SLICE_S = 8.0
_FIRST_LOOK_NS = 300_000_000
_WARMUP_S = 6.0
_PATIENCE_S, _PATIENCE = 300.0, 100.0
_REST = "residual"
_WORKER = b"glasshouse.workloads.worker"
# Adapter, its configuration, and what a job may save beside its checkpoints.
_OTHER_OUTPUTS = 16


@dataclass(frozen=True, slots=True)
class PhaseWish:
    """What was asked for.

    Args:
        seed: 32 bytes; the order of the slices is drawn from them.
        blocks: of four slices each.
        warmup_s: how long the arms alternate before the first of them, at least.
        checkpoint_every: steps between two checkpoints of the job; 0 for one that makes none.
    """

    _: KW_ONLY
    seed: bytes
    blocks: int = BLOCKS
    warmup_s: float = _WARMUP_S
    checkpoint_every: int = 0


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """What a measurement of phases found.

    Args:
        phases: what follows from the slices.
        beside: CPU time over wall time of an arm's processes other than its worker, while the arm runs; an arm is
            missing where the kernel does not say.
        hooks: which part of the protected worker's time passed in its channel and its inputs.
        checkpoints: `none-made`, `measured`, or `none-in-a-slice`.
        ended: why it ended before its last block, or None.
    """

    _: KW_ONLY
    phases: Phases
    beside: Mapping[Arm, float]
    hooks: float
    checkpoints: str
    ended: Code | None


def expected_s(wish: PhaseWish, *, start_s: float, step_s: float) -> float:
    """Return about how long a measurement of phases takes.

    Args:
        wish: what was asked for.
        start_s: from the launch of a raw arm to its first step.
        step_s: time of a step.
    """
    slice_s = max(SLICE_S, step_s) + max(_GUARD_S, LEAST_GUARD_STEPS * step_s)
    return 2 * start_s + 6.0 + wish.warmup_s + (wish.blocks + 1) * SLICES_PER_BLOCK * slice_s


def order_of(seed: bytes, block: int) -> tuple[tuple[Arm, bool], ...]:
    """Return the four slices of a block in their order: whose each is, and whether it is stamped.

    Either arm has one slice of either kind.
    """
    drawn = stream(seed, "phases", 0, block, 1)[0]
    stamped = {Arm.RAW: bool(drawn & 4), Arm.PROTECTED: bool(drawn & 8)}
    found = []
    for arm in map(Arm, SEQUENCES[drawn & 3]):
        found.append((arm, stamped[arm]))
        stamped[arm] = not stamped[arm]
    return tuple(found)


def measure_phases(
    wish: PhaseWish,
    arms: Callable[[Arm], Runner],
    *,
    path: Path,
    gpu: Gpu | None,
    stop: Stop,
    watch: Callable[[str], None] = lambda _what: None,
) -> PhaseRun | None:
    """Start both arms, let them run in, and measure the phases of their steps.

    Args:
        wish: what was asked for.
        arms: makes a fresh arm of either kind.
        path: the file of lines to write; must not be there.
        gpu: whose energy is read.
        stop: ends it early; what is complete is kept.
        watch: told, between slices, what is going on.

    Returns:
        What was found; None when it was stopped before the first whole block, and then there is no file.

    Raises:
        GlasshouseError: an arm failed, the file cannot be written, or the checkpoints of the job are too many.
    """
    session = _Session(wish, arms, gpu=gpu, stop=stop, watch=watch)
    ended: Code | None = None
    descriptor = opened(path)
    try:
        session.run(lambda line: append_line(descriptor, line, path))
    except RunError as error:
        if error.code is not Code.INTERRUPTED:
            raise
        ended = error.code
    finally:
        session.close()
        os.close(descriptor)
        if session.blocks_done == 0:
            path.unlink(missing_ok=True)
    return session.result(ended) if session.blocks_done else None


@dataclass(slots=True)
class _Use:
    """What one arm used beside its worker's own report, added up over slices."""

    wall_ns: int = 0
    beside_ns: int | None = 0
    hooks_ns: int = 0
    slice_ns: int = 0


@dataclass(slots=True)
class _Session:
    """One pair of arms."""

    wish: PhaseWish
    make: Callable[[Arm], Runner]
    _: KW_ONLY
    gpu: Gpu | None
    stop: Stop
    watch: Callable[[str], None]
    blocks_done: int = 0
    slices: list[PhaseSlice] = field(default_factory=list)
    _runners: dict[Arm, Runner] = field(default_factory=dict)
    _done: dict[Arm, int] = field(default_factory=lambda: dict.fromkeys(Arm, 0))
    _used: dict[Arm, _Use] = field(default_factory=lambda: {arm: _Use() for arm in Arm})
    _origin_ns: int = field(default_factory=time.perf_counter_ns)
    _step_ns: float = 0.0

    def run(self, write: Callable[[bytes], None]) -> None:
        for arm in Arm:
            self.watch(f"starting the {_NAMES[arm]} arm")
            self._check_stop()
            # In its place before it starts: what was begun is ended.
            self._runners[arm] = self.make(arm)
            self._runners[arm].start()
        self.watch("warm-up")
        steps = self._warm_up()
        for block in range(self.wish.blocks):
            self.watch(f"block {block + 1} of {self.wish.blocks}")
            self._block(block, steps, write)
            self.blocks_done += 1

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()

    def result(self, ended: Code | None) -> PhaseRun:
        whole = [one for one in self.slices if one.block < self.blocks_done]
        phases = analyse_phases(self.slices)
        made = any("checkpoint" in (one.phases or {}) for one in whole)
        protected = self._used[Arm.PROTECTED]
        return PhaseRun(
            phases=phases,
            beside={
                arm: used.beside_ns / used.wall_ns
                for arm, used in self._used.items()
                if used.beside_ns is not None and used.wall_ns
            },
            hooks=protected.hooks_ns / protected.slice_ns if protected.slice_ns else 0.0,
            checkpoints="measured" if made else "none-in-a-slice" if self.wish.checkpoint_every else "none-made",
            ended=ended,
        )

    def _warm_up(self) -> int:
        """Let the arms alternate, with stamps and without; return how many steps a slice has."""
        began = time.monotonic()
        times: list[float] = []
        while not times or time.monotonic() - began < self.wish.warmup_s:
            for arm in Arm:
                for stamped in (True, False):
                    report = self._report(arm, self._order(stamped, until=0, least_ns=_FIRST_LOOK_NS))
                    times.append((report.t1_ns - report.t0_ns) / report.steps)
        self._step_ns = statistics.median(times[len(times) // 2 :])
        steps = max(1, round(SLICE_S * 1e9 / self._step_ns))
        every = self.wish.checkpoint_every
        if every and every * self._step_ns <= _LONGEST_SLICE_S * 1e9:
            steps = math.ceil(steps / every) * every  # every slice has its checkpoints, and as many as any other
        self._check_outputs(steps)
        return steps

    def _check_outputs(self, steps: int) -> None:
        every = self.wish.checkpoint_every
        if not every:
            return
        in_all = max(self._done.values()) + self.wish.blocks * 2 * (steps + self._guard_steps)
        most = MAX_OUTPUTS - _OTHER_OUTPUTS
        if in_all / every > most:
            raise UsageError(
                Code.USAGE,
                f"this measurement would take {in_all} steps, with {in_all // every} checkpoints; a run keeps {most}",
                hint=f"set checkpoint_every = {math.ceil(in_all / most)} or more in the job, or take fewer --blocks",
            )

    def _block(self, block: int, steps: int, write: Callable[[bytes], None]) -> None:
        turns = dict.fromkeys(Arm, 0)
        begins: list[int] = []
        for position, (arm, stamped) in enumerate(order_of(self.wish.seed, block)):
            turn = turns[arm]
            turns[arm] += 1
            # Where the k-th slices of the block begin: whichever arm comes first decides, and the other follows.
            until = begins[turn] if turn < len(begins) else max(self._done.values()) + self._guard_steps
            one, first_batch = self._slice(arm, block, position, self._order(stamped, until=until, steps=steps))
            if turn == len(begins):
                begins.append(first_batch)
            write(one.encode())
            self.slices.append(one)

    @property
    def _guard_steps(self) -> int:
        return max(LEAST_GUARD_STEPS, math.ceil(_GUARD_S * 1e9 / self._step_ns))

    def _slice(self, arm: Arm, block: int, position: int, order: Go) -> tuple[PhaseSlice, int]:
        runner, used = self._runners[arm], self._used[arm]
        pids = runner.pids()
        others = [pid for pid in pids if not _is_worker(pid)]
        began_ns, cpu_ns = time.perf_counter_ns(), _sum_cpu_ns(others)
        energy = self._energy_mj()
        report = self._report(arm, order)
        spent = _difference(energy, self._energy_mj())
        beside = _difference(cpu_ns, _sum_cpu_ns(others))
        used.wall_ns += time.perf_counter_ns() - began_ns
        used.beside_ns = None if beside is None or used.beside_ns is None else used.beside_ns + beside
        took_ns = report.t1_ns - report.t0_ns
        used.hooks_ns += report.hooks_ns
        used.slice_ns += took_ns
        one = PhaseSlice(
            arm=arm,
            block=block,
            position=position,
            stamped=order.stamps,
            steps=report.steps,
            t0_ns=report.t0_ns,
            t1_ns=report.t1_ns,
            phases=None
            if report.phases is None
            else {name: spent_ns for name, spent_ns in report.phases.items() if name != _REST},
            cpu_ns=report.cpu_ns,
            rss_bytes=_most_rss_bytes([pid for pid in pids if pid not in others]),
            device_bytes=report.device_bytes,
            # The counter is read outside the guard, and only a part of what it shows was used by the slice.
            energy_mj=None if spent is None else spent * took_ns // (took_ns + report.guard_ns),
            wait_ppm=report.wait_ppm,
        )
        return one, report.done_before

    def _report(self, arm: Arm, order: Go) -> pacing.Slice:
        self._check_stop()
        steps = (order.steps or 1) + max(0, order.until - self._done[arm])
        try:
            report = self._runners[arm].pace.slice(order, _PATIENCE_S + _PATIENCE * steps * self._step_ns / 1e9)
        except ArmLostError:
            raise self._runners[arm].why() from None
        if not report.loss_finite:
            raise RunError(Code.NONFINITE_LOSS, f"the loss of the {_NAMES[arm]} arm is not a finite number")
        self._done[arm] = report.done_after
        return report

    def _order(self, stamped: bool, *, until: int, steps: int | None = None, least_ns: int | None = None) -> Go:
        return Go(
            origin_ns=self._origin_ns,
            until=until,
            steps=steps,
            least_ns=least_ns,
            guard_ns=LEAST_GUARD_NS,
            burn_ns=0,
            stamps=stamped,
        )

    def _energy_mj(self) -> int | None:
        return None if self.gpu is None else self.gpu.state().energy_mj

    def _check_stop(self) -> None:
        if self.stop.asked:
            raise RunError(Code.INTERRUPTED, "the measurement was interrupted")


_NAMES = {Arm.RAW: "raw", Arm.PROTECTED: "protected"}


def _is_worker(pid: int) -> bool:
    try:
        return _WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _most_rss_bytes(pids: list[int]) -> int | None:
    """Return the most memory that any of these processes has held so far, or None where the kernel does not say."""
    found = [most for pid in pids if (most := _high_water_bytes(pid)) is not None]
    return max(found, default=None)


def _high_water_bytes(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _sum_cpu_ns(pids: list[int]) -> int | None:
    times = [process_cpu_ns(pid) for pid in pids]
    return None if None in times else sum(one for one in times if one is not None)


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)
