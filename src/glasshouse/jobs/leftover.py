"""Workspaces by name that a runtime which ended without wiping may have left on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["leftovers", "removed"]

# As `glasshouse.runtime.named_directory` calls them: the prefix, the process, when it began, random digits.
_PREFIX = "glasshouse-ws-"
_MEMORY = "/dev/shm"  # noqa: S108 - where a runtime makes them first


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
