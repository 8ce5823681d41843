"""What a runtime that ended without wiping may have left on this machine: processes, and workspaces by name."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from glasshouse.runtime import named_directory

__all__ = ["leftovers", "removed", "survivors"]

# The kernel takes a moment to end what it was told to end, with gigabytes of memory.
_PATIENCE_S = 3.0
_LOOK_S = 0.05


def survivors(scratch: Path, *, patience_s: float | None = None, processes: Path = Path("/proc")) -> list[int] | None:
    """Return the processes of a run that still live, by the folder that stands on the command line of each of them.

    Args:
        scratch: the run's `RunFolder.scratch`.
        patience_s: how long to wait for the last of them to end; a few seconds when None.
        processes: where the system lists what runs.

    Returns:
        process ids; None where the system does not list processes. A program that the job's script started, in a
        sandbox without a process namespace, is not among them.
    """
    deadline = time.monotonic() + (_PATIENCE_S if patience_s is None else patience_s)
    while found := _running(os.fsencode(f"pycache_prefix={scratch}"), processes):
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    return found


def _running(argument: bytes, processes: Path) -> list[int] | None:
    try:
        listed = [int(path.name) for path in processes.iterdir() if path.name.isdecimal()]
    except OSError:
        return None
    found = []
    for pid in listed:
        # One that ends while it is looked at has ended, and a zombie has no command line any more.
        with contextlib.suppress(OSError):
            if argument in (processes / str(pid) / "cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return sorted(found)


def leftovers() -> list[Path]:
    """Return this user's workspace folders whose runtime is gone, of whichever run."""
    return [Path(path) for path in named_directory.left()]


def removed(path: Path) -> bool:
    """Remove such a folder with all that is in it; return whether it is gone."""
    return named_directory.remove_left(str(path))
