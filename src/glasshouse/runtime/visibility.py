"""What other users of the machine see of a run's processes: their command lines and names, unless /proc hides them.

A training script chooses the command lines of what it starts, and its plaintext may be in them. No filter sees what a
pointer leads to, and a process namespace hides what is outside from the worker, not the worker from what is outside.
"""

from __future__ import annotations

from glasshouse.runtime.kernel import Kernel

__all__ = ["processes_are_visible"]

_SHOWN = ("hidepid=0", "hidepid=off")
_FIELDS = 3  # after the dash: type, source, options


def processes_are_visible(kernel: Kernel) -> bool:
    """Return whether /proc, as this process sees it, shows every user the processes of others (proc(5), hidepid)."""
    try:
        lines = kernel.read("/proc/self/mountinfo").decode(errors="replace").splitlines()
    except OSError:
        return True
    mounts = [line.partition(" - ")[::2] for line in lines]
    at_proc = [system.split() for place, system in mounts if place.split()[4:5] == ["/proc"]]
    if not at_proc or len(at_proc[-1]) != _FIELDS or at_proc[-1][0] != "proc":
        return True
    options = at_proc[-1][-1].split(",")  # of the last one, which lies on top
    return not any(option.startswith("hidepid=") and option not in _SHOWN for option in options)
