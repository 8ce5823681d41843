"""What a place answers at once: about the machine that it is on, and about its runs and uploads (spec/place.md).

Law: nothing is written to the channel here; the longest wait is for a child that looks at the machine or measures it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, PlatformError
from glasshouse.providers.protocol.messages import MAX_RUNS, MAX_VERSIONS, Hello
from glasshouse.providers.serve.keepers import boot
from glasshouse.providers.serve.runs import Runs
from glasshouse.providers.serve.uploads import Uploads
from glasshouse.wire.canonical import Json, encode

_CHILD_S = 60.0
# A page ends behind the name that passes this; the longest name still fits into a message then.
_PAGE_BYTES = 48 << 10
_EXAMINE = (
    "import json; from glasshouse.runtime.run.doctor import examine;"
    "print(json.dumps([(one.consequence, one.feature, one.standing.value, one.value) for one in examine()]))"
)
# What statfs(2) calls file systems that other machines see too.
_SHARED = {
    0x6969: "NFS", 0x517B: "SMB", 0xFE534D42: "SMB", 0xFF534D42: "SMB", 0x5346414F: "AFS", 0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre", 0x47504653: "GPFS", 0x19830326: "BeeGFS",
}  # fmt: skip
_NVIDIA = Path("/proc/driver/nvidia/version")
_MODULE = re.compile(r"Kernel Module\s+(?:for \S+\s+)?([0-9][0-9.]*)")
_ANOTHER = "name a folder on a disk of that machine: glasshouse machine add --folder"
_MEASURE = """
import json
from glasshouse.attestation.measurements.measured import Measured
from glasshouse.attestation.measurements.measurement import measured_files
found = measured_files()
files = {f"{part}/{name}": digest.hex() for part in found for name, digest in found[part].items()}
print(json.dumps({"files": files, "measurement": Measured.of(found).to_json()}))
"""


def answers(folder: Path, runs: Runs, uploads: Uploads) -> dict[str, Callable[..., Any]]:
    """Return what one connection is answered at once.

    Each takes a request's members and returns those of the answer; `OSError` and `GlasshouseError` refuse it.
    """
    measured: tuple[Json, dict[str, bytes]] | None = None

    def measure(after: str | None) -> tuple[dict[str, bytes], Json]:
        nonlocal measured
        if after is None or measured is None:
            measured = _measure(folder)
        measurement, files = measured
        page: dict[str, bytes] = {}
        size = 0
        for name in sorted(files):
            if after is not None and name > after and size < _PAGE_BYTES:
                page[name] = files[name]
                size += len(encode({name: files[name].hex()}))
        return page, measurement

    def stop(run: str, how: str) -> tuple[()]:
        runs[run].stop(signal.SIGTERM if how == "interrupt" else signal.SIGKILL)
        return ()

    def listed(after: str) -> tuple[list[tuple[int | None, str, int]]]:
        later = ((name, run) for name, run in runs if name > after and run.started)
        return ([(run.ended(), name, run.started_us) for name, run in islice(later, MAX_RUNS)],)

    return {
        "hello": lambda: hello(folder),
        "examine": lambda: (_examine(folder),),
        "installed": lambda after: (installed(after, MAX_VERSIONS),),
        "measure": measure,
        "addresses": lambda count, host: (free_addresses(host or reached_at(), count),),
        "has": lambda digest, size: (min(size, uploads.present(digest)),),
        "stop": stop,
        "runs": listed,
    }


def hello(folder: Path) -> Hello:
    """Return what is known without a look; raises `PlatformError` for a folder in which no runs can be kept."""
    _check_folder(folder)
    free = os.statvfs(folder)
    return Hello(
        boot=boot(),
        clock_us=time.time_ns() // 1000,
        free_bytes=free.f_bavail * free.f_frsize,
        machine=platform.machine(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        release=platform.release(),
        system=platform.system(),
    )


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which a run would fail after everything was sent."""
    shared = _SHARED.get(_file_system(folder))
    if shared is not None:
        # The process ids of a run are written there, and name other processes on another machine with the same folder.
        why = f"{folder} there is on {shared}, which other machines see too"
        raise PlatformError(Code.PLATFORM, why, hint=_ANOTHER)
    with tempfile.TemporaryDirectory(dir=folder) as trial:
        file = Path(trial) / "file"
        file.touch()
        try:
            os.link(file, Path(trial) / "link")
        except OSError as error:
            why = f"{folder} there is on a file system without hard links, by which runs keep a package"
            raise PlatformError(Code.PLATFORM, f"{why}: {error.strerror}", hint=_ANOTHER) from None


def _file_system(folder: Path) -> int:
    """Return the type of a folder's file system, as in statfs(2); 0 where that is not known."""
    found = ctypes.create_string_buffer(512)  # the type is a long, at its beginning
    if ctypes.CDLL(None).statfs(os.fsencode(folder), found):
        return 0
    return int.from_bytes(found.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def installed(after: str, most: int) -> dict[str, str]:
    """Return the first names after one, with versions, of what this Python finds, and of ``nvidia-driver``."""
    from importlib import metadata  # 65 ms of e-mail and calendar, once before a run

    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        driver = _MODULE.search(_NVIDIA.read_text())
        found |= {"nvidia-driver": driver[1]} if driver is not None else {}
    for one in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", str(one.metadata["Name"])).lower()
        found.setdefault(name[:128], str(one.version)[:128])
    return dict(sorted((name, version) for name, version in found.items() if name > after)[:most])


def _examine(folder: Path) -> Any:
    """Return consequence, feature, standing and value of each finding of ``glasshouse doctor``."""
    # What it tries cannot be undone, so a child does it. The disk is that of its working folder.
    return _child(_EXAMINE, folder, "the machine cannot be looked at: glasshouse doctor failed there")


def _measure(folder: Path) -> tuple[Json, dict[str, bytes]]:
    """Return the parts of this installation's measurement, and its files: part/name → SHA-256."""
    found = _child(_MEASURE, folder, "the machine's installation of Glasshouse cannot be measured")
    return found["measurement"], {name: bytes.fromhex(digest) for name, digest in found["files"].items()}


def _child(program: str, folder: Path, otherwise: str) -> Any:
    """Run a program of ours in a child and return the JSON that it prints; raises `PlatformError`."""
    command = [sys.executable, "-I", "-B", "-c", program]
    try:
        done = subprocess.run(command, cwd=folder, input=b"", capture_output=True, check=True, timeout=_CHILD_S)
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        raise PlatformError(Code.PLATFORM, otherwise) from None


def reached_at() -> str:
    """Return the address at which the owner's login reached this machine; raises `PlatformError`."""
    # In a Slurm job the environment of the login is the login node's, and the node has the name that Slurm gives it.
    if "SLURMD_NODENAME" in os.environ:
        return os.environ["SLURMD_NODENAME"]
    login = os.environ.get("SSH_CONNECTION", "").split(" ")  # CLIENT PORT SERVER PORT, as sshd leaves it
    if len(login) != 4:
        why = "the address at which others reach this machine is not known"
        raise PlatformError(Code.PLATFORM, why, hint="name it: glasshouse machine add --address")
    return login[2]


def free_addresses(host: str, number: int) -> tuple[str, ...]:
    """Return ports of this machine that are free now, as ``host:port``.

    They are not held until the runtimes listen there. One that is taken meanwhile ends the run, and loses nothing: what
    listens there instead has none of the group's secrets.

    Args:
        host: its name or address, which it need not have itself: others may reach it by a translated one.

    Raises:
        PlatformError: there is none, or no such name.
    """
    with contextlib.ExitStack() as held:
        try:
            family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            sockets = [held.enter_context(socket.socket(family)) for _ in range(number)]
            for one in sockets:
                try:
                    one.bind(where)
                except OSError as error:
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise
                    one.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", 0))  # noqa: S104 - closed unheard
        except OSError as error:
            raise PlatformError(Code.PLATFORM, f"no free port at {host}: {error.strerror}") from None
        named = f"[{host}]" if ":" in host else host
        return tuple(f"{named}:{one.getsockname()[1]}" for one in sockets)
