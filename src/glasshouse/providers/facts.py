"""What a place can say of the machine that it is on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from glasshouse.errors import Code, PlatformError
from glasshouse.wire.canonical import Json

__all__ = ["examine", "hello", "reached_at"]

_EXAMINE_S = 60.0
_EXAMINE = (
    "import json; from glasshouse.runtime.doctor import examine;"
    "print(json.dumps([finding.to_json() for finding in examine()]))"
)


def hello(folder: Path) -> dict[str, Json]:
    """Return what is known without a look; `boot` changes when the machine is started anew.

    Args:
        folder: the place's, on whose disk packages and outputs lie.
    """
    free = os.statvfs(folder)
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "clock_us": time.time_ns() // 1000,
        "free_bytes": free.f_bavail * free.f_frsize,
        "machine": platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "release": platform.release(),
        "system": platform.system(),
    }


def examine(folder: Path) -> Json:
    """Return what `glasshouse doctor` finds, as JSON; raises `PlatformError`."""
    command = [sys.executable, "-I", "-B", "-c", _EXAMINE]
    try:
        # A program of its own: what it tries cannot be undone. The disk is that of its working folder.
        found = subprocess.run(
            command, cwd=folder, capture_output=True, check=True, timeout=_EXAMINE_S, stdin=subprocess.DEVNULL
        ).stdout
        findings: Json = json.loads(found)
    except (subprocess.SubprocessError, ValueError):
        raise PlatformError(Code.PLATFORM, "the machine cannot be looked at: glasshouse doctor failed there") from None
    return findings


def reached_at() -> str:
    """Return the address at which the owner's login reached this machine; raises `PlatformError`."""
    login = os.environ.get("SSH_CONNECTION", "").split(" ")  # CLIENT PORT SERVER PORT, as sshd leaves it
    if len(login) != 4:
        raise PlatformError(
            Code.PLATFORM,
            "this machine does not know at which address others reach it",
            hint="name it: glasshouse machine add --address",
        )
    return login[2]
