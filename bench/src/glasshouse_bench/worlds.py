"""Simulated machines with a known cost of protection, on which the estimate is tried before it is believed.

Many sessions at once follow the real schedule, slot by slot, with steps whose lengths are drawn; what comes out are
step records as a pacer would have kept them. A test takes the same steps through the real pacer and compares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glasshouse.workloads.measurement.slots import BLOCK, order_of
from glasshouse_bench.records import Steps
from glasshouse_bench.sessions import Blocks, blocks_of

__all__ = ["WORLDS", "Simulated", "World", "simulate"]

Reals = NDArray[np.float64]

STEP_NS = 8_000_000
STEPS, UNCOUNTED = 5, 1
IN_SLOT = STEPS + UNCOUNTED
SLOT_NS = 70_000_000  # six steps, with room, as a calibration of such steps would have it
_GRID_NS = 10_000_000  # of the machine's common noise


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A machine, and what protection costs on it.

    Args:
        planted: the steady part of the cost, as a part of a raw step.
        bunched_ns: what protection takes at once, after each second that the protected worker has run.
        white: deviation of each step's logarithm, raw and protected, at equal means.
        pink: deviation of the machine's common 1/f noise over a session.
        drift: by how much the machine slows down over a session.
        jumps: deviation of the machine's speed between sudden changes, one in about two seconds.
        stall_rate, stall_ns: stalls in a second of running, and their mean length (exponential).
        cold: how many times as long the first steps of a slot take.
        pair: deviation of the log ratio that a pair of processes has of its own.
        contention: how much longer a step takes for each second in which the other arm runs too: 1 on shared cores.
    """

    planted: float = 0.01
    bunched_ns: int = 0
    white: tuple[float, float] = (0.03, 0.03)
    pink: float = 0.0
    drift: float = 0.0
    jumps: float = 0.0
    stall_rate: float = 0.0
    stall_ns: float = 0.0
    cold: tuple[float, ...] = (1.4, 1.03)
    pair: float = 0.0
    contention: float = 0.0

    @property
    def truth(self) -> float:
        """ln(T_protected/T_raw) of a long session of a typical pair."""
        return float(np.log(1 + self.planted + self.bunched_ns / 1e9))


WORLDS: dict[str, World] = {
    "quiet": World(),
    "1/f noise": World(pink=0.08),
    "drift": World(drift=0.15, pink=0.03),
    "steps": World(jumps=0.1),
    "stalls": World(stall_rate=0.5, stall_ns=30e6),
    "bunched cost": World(planted=0.0, bunched_ns=20_000_000),
    "bunched cost, shared cores": World(planted=0.0, bunched_ns=20_000_000, contention=1.0),
    "unequal jitter": World(white=(0.02, 0.25)),
    "cold steps": World(cold=(1.6, 1.15, 1.06, 1.02)),
    "pair effects": World(pair=0.02),
    "all together": World(
        bunched_ns=5_000_000,
        white=(0.03, 0.12),
        pink=0.06,
        drift=0.05,
        jumps=0.05,
        stall_rate=0.3,
        stall_ns=20e6,
        cold=(1.5, 1.08, 1.02),
        pair=0.015,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """Sessions of one world, in step with each other.

    Args:
        seeds: of their schedules.
        begin, end: of each step that a slot may hold, of shape (slots, steps of a slot, sessions); −1 where none was.
        protected: whether the slot is the protected arm's, of shape (slots, sessions).
    """

    seeds: tuple[bytes, ...]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    protected: NDArray[np.bool_]

    def steps(self, session: int) -> tuple[Steps, Steps]:
        """Return the steps of one session, raw and protected."""
        begin, end = self.begin[:, :, session], self.end[:, :, session]
        taken = begin >= 0
        arms = []
        for arm in (False, True):
            mine = taken & (self.protected[:, session] == arm)[:, None]
            slot, index = np.nonzero(mine)
            arms.append(Steps(slot=slot, index=index, begin=begin[mine], end=end[mine]))
        return arms[0], arms[1]

    def blocks(self, session: int) -> Blocks:
        """Return the sums of one session over all its blocks but the first, as the analysis takes them."""
        raw, protected = self.steps(session)
        kept = np.ones(len(self.protected) // BLOCK - 1, dtype=bool)
        return blocks_of(raw, protected, uncounted=UNCOUNTED, first=1, kept=kept)[0]


def simulate(world: World, *, sessions: int, length_s: float, rng: np.random.Generator) -> Simulated:
    """Return sessions of one world.

    Args:
        length_s: of each, in seconds; whole blocks of it are simulated.
    """
    blocks = int(length_s * 1e9) // (BLOCK * SLOT_NS)
    slots = blocks * BLOCK
    seeds = tuple(rng.bytes(32) for _ in range(sessions))
    orders = np.array([[arm == "P" for block in range(blocks) for arm in order_of(seed, block)] for seed in seeds])
    protected = orders.T
    speed = _speed(world, slots, sessions, rng)
    pair = np.exp(rng.normal(0, world.pair, sessions))
    ratio = np.stack([np.ones(sessions), (1 + world.planted) * pair])
    begin = np.full((slots, IN_SLOT, sessions), -1, dtype=np.int64)
    end = begin.copy()
    machine = _Machine(world, sessions, rng)
    for slot in range(slots):
        arm = protected[slot].astype(int)
        now = np.maximum(machine.now[arm, machine.all], slot * SLOT_NS)
        going_on = np.ones(sessions, dtype=bool)
        for index in range(IN_SLOT):
            going_on = going_on & (now < (slot + 1) * SLOT_NS)
            cold = world.cold[index] if index < len(world.cold) else 1.0
            grid = np.minimum(now // _GRID_NS, len(speed) - 1)
            common = STEP_NS * cold * speed[grid, machine.all] * ratio[arm, machine.all]
            ended = machine.step(arm, now, common, going_on, end)
            begin[slot, index] = np.where(going_on, now, -1)
            end[slot, index] = np.where(going_on, ended, -1)
            machine.took(arm, going_on, ended, slot * IN_SLOT + index)
            now = ended
    return Simulated(seeds=seeds, begin=begin, end=end, protected=protected)


class _Machine:
    """What many sessions have done so far: when each arm's last step ended, which it was, and how long it has run."""

    def __init__(self, world: World, sessions: int, rng: np.random.Generator) -> None:
        self._world, self._rng = world, rng
        self.all = np.arange(sessions)
        self.now = np.zeros((2, sessions), dtype=np.int64)
        self._last = np.full((2, sessions), -1, dtype=np.int64)
        self._ran = np.zeros((2, sessions))
        self._ran[1] = rng.uniform(0, 1e9, sessions)  # the phase of what comes once a second

    def step(
        self,
        arm: NDArray[np.int64],
        now: NDArray[np.int64],
        common: Reals,
        going_on: NDArray[np.bool_],
        ends: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return when a step that begins now ends; a step of the other arm that is still going on takes longer too."""
        world, rng = self._world, self._rng
        white = np.asarray(world.white)[arm]
        length = common * np.exp(rng.standard_normal(len(now)) * white - white**2 / 2)
        if world.bunched_ns:
            before = self._ran[arm, self.all]
            due = (arm == 1) & (np.floor((before + common) / 1e9) > np.floor(before / 1e9))
            self._ran[arm, self.all] += np.where(going_on, common, 0)
            length = length + due * world.bunched_ns
        if world.stall_rate:
            stalled = rng.random(len(now)) < common / 1e9 * world.stall_rate
            length = length + stalled * rng.exponential(world.stall_ns, len(now))
        lasts: NDArray[np.int64] = np.maximum(length, 1000).astype(np.int64)
        if world.contention:
            other = 1 - arm
            both = np.clip(self.now[other, self.all] - now, 0, lasts)
            longer = np.where(going_on, (world.contention * both).astype(np.int64), 0)
            lasts = lasts + longer
            self.now[other, self.all] += longer
            hit = np.flatnonzero(longer)
            flat = ends.reshape(-1, len(now))
            flat[self._last[other[hit], hit], hit] += longer[hit]
        return now + lasts

    def took(self, arm: NDArray[np.int64], going_on: NDArray[np.bool_], ended: NDArray[np.int64], number: int) -> None:
        """Note the step for those sessions that took it."""
        self.now[arm[going_on], self.all[going_on]] = ended[going_on]
        self._last[arm[going_on], self.all[going_on]] = number


def _speed(world: World, slots: int, sessions: int, rng: np.random.Generator) -> Reals:
    """Return by what a step's length is multiplied at each point of the grid, of shape (points, sessions)."""
    points = slots * SLOT_NS // _GRID_NS + 1
    log = np.linspace(0, world.drift, points)[:, None] * np.ones(sessions)
    if world.pink:
        # Power falls as 1/f: equal deviation in each octave of slot lengths.
        half = points // 2 + 1
        scale = np.r_[0.0, 1 / np.sqrt(np.arange(1, half))][:, None]
        spectrum = scale * (rng.standard_normal((half, sessions)) + 1j * rng.standard_normal((half, sessions)))
        noise = np.fft.irfft(spectrum, n=points, axis=0)
        log = log + world.pink * noise / noise.std(axis=0)
    if world.jumps:
        which = np.cumsum(rng.random((points, sessions)) < _GRID_NS / 2e9, axis=0, dtype=np.int64)
        log = log + rng.normal(0, world.jumps, (int(which.max()) + 1, sessions))[which, np.arange(sessions)]
    return np.exp(log)
