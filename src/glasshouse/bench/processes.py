"""Memory and CPU of a set of processes, read from /proc: what a run costs beside its worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage", "children_of", "cpu_s", "pss_bytes", "usage"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What one process uses now.

    Attributes:
        pss_bytes: proportional set size; None where the kernel does not let us look.
        cpu_s: user and system time since it began.
    """

    pss_bytes: int | None
    cpu_s: float


def usage(pid: int) -> Usage | None:
    """Return what a process uses, or None when it is gone."""
    seconds = cpu_s(pid)
    return None if seconds is None else Usage(pss_bytes=pss_bytes(pid), cpu_s=seconds)


def pss_bytes(pid: int) -> int | None:
    """Return a process's proportional set size in bytes, or None when it cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def cpu_s(pid: int) -> float | None:
    """Return a process's own CPU time in seconds at the kernel's finest grain, or None when it is gone."""
    try:
        # The first number is time on a CPU in nanoseconds; /proc/PID/stat counts in hundredths of a second,
        # more than the budget of a minute.
        total = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9
    except (OSError, ValueError, IndexError):
        return _cpu_ticks(pid)


def children_of(pid: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in " ".join(lists).split():
        yield int(child)
        yield from children_of(int(child))


def _cpu_ticks(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
