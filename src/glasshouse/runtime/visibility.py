"""What other users of the machine see of a run's processes: their command lines and names, unless /proc hides them.

A training script chooses the command lines of what it starts, and its plaintext may be in them. No filter sees what a
pointer leads to, and a process namespace hides what is outside from the worker, not the worker from what is outside.
"""

from __future__ import annotations

from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.mounts import Table

__all__ = ["processes_are_visible"]

_SHOWN = (b"hidepid=0", b"hidepid=off")


def processes_are_visible(kernel: Kernel) -> bool:
    """Return whether /proc, as this process sees it, shows every user the processes of others (proc(5), hidepid)."""
    try:
        mount = Table.read(kernel).at("/proc")
    except (OSError, ValueError):
        return True
    if mount is None or (mount.place, mount.kind) != ("/proc", "proc"):
        return True
    return not any(option.startswith(b"hidepid=") and option not in _SHOWN for option in mount.options)
