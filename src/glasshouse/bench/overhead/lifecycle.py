"""F of ``T_protected(D) = F + (1 + δ)·D``: what protection costs once per run, from starts and receipts.

``F = (start of the protected run − start of the raw one) + seal_outputs + zeroize``, with both starts from launch to
first step. The same is the sum of the six `STEPS` plus a remainder: what else makes a protected run start later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from glasshouse.bench.overhead.interval import Interval, decimal, mean_of
from glasshouse.bench.overhead.notes import SessionNote
from glasshouse.wire.canonical import Json

__all__ = ["STEPS", "Lifecycle", "lifecycle"]

_BEFORE = ("harden", "attest", "release", "open")
_AFTER = ("seal_outputs", "zeroize")
# In the order in which a run goes through them; a receipt's `total` holds the training too.
STEPS = (*_BEFORE, *_AFTER)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """What every run pays, whatever it trains.

    Args:
        steps_s: the median over the sessions of each of `STEPS`, in seconds, by the receipts.
        start_s: the mean over the sessions of the remainder: how much later the protected run was at its first step
            than the raw one, less harden, attest, release and open. Slower imports in the sandbox, its own start;
            below 0 where the raw arm happened to start slowly.
        seconds: F, the mean over the sessions.
        interval: the 95 % Student interval of F over sessions; None with a single one.
        sessions: how many: those in which both arms were seen to start and to end, and every step has a time.
    """

    _: KW_ONLY
    steps_s: Mapping[str, float]
    start_s: float
    seconds: float
    interval: Interval | None
    sessions: int

    @property
    def in_receipts_s(self) -> float:
        """The part of F that is the receipts' word: the mean of the sum of `STEPS`."""
        return self.seconds - self.start_s

    def to_json(self) -> dict[str, Json]:
        return {
            "seconds": decimal(self.seconds),
            "seconds_95": None if self.interval is None else self.interval.to_json(),
            "sessions": self.sessions,
            "start_s": decimal(self.start_s),
            "steps_s": {step: decimal(self.steps_s[step]) for step in STEPS},
        }


def lifecycle(notes: Sequence[SessionNote]) -> Lifecycle | None:
    """Return F from the sessions, or None where none has both starts and a receipt with a time for every step.

    The interval is that of a mean of K ≥ 2 sessions, t with K − 1 degrees of freedom (Student 1908).
    """
    steps: list[dict[str, float]] = []
    costs: list[float] = []
    remainders: list[float] = []
    for note in notes:
        times = note.lifecycle_us or {}
        found = {step: us / 1e6 for step in STEPS if (us := times.get(step)) is not None}
        if note.raw is None or note.protected is None or len(found) < len(STEPS):
            continue
        later = (note.protected.start_ns - note.raw.start_ns) / 1e9
        steps.append(found)
        costs.append(math.fsum((later, *(found[step] for step in _AFTER))))
        remainders.append(math.fsum((later, *(-found[step] for step in _BEFORE))))
    if not costs:
        return None
    return Lifecycle(
        steps_s={step: statistics.median(found[step] for found in steps) for step in STEPS},
        start_s=math.fsum(remainders) / len(remainders),
        seconds=math.fsum(costs) / len(costs),
        interval=mean_of(costs).interval(0.95) if len(costs) > 1 else None,
        sessions=len(costs),
    )
