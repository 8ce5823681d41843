"""Where the time of a step goes, raw beside protected: one session under a profiler, which enters no estimate."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace

from glasshouse.workloads.measurement.measured_steps import PHASES
from glasshouse.workloads.measurement.slots import MAX_SLOT_NS
from glasshouse_bench.beside import Phase, Phases
from glasshouse_bench.design import Design
from glasshouse_bench.harness.arms import Worker
from glasshouse_bench.harness.session import read, side_by_side
from glasshouse_bench.harness.stage import Stage
from glasshouse_bench.harness.stop import Stop

__all__ = ["PROFILED_STEPS", "phases"]

PROFILED_STEPS = 40
# Before them: few, for one session, and those under a profiler that is cold.
_WARMUP, _COLD = 10, 4
# A step under a profiler takes up to twice as long.
_SLOWER = 2
_ROOM = 1.5


def phases(stage: Stage, design: Design, stop: Stop, *, ready_ns: int) -> Phases | None:
    """Profile some steps of each arm, in slots of their own.

    Args:
        design: of the interleaved part, whose slots these are, made longer.
        ready_ns: from now until both arms are expected to be warm.

    Returns:
        None where an arm took too few steps, or failed, or where nothing in the job names a phase.
    """
    slot_ns = min(_SLOWER * design.slot_ns, MAX_SLOT_NS)
    slots = math.ceil((_WARMUP + _COLD + PROFILED_STEPS) / (design.steps + design.uncounted))
    plan = replace(design.plan(0, "R", end_ns=0), seed=secrets.token_bytes(32), slot_ns=slot_ns, warmup_steps=_WARMUP)

    def make(arm: str, end_ns: int) -> Worker:
        one = stage.protected if arm == "P" else stage.raw
        return one(replace(plan, arm=arm, end_ns=end_ns), profile=PROFILED_STEPS)

    left, _ = side_by_side(make, length_ns=round(_ROOM * 2 * slots * slot_ns), ready_ns=ready_ns, stop=stop)
    records = [read(left[arm]) for arm in ("R", "P")]
    deployment = left["P"].arm.deployment
    raw, protected = (None if record is None else record.profile for record in records)
    if raw is None or protected is None or deployment is None or not {*raw.phases, *protected.phases}:
        return None
    losses = [record.losses[raw.first : raw.first + PROFILED_STEPS] for record in records if record is not None]
    return Phases(
        steps=PROFILED_STEPS,
        raw_ns=raw.together_ns,
        protected_ns=protected.together_ns,
        raw_losses=losses[0],
        protected_losses=losses[1],
        phases=tuple(
            Phase(name=name, raw_ns=raw.phases.get(name, 0), protected_ns=protected.phases.get(name, 0))
            for name in PHASES
            if name in raw.phases or name in protected.phases
        ),
        deployment=deployment,
    )
