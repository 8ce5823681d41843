"""How much memory a run may take, and which process the kernel ends first where it runs out.

A limit of any ancestor among the control groups counts, so the least of all is taken; versions 1 and 2 differ in the
names of files. A score (proc(5), oom_score_adj) adds thousandths of the memory to what a process has for itself;
containers are often started with one of up to 1000 (Kubernetes), which everything in them inherits.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH123
from __future__ import annotations

from collections.abc import Callable, Iterator

_SCORE = "/proc/self/oom_score_adj"
# The worker has 1000: with 750 a keeper, of some 40 MB, would need a quarter of the memory to be ended before it.
_MOST = 750
_STEP = 50

_UNKNOWN_BYTES = 1 << 30
# By kind of mount: limits, usage, and what of the usage is files that nothing needs in memory.
_FILES = {
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}

_EVENTS = {"cgroup": "memory.oom_control", "cgroup2": "memory.events"}


def available_bytes(root: str = "") -> int:
    """Return how many bytes of memory this process and its children may still take; /proc and /sys lie in `root`."""
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
        with open(path, encoding="utf-8", errors="replace") as facts:
            yield from (line.rstrip("\n") for line in facts)
    except OSError:
        return


def put(score: int) -> None:
    """Set this process's score, which all that it starts inherits; raises `OSError`."""
    with open(_SCORE, "w", encoding="ascii") as file:
        file.write(str(score))


def lower(read: Callable[[str], bytes]) -> None:
    """Lower this process's score to 0, or as far as is permitted; one below 0 stays; raises `OSError`."""
    for score in range(0, int(read(_SCORE)), _STEP):
        try:
            put(score)
        except PermissionError:
            continue  # without CAP_SYS_RESOURCE no lower than a process with it has set
        return


def is_low(read: Callable[[str], bytes]) -> bool:
    """Return whether this process's score leaves a worker with 1000 the first to be ended."""
    try:
        return int(read(_SCORE)) <= _MOST
    except (OSError, ValueError):
        return False


def oom_kills() -> int:
    """Return how many processes the kernel has ended for want of memory: in this control group, else on the machine.

    So such an end is not taken for a kill by a person; 0 if unknown.
    """
    for path in _counters():
        words = " ".join(_lines(path)).split()
        if "oom_kill" in words[:-1]:
            return int(words[words.index("oom_kill") + 1])
    return 0


def _counters() -> list[str]:
    return [*(f"{folder}/{_EVENTS[kind]}" for kind, folder in _groups("")), "/proc/vmstat"]


def swap_devices(read: Callable[[str], bytes]) -> int:
    """Return how many swap devices and files this system has; raises `OSError` where that cannot be read."""
    try:
        return len(read("/proc/swaps").splitlines()) - 1
    except FileNotFoundError:
        return 0  # a kernel without swap
