"""Whom the kernel ends first where memory runs out: the worker, and not what keeps it.

A score adds thousandths of the memory (of the machine, or of a control group that is full) to what a process has for
itself. Containers are often started with one of up to 1000 (Kubernetes), which everything in them inherits.

Source: proc(5), /proc/PID/oom_score_adj.
"""

from __future__ import annotations

from glasshouse.runtime.kernel import Kernel

__all__ = ["is_low", "lower", "put"]

_FILE = "/proc/self/oom_score_adj"
# The worker has 1000: with 750 a keeper, of some 40 MB, would need a quarter of the memory to be ended before it.
_MOST = 750
_STEP = 50


def put(score: int) -> None:
    """Set this process's score, which all that it starts inherits; raises `OSError`."""
    # pathlib costs 30 ms at every start, when nothing is compiled beforehand.
    with open(_FILE, "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(str(score))


def lower(kernel: Kernel) -> None:
    """Lower this process's score to 0, or as far as is permitted; one below 0 stays.

    Raises:
        OSError: it can be neither read nor set.
    """
    for score in range(0, int(kernel.read(_FILE)), _STEP):
        try:
            put(score)
        except PermissionError:
            continue  # without CAP_SYS_RESOURCE no lower than a process with it has set
        return


def is_low(kernel: Kernel) -> bool:
    """Return whether this process's score leaves a worker with 1000 the first to be ended."""
    try:
        return int(kernel.read(_FILE)) <= _MOST
    except (OSError, ValueError):
        return False
