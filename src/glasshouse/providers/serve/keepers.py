"""What a place shares with the keepers of its runs, and how one is started: as its child, or as one of a job's node."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, PlatformError

KEEPER, ENDED, LOG, ORDER, SCRATCH = "keeper.json", "ended", "runtime.log", "order.json", "empty"
# In the home of a rented machine's user: the nonce that its start command leaves; and the same, once what its run left
# is at the gate (`storing`).
RENTED, STORED = ".glasshouse-rented", ".glasshouse-stored"
START_S = 30.0

_MAX_ANSWER_BYTES = 4096


def started_ticks(pid: int) -> int | None:
    """Return when a process began, in ticks since boot; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@functools.cache
def boot() -> str:
    """Return what changes when the machine is started anew; empty where the kernel does not show it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def relay_of(folder: Path) -> dict[str, Any] | None:
    """Return to which gate a run's calls are carried, as in its order, if any. Raises `OSError`, `ValueError`."""
    try:
        return json.loads((folder / ORDER).read_text()).get("relay")  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None


def listening(path: Path) -> socket.socket:
    """Listen at a socket of this user's alone, in the place of another; raises `OSError`."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux gives the name the socket's mode; the umask is one for all threads.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def start_keeper(folder: Path, command: Sequence[str], launch: bytes, *, holder: Path) -> int:
    """Start a keeper, which starts the runtime; returns the runtime's process id.

    Args:
        launch: the launch file, for the runtime's standard input.
        holder: the socket of what holds this node of a job (node.py), if it is there.

    Raises:
        OSError, PlatformError: it cannot be started.
    """
    argv = [sys.executable, "-I", "-B", "-m", "glasshouse.providers.serve.keeper", str(folder), *command]
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with os.fdopen(ours_out, "wb", buffering=0) as stdin, os.fdopen(ours_in, "rb") as stdout:
        try:
            pid = _spawn(argv, holder, theirs_in, theirs_out)
            keeper = os.pidfd_open(pid)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        try:
            ready, _, _ = select.select([stdout], [], [], START_S)
            pid = _pid_in(stdout.readline() if ready else b"")
            # A pipe holds a whole launch file, so this never waits for its reader.
            with contextlib.suppress(BrokenPipeError):
                stdin.write(launch)
        except PlatformError:
            # Without a launch file a runtime that it may have started ends by itself.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(keeper, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, keeper, os.WEXITED)
            raise
        finally:
            os.close(keeper)
    return pid


def _spawn(argv: list[str], holder: Path, stdin: int, stdout: int) -> int:
    """Start a keeper as a child of this process, or of the one that holds this node of a job; return its process id."""
    if holder.is_socket():  # what this process starts would end with its step
        return _ask_holder(holder, argv, stdin, stdout)
    keeper = subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # it outlives the connection
        umask=0o077,
    )
    # It outlives this process, which does not wait for it.
    keeper.returncode = 0
    return keeper.pid


def _ask_holder(path: Path, argv: list[str], stdin: int, stdout: int) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
        holder.settimeout(START_S)
        holder.connect(str(path))
        socket.send_fds(holder, [json.dumps({"keeper": argv}).encode()], [stdin, stdout])
        return _pid_in(holder.recv(_MAX_ANSWER_BYTES))


def _pid_in(line: bytes) -> int:
    """Return the process id that a keeper named; raises `PlatformError`."""
    try:
        answer = json.loads(line)
        why = answer.get("error", "its keeper did not answer")
        if "pid" in answer:
            return int(answer["pid"])
    except (ValueError, TypeError, AttributeError):
        why = "its keeper did not answer"
    raise PlatformError(Code.PLATFORM, f"the runtime cannot be started there: {why}")
