"""How much memory a run may take: what the machine has free, and what every control group above it still allows.

A limit of any ancestor counts, so the least of all is taken. Versions 1 and 2 differ in the names of files.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
from __future__ import annotations

from collections.abc import Iterator

__all__ = ["available_bytes", "ends_together"]

_UNKNOWN_BYTES = 1 << 30
# By kind of mount: limits, usage, and what of the usage is files that nothing needs in memory.
_FILES = {
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def available_bytes(root: str = "") -> int:
    """Return how much memory this process and its children may still take, in bytes.

    Args:
        root: where /proc and /sys lie, for tests.
    """
    least = _UNKNOWN_BYTES
    for line in _lines(root + "/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            least = int(line.split()[1]) * 1024
    return min([least, *_left_by_groups(root)])


def ends_together(root: str = "") -> bool:
    """Return whether the kernel ends this process with the worker where a control group's memory runs out.

    Kubernetes has the kernel do so from 1.28 on, whatever the scores (`memory.oom.group`, version 2).
    """
    return any(_number(f"{folder}/memory.oom.group") == 1 for kind, folder in _groups(root) if kind == "cgroup2")


def _left_by_groups(root: str) -> Iterator[int]:
    for kind, folder in _groups(root):
        limits, usage, cache = _FILES[kind]
        used = _number(f"{folder}/{usage}")
        if used is None:
            continue
        for line in _lines(f"{folder}/memory.stat"):
            if line.startswith(cache + " "):
                used -= int(line.split()[1])
        for limit in limits:
            allowed = _number(f"{folder}/{limit}")
            if allowed is not None:
                yield max(0, allowed - used)


def _groups(root: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and folder of this process's memory group, and of every group above it that is mounted."""
    own = {}
    for line in _lines(root + "/proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            own["cgroup2" if number == "0" else "cgroup"] = path
    for line in _lines(root + "/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _source, options = after.split(" ", 2)
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top, place = before.split(" ")[3:5]
        # In a container the mount may show a part of the tree alone, or the path may lie above it.
        path = own[kind].removeprefix(top.rstrip("/")) if own[kind].startswith(top) else ""
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield kind, "/".join([root + place, *parts[:depth]])


def _number(path: str) -> int | None:
    text = next(_lines(path), "")
    return int(text) if text.isdecimal() else None  # `max` is no limit


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as facts:  # noqa: PTH123
            yield from (line.rstrip("\n") for line in facts)
    except OSError:
        return
