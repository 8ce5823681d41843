"""From a calibration to a design: slots and the length of a session (spec/measurement.md, section 7).

Law: all of it is a function of the calibration, the mode and the time that was asked for, so that anyone can compute it
again; every number but the root in T is of whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.workloads.measurement.slots import BLOCK, MAX_SLOT_NS
from glasshouse_bench.artifact import Lifecycle
from glasshouse_bench.design import Design, Mode
from glasshouse_bench.documents import COUNT, NAME, Document, integer, listed

__all__ = ["END_NS", "LEAST_SESSIONS", "Calibrated", "Calibration", "calibrate"]

_ROOT_NS = 1000  # to which the root in T is the same in every language
_STEPS = listed(integer(1), most=65_536)
LEAST_STEPS = 20
_DEVICE_SLOT_NS, _DEVICE_STEPS, _DEVICE_UNCOUNTED = 250_000_000, 5, 2
_SHORT_S, _LONG_S = 5, 30
LEAST_NS = _SHORT_S * 10**9
# Half of a session may be lost before it fails, and what is left should still be several blocks.
LEAST_BLOCKS = 8
# Of a whole process the first five seconds do not count, and half of its time has to.
_LEAST_WHOLE_NS, _LONGEST_WHOLE_NS = 12 * 10**9, 60 * 10**9
LEAST_SESSIONS = {Mode.INTERLEAVED: 6, Mode.NULL: 6, Mode.SEQUENTIAL: 1, Mode.ALTERNATING: 10}
_WANTED_SESSIONS = 20
END_NS = 2 * 10**9  # from the schedule's end until both arms have ended and the note is written


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """What a design takes from a calibration: N counted steps in a slot after uncounted ones, L, and T."""

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
            hint="a step is one of the optimizer, or one call of task.progress; make steps shorter, or measure with "
            "--mode alternating",
        )
    doubled_ns = max(_doubled_median(lengths) for lengths in (raw_ns, protected_ns))
    steps = 5 if doubled_ns < 20_000_000 else 3 if doubled_ns < 100_000_000 else 1
    uncounted = 1
    if device:
        steps, uncounted = max(steps, _DEVICE_STEPS), _DEVICE_UNCOUNTED
    twentieths = max(_q95_twentieths(lengths) for lengths in (raw_ns, protected_ns))
    # ⌈(N + U)·1.2·q⌉, with q in twentieths of a nanosecond.
    slot_ns = -(-(steps + uncounted) * 6 * twentieths // 100)
    slot_ns = max(slot_ns, _DEVICE_SLOT_NS if device else 1_000_000)
    session_ns = round(_session_s(arms, start_s=start_s, between=between) * 1e9)
    if slot_ns > MAX_SLOT_NS or LEAST_BLOCKS * BLOCK * slot_ns > _LONG_S * 10**9:
        raise UsageError(
            Code.USAGE,
            f"steps of {twentieths / 2e10:.1f} s: no session holds {LEAST_BLOCKS} blocks of slots for them",
            hint="make steps shorter (a smaller batch), or measure whole runs with --mode alternating",
        )
    session_ns = max(session_ns, LEAST_BLOCKS * BLOCK * slot_ns)
    return Calibrated(steps=steps, uncounted=uncounted, slot_ns=slot_ns, session_ns=session_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Document):
    """What was found before the designs were sealed; kept, and never pooled with what was measured.

    Args:
        raw_ns, protected_ns: steps without slots, warm-up left out; the first 65,536 of each.
        start_us: of the slower arm, from sealing or launch to its first step.
        between_ppm: the deviation of a session's contrast that no length takes away, as it was taken.
        device: whether the steps ran on a GPU.
        lifecycle, deployment: of the protected run; None where there was none.
    """

    version: Annotated[int, integer(1, 1)] = 1
    raw_ns: Annotated[tuple[int, ...], _STEPS]
    protected_ns: Annotated[tuple[int, ...], _STEPS]
    start_us: Annotated[int, COUNT]
    between_ppm: Annotated[int, COUNT]
    device: bool
    lifecycle: Lifecycle | None = None
    deployment: Annotated[str, NAME] | None = None

    def schedule(self, mode: Mode, asked_s: int) -> dict[str, int]:
        """Return the members of a design that follow from this: its slots, its warm-up and T.

        Raises:
            UsageError: as `calibrate`, or no step at all.
        """
        raw_ns, protected_ns = self.raw_ns, self.protected_ns
        if not raw_ns or not protected_ns:
            raise UsageError(Code.USAGE, "the calibration saw no step of an arm")
        warmup_steps = max(3, -(-(10**9) // _doubled_median(raw_ns)))
        start_ns = 1000 * self.start_us
        if mode.whole:
            room_ns = asked_s * 10**9 // (2 * LEAST_SESSIONS[mode]) - start_ns - END_NS
            length_ns = max(_LEAST_WHOLE_NS, 20 * max(*raw_ns, *protected_ns), min(_LONGEST_WHOLE_NS, room_ns))
            slots = {"slot_ns": 1_000_000, "steps": 64, "uncounted": 1}
        else:
            start_s, between = 2e-6 * self.start_us, self.between_ppm / 1e6
            found = calibrate(raw_ns, protected_ns, start_s=start_s, between=between, device=self.device)
            room_ns = asked_s * 10**9 // _WANTED_SESSIONS - 2 * start_ns - END_NS
            length_ns = max(LEAST_NS, LEAST_BLOCKS * BLOCK * found.slot_ns, min(found.session_ns, room_ns))
            slots = {"slot_ns": found.slot_ns, "steps": found.steps, "uncounted": found.uncounted}
        return slots | {"warmup_steps": warmup_steps, "length_ns": length_ns}

    def check(self, design: Design) -> None:
        """Refuse a design whose schedule does not follow.

        Raises:
            FormatError: `artifact-invalid`.
            UsageError: `usage`, no schedule follows.
        """
        for name, follows in self.schedule(design.mode, design.asked_s).items():
            found = getattr(design, name)
            if abs(found - follows) > (_ROOT_NS if name == "length_ns" else 0):
                raise FormatError(
                    Code.ARTIFACT_INVALID,
                    f"the {design.mode.value} design does not follow from calibration.json: {name} is {found}, and "
                    f"{follows} follows",
                )


def _doubled_median(lengths: Sequence[int]) -> int:
    """Return twice the median, which is a whole number."""
    found = sorted(lengths)
    return found[(len(found) - 1) // 2] + found[len(found) // 2]


def _q95_twentieths(lengths: Sequence[int]) -> int:
    """Return twenty times the quantile of type 7 (as in R and numpy), which is a whole number."""
    found = sorted(lengths)
    place, rest = divmod(19 * (len(found) - 1), 20)
    above = found[min(place + 1, len(found) - 1)]
    return 20 * found[place] + rest * (above - found[place])


def _session_s(arms: Sequence[np.typing.NDArray[np.float64]], *, start_s: float, between: float) -> float:
    # Var(ln of an arm's mean) = (s/mean)²/n for n steps; of T seconds each arm has half, of which n = T/(2·mean).
    within = sum(
        (float(np.std(one, ddof=1)) / float(np.mean(one))) ** 2 * 2 * float(np.mean(one)) / 1e9 for one in arms
    )
    if between <= 0:
        return _LONG_S
    return min(max(math.sqrt(within * start_s) / between, _SHORT_S), _LONG_S)
