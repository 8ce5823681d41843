"""A raw worker with a cost that is planted in its steps, to try the harness itself (spec/measurement.md, section 8).

Started as ``python -I -m glasshouse_bench.planted STEP_PPM BUNCHED_NS WORKER-ARGUMENTS…``; what the product runs has no
such place.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from glasshouse.workloads.measurement.measured_steps import MeasuredSteps
from glasshouse.workloads.worker import __main__ as worker

__all__ = ["main", "plant"]

_SECOND_NS = 1_000_000_000


def plant(step_ppm: int, bunched_ns: int) -> None:
    """Let each step of this process last longer.

    Args:
        step_ppm: by which part of itself, in millionths.
        bunched_ns: what is added at once, whenever steps have taken a second.
    """
    boundary = MeasuredSteps.boundary
    began_ns, since_ns = 0, 0

    def longer(self: MeasuredSteps, done: int, loss: Any) -> None:
        nonlocal began_ns, since_ns
        now_ns = time.monotonic_ns()
        took_ns = now_ns - began_ns if began_ns else 0
        since_ns += took_ns
        extra_ns = took_ns * step_ppm // 1_000_000
        if since_ns >= _SECOND_NS and bunched_ns:
            since_ns -= _SECOND_NS
            extra_ns += bunched_ns
        while time.monotonic_ns() < now_ns + extra_ns:
            pass
        boundary(self, done, loss)
        began_ns = time.monotonic_ns()

    MeasuredSteps.boundary = longer  # type: ignore[method-assign]


def main() -> None:
    """Plant what the first two arguments say, and be a worker by the rest."""
    step_ppm, bunched_ns = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    plant(step_ppm, bunched_ns)
    worker.main()


if __name__ == "__main__":
    main()
