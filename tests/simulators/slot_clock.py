"""A clock that a test moves, and a worker that trains by it: no time passes but what the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from glasshouse.workloads.measurement.slots import MachineClocks, Pacer, Plan, Stamp

MS = 1_000_000
SEED = bytes(range(32))


def plan(arm: str = "R", **changes: int) -> Plan:
    """Slots of 100 ms with five counted steps, for ten seconds."""
    values = {"slot_ns": 100 * MS, "steps": 5, "uncounted": 1, "warmup_steps": 0, "end_ns": 10_000 * MS} | changes
    return Plan(seed=SEED, arm=arm, **values)


class SlotClock(MachineClocks):
    """All clocks of one machine; `busy` passes processor time, `sleep` does not, `suspend` stops the monotonic one."""

    def __init__(self, now_ns: int = 0, *, oversleep_ns: int = 0) -> None:
        self.now_ns, self.cpu_ns, self.boot_ns, self.real_ns = now_ns, 0, 0, 1_700_000_000_000_000_000
        self.oversleep_ns, self.slept = oversleep_ns, 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def stamp(self) -> Stamp:
        return Stamp(self.now_ns, self.boot_ns, self.cpu_ns, (self.real_ns + self.now_ns) // 1000)

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now_ns += round(seconds * 1e9) + self.oversleep_ns

    def busy(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds
        self.cpu_ns += nanoseconds

    def suspend(self, nanoseconds: int) -> None:
        self.boot_ns += nanoseconds
        self.real_ns += nanoseconds


def train(
    plan: Plan,
    clock: SlotClock,
    steps_ns: Iterable[int],
    *,
    loss: Callable[[int], float | None] = lambda step: 1 / (1 + step),
    before: Callable[[int], object] = lambda step: None,
) -> Pacer:
    """Take steps of these lengths until the schedule's end; `before` may move the clock before a step."""
    pacer = Pacer(plan, clocks=clock, sleep=clock.sleep)
    going_on = pacer.boundary()
    for number, step_ns in enumerate(steps_ns):
        if not going_on:
            return pacer
        before(number)
        clock.busy(step_ns)
        going_on = pacer.boundary(loss(number))
    pacer.stop()
    return pacer
