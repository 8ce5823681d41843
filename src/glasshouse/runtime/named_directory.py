"""A directory of the agent's own that other processes could see by name.

It holds the targets of the launcher's trials for a moment; only where no private root can be is it the
worker's workspace. Its name says whose it is, so that the next start removes what a killed agent left.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH102, PTH106, PTH112
from __future__ import annotations

import os

from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.kernel import Kernel

__all__ = ["make", "remove", "sweep"]

_PREFIX = "glasshouse-ws-"


def make(kernel: Kernel, parents: list[str] | None = None) -> str:
    """Make an empty directory, readable by this user alone; in memory where the machine has such a place.

    Raises:
        PlatformError: `platform-unsupported`: there is no place for one.
    """
    name = f"{_PREFIX}{os.getpid()}-{_begun(kernel, str(os.getpid()))}-{os.urandom(8).hex()}"
    for parent in _parents() if parents is None else parents:
        path = f"{parent}/{name}"
        try:
            os.mkdir(path, 0o700)
        except OSError:
            continue
        return path
    raise PlatformError(Code.PLATFORM, "this machine has no directory for a workspace")


def remove(path: str) -> None:
    """Remove such a directory with all that is in it; one that is gone is fine."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError:
        # Only a worker without a private root leaves files here; the module costs 15 ms to import.
        import shutil

        shutil.rmtree(path, ignore_errors=True)


def sweep(kernel: Kernel, parents: list[str] | None = None) -> int:
    """Remove this user's directories whose agent is gone; returns how many those were."""
    removed = 0
    for parent in _parents() if parents is None else parents:
        with os.scandir(parent) as entries:
            left = [entry.path for entry in entries if entry.name.startswith(_PREFIX) and _is_stale(kernel, entry)]
        for path in left:
            remove(path)
            removed += 1
    return removed


def _is_stale(kernel: Kernel, entry: os.DirEntry[str]) -> bool:
    try:
        own = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False
    pid, _, rest = entry.name[len(_PREFIX) :].partition("-")
    return own and rest.partition("-")[0] != _begun(kernel, pid)


def _parents() -> list[str]:
    """Return where such a directory may lie: memory first."""
    return [path for path in ("/dev/shm", os.environ.get("TMPDIR", "/tmp")) if os.path.isdir(path)]  # noqa: S108


def _begun(kernel: Kernel, pid: str) -> str:
    """Return when a process started, in clock ticks, or nothing when there is no such process."""
    try:
        return kernel.read(f"/proc/{int(pid)}/stat").rpartition(b") ")[2].split()[19].decode()
    except (OSError, ValueError, IndexError):
        return ""
