"""From a calibration to a design: slots and the length of a session (spec/measurement.md, section 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from glasshouse.errors import Code, UsageError
from glasshouse.workloads.slots import BLOCK, MAX_SLOT_NS

__all__ = ["LEAST_BLOCKS", "LEAST_NS", "Calibrated", "calibrate"]

LEAST_STEPS = 20
ROOM = 1.2
_DEVICE_SLOT_NS, _DEVICE_STEPS, _DEVICE_UNCOUNTED = 250_000_000, 5, 2
_SHORT_S, _LONG_S = 5, 30
LEAST_NS = _SHORT_S * 10**9
# Half of a session may be lost before it fails, and what is left should still be several blocks.
LEAST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a design takes from a calibration.

    Args:
        steps: N, counted steps in a slot.
        uncounted: steps before them.
        slot_ns: L.
        session_ns: T.
    """

    _: KW_ONLY
    steps: int
    uncounted: int
    slot_ns: int
    session_ns: int


def calibrate(
    raw_ns: Sequence[int], protected_ns: Sequence[int], *, start_s: float, between: float, device: bool = False
) -> Calibrated:
    """Return slots and session length for steps that were timed without slots.

    A session costs its start-up S and its time T, and its contrast has the variance between² + w²/T, where w² is what
    a second of steps leaves: the time to a given interval is least at T = w/between · √S (Kalibera & Jones 2013).

    Args:
        raw_ns, protected_ns: lengths of the calibration's steps, warm-up left out.
        start_s: from starting both arms until both are warm, in seconds.
        between: standard deviation of a session's contrast that no length of it takes away.
        device: whether the steps run on a GPU.

    Raises:
        UsageError: `usage`: too few steps to calibrate from, or steps that no slot can hold.
    """
    arms = [np.asarray(steps, dtype=float) for steps in (raw_ns, protected_ns)]
    if min(len(steps) for steps in arms) < LEAST_STEPS:
        raise UsageError(
            Code.USAGE,
            f"the calibration saw fewer than {LEAST_STEPS} steps of an arm",
            hint="a step is one call of task.progress; make steps shorter, or measure with --mode alternating",
        )
    typical = max(float(np.median(steps)) for steps in arms)
    steps = 5 if typical < 10e6 else 3 if typical < 50e6 else 1
    uncounted = 1
    if device:
        steps, uncounted = max(steps, _DEVICE_STEPS), _DEVICE_UNCOUNTED
    # Type 7, as in R and numpy.
    q95 = max(float(np.quantile(steps, 0.95)) for steps in arms)
    slot_ns = math.ceil((steps + uncounted) * ROOM * q95)
    slot_ns = max(slot_ns, _DEVICE_SLOT_NS if device else 1_000_000)
    session_ns = round(_session_s(arms, start_s=start_s, between=between) * 1e9)
    if slot_ns > MAX_SLOT_NS or LEAST_BLOCKS * BLOCK * slot_ns > _LONG_S * 10**9:
        raise UsageError(
            Code.USAGE,
            f"steps of {q95 / 1e9:.1f} s: no session holds {LEAST_BLOCKS} blocks of slots for them",
            hint="make steps shorter (a smaller batch), or measure whole runs with --mode alternating",
        )
    session_ns = max(session_ns, LEAST_BLOCKS * BLOCK * slot_ns)
    return Calibrated(steps=steps, uncounted=uncounted, slot_ns=slot_ns, session_ns=session_ns)


def _session_s(arms: Sequence[np.typing.NDArray[np.float64]], *, start_s: float, between: float) -> float:
    # Var(ln of an arm's mean) = (s/mean)²/n for n steps; of T seconds each arm has half, of which n = T/(2·mean).
    within = sum(
        (float(np.std(one, ddof=1)) / float(np.mean(one))) ** 2 * 2 * float(np.mean(one)) / 1e9 for one in arms
    )
    if between <= 0:
        return _LONG_S
    return min(max(math.sqrt(within * start_s) / between, _SHORT_S), _LONG_S)
