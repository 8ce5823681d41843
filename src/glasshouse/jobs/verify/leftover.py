"""What a runtime that ended without wiping may have left running on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from glasshouse.jobs.owner.files import open_regular
from glasshouse.runtime.confine.mounts import processes_are_visible
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.watchdog.session_record import NAME as SESSION_NAME
from glasshouse.runtime.watchdog.session_record import SessionRecord

# The kernel takes a moment to end a process that was killed, with gigabytes of memory.
_PATIENCE_S = 3.0
_PROC = Path("/proc")
_LOOK_S = 0.05
_MAX_RECORD_BYTES = 256


def survivors(
    scratch: Path, out: Path, *, patience_s: float | None = None, processes: Path = _PROC
) -> list[int] | None:
    """Return the ids of a run's processes that still live; None where that cannot be seen.

    Those of the runtime are found by the folder on their command lines; what a script started, or made of its worker,
    by its session. What it started outside of that is not among them: it can begin a session in a process namespace,
    with which all in it ends, and where no system calls are filtered.

    Args:
        patience_s: how long to wait for the last of them to end; a few seconds when None.
    """
    deadline = time.monotonic() + (_PATIENCE_S if patience_s is None else patience_s)
    while found := _alive(scratch, out, processes):
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    return found


def _alive(scratch: Path, out: Path, processes: Path) -> list[int] | None:
    found, kept = _running(os.fsencode(f"pycache_prefix={scratch}"), processes), _of_session(out / SESSION_NAME)
    return None if found is None or kept is None else sorted({*found, *kept})


def _of_session(record: Path) -> list[int] | None:
    try:
        with open_regular(record) as file:
            return SessionRecord.from_line(file.read(_MAX_RECORD_BYTES)).survivors()
    except FileNotFoundError:
        return []  # it was given nothing, or is gone
    except (OSError, ValueError):
        return None


def _running(argument: bytes, processes: Path) -> list[int] | None:
    try:
        listed = [int(path.name) for path in processes.iterdir() if path.name.isdecimal()]
    except OSError:
        return None
    # `hidepid` hides what is not dumpable also from others of its user: the runtime too.
    hidden = processes == _PROC and os.geteuid() != 0 and not processes_are_visible(REAL.read)
    found = []
    for pid in listed:
        try:
            # A zombie has no command line any more.
            if argument in (processes / str(pid) / "cmdline").read_bytes().split(b"\0"):
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            hidden = True
    return None if hidden and not found else sorted(found)
