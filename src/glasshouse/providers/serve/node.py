"""Stays on one node of a Slurm job, and starts the keepers of its runs: the job's own step, and no line, holds them.

``hold FOLDER`` makes the place's folder and serves a socket in it until the job ends; ``end FOLDER SECONDS`` asks that
process to end in order. The batch script carries this file as text (slurm.py).

Laws: nothing but the standard library is imported, for nothing else need be there; the socket is this user's alone;
once the end has begun nothing is started; what is in the folder is removed when no keeper works there any more.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Optional

NODE = "node"
_MAX_BYTES = 1 << 16
_POLL_S, _ASKED_S = 0.25, 5.0
# After SIGTERM: Slurm kills what is left after KillWait, 30 s as it comes.
_AFTER_TERM_S = 20.0


class Holder:
    """The keepers of one node; raises `OSError` where the place's folder is there already, or cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._until_s: Optional[float] = None  # noqa: UP045 - evaluated by Python 3.9
        self._asked: set[tuple[int, int]] = set()
        folder.mkdir(mode=0o700)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.umask(0o077)
        self._listener.bind(str(folder / NODE))
        self._listener.listen(16)
        self._listener.settimeout(_POLL_S)

    def hold(self) -> None:
        """Serve until the end was asked for and has come; then remove the folder."""
        signal.signal(signal.SIGTERM, lambda *_: self._end(_AFTER_TERM_S))
        while not self._over():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nothing came within the time
                continue
            with connection:
                connection.settimeout(_ASKED_S)
                try:
                    self._answer(connection)
                except (OSError, ValueError, KeyError, TypeError, IndexError):
                    continue
        self._listener.close()
        elsewhere = self._folder / "sockets-elsewhere"  # where a place with a long name has its sockets
        if elsewhere.is_symlink():
            shutil.rmtree(elsewhere.resolve(), ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self._until_s = until_s if self._until_s is None else min(self._until_s, until_s)

    def _over(self) -> bool:
        self._keepers = [keeper for keeper in self._keepers if keeper.poll() is None]
        if self._until_s is None:
            return False
        self._interrupt()
        # What a run left waits for its owner, who removes it; beneath a keeper nothing is removed.
        return not self._keepers and (time.monotonic() > self._until_s or not self._runs())

    def _runs(self) -> list[Path]:
        return [order.parent for order in (self._folder / "runs").glob("*/order.json")]

    def _interrupt(self) -> None:
        """Ask each runtime once to seal, wipe itself and end."""
        for run in self._runs():
            try:
                keeper = json.loads((run / "keeper.json").read_text())
                runtime = int(keeper["runtime"]), int(keeper["runtime_started"])
                if runtime in self._asked:
                    continue
                descriptor = os.pidfd_open(runtime[0])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            try:
                # The number may have become another process's before it was opened, and not after.
                fields = Path(f"/proc/{runtime[0]}/stat").read_text().rpartition(")")[2].split()
                if int(fields[19]) == runtime[1]:
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                self._asked.add(runtime)
            except OSError:
                continue
            finally:
                os.close(descriptor)

    def _answer(self, connection: socket.socket) -> None:
        request, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, 2)
        try:
            asked = json.loads(request)
            if "end" in asked:
                self._end(float(asked["end"]))
                answer: dict[str, object] = {}
            elif self._until_s is not None:
                answer = {"error": "the job that this node belongs to is ending"}
            else:
                answer = self._start([str(word) for word in asked["keeper"]], *descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.send(json.dumps(answer).encode())

    def _start(self, command: list[str], stdin: int, stdout: int) -> dict[str, object]:
        try:
            keeper = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True
            )
        except OSError as error:
            return {"error": str(error.strerror)}
        self._keepers.append(keeper)
        return {"pid": keeper.pid}


def _ask_to_end(folder: Path, seconds: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
        holder.settimeout(_ASKED_S)
        holder.connect(str(folder / NODE))
        holder.send(json.dumps({"end": seconds}).encode())
        holder.recv(_MAX_BYTES)


def main(arguments: list[str]) -> int:
    """Hold, or ask to end, on this node; its folder has the job's and the node's names below the one that is given."""
    what, folder = arguments[0], Path(arguments[1])
    place = folder / f"glasshouse-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURMD_NODENAME']}"
    try:
        if what == "end":
            _ask_to_end(place, float(arguments[2]))
            return 0
        holder = Holder(place)
    except OSError as error:
        sys.stderr.write(f"{place} on node {os.environ['SLURMD_NODENAME']} cannot be used: {error.strerror or error}\n")
        return 1
    print(f"glasshouse-node {os.environ['SLURMD_NODENAME']} {place}", flush=True)  # noqa: T201 - the job's output
    holder.hold()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
