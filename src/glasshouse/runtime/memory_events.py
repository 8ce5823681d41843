"""How often the kernel has ended a process for want of memory: told apart from a kill by a person."""

from __future__ import annotations

import os

__all__ = ["oom_kills"]


def oom_kills() -> int:
    """Return how many such ends this process's control group has seen, else the whole machine; 0 if unknown."""
    for path in _counters():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            words = os.read(descriptor, 65536).split()
        finally:
            os.close(descriptor)
        if b"oom_kill" in words[:-1]:
            return int(words[words.index(b"oom_kill") + 1])
    return 0


def _counters() -> list[str]:
    """Return where such a counter may be: control groups of version 2 and 1, then the machine's."""
    found = []
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as groups:  # noqa: PTH123
            for line in groups:
                number, controllers, path = line.rstrip("\n").split(":", 2)
                if number == "0":
                    found.append(f"/sys/fs/cgroup{path}/memory.events")
                elif "memory" in controllers.split(","):
                    found.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    except (OSError, ValueError):
        pass
    return [*found, "/proc/vmstat"]
