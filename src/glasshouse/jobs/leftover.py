"""What a runtime that ended without wiping may have left on this machine: processes, and workspaces by name."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["leftovers", "removed", "survivors"]

# As `glasshouse.runtime.named_directory` calls them: the prefix, the process, when it began, random digits.
_PREFIX = "glasshouse-ws-"
_MEMORY = "/dev/shm"  # noqa: S108 - where a runtime makes them first

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


def leftovers(parents: tuple[str, ...] | None = None, processes: Path = Path("/proc")) -> list[Path]:
    """Return this user's workspace folders whose process is gone, of whichever run.

    Args:
        parents: where to look; memory and the folder for temporary files by default.
        processes: where the system lists what runs.
    """
    found: list[Path] = []
    for parent in dict.fromkeys(parents or (_MEMORY, tempfile.gettempdir())):
        # A folder that is not there, or goes while we look, holds nothing.
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            found += [Path(entry.path) for entry in entries if _is_left(entry, processes)]
    return sorted(found)


def removed(path: Path) -> bool:
    """Remove such a folder with all that is in it; return whether it is gone."""
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def _is_left(entry: os.DirEntry[str], processes: Path) -> bool:
    if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
        return False
    pid = entry.name.removeprefix(_PREFIX).partition("-")[0]
    own = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return own and not (pid.isascii() and pid.isdigit() and (processes / pid).exists())
