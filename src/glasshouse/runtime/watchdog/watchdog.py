"""A process of its own that watches agent and worker for a debugger.

A stopped process cannot notice its own debugger, so a sibling does: every period it reads the TracerPid of
every thread of the agent, of the worker and of all that the worker started. On a tracer it kills the
worker and writes one word to the agent; an agent that stays stopped is killed too, and the worker with it.
It also looks from outside with no capability, as another process of the same user would, which shows what
`dumpable` is worth (`Watchdog.refuses_readers`).

Laws: it is forked before the agent has threads or secrets; it holds no descriptor but its own; its end is
an alarm by itself (`alarm_fd` reaches its end of file), and the agent looks at it in turn
(`run.interrupts`); it does not outlive the agent. Reading memory by root through /proc/PID/mem, and a tracer that
comes and goes between two looks, are not noticed.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import time

from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.kernel import REAL, Kernel, end_child
from glasshouse.runtime.watchdog.watchdog_process import BEAT_BYTES, MESSAGE_BYTES, Alarm, TracerWatch

PERIOD_S = 0.5
_ANSWER_S = 5.0
# A machine that was paused as a whole needs a moment until its watchdog has looked again.
SILENT_S = 3.0


class Watchdog:
    """The agent's handle on its watchdog; once `alarm_fd` is readable, `alarm` returns which alarm there is."""

    def __init__(self, pid: int, commands: socket.socket, alarm_fd: int, beat: mmap.mmap, kernel: Kernel) -> None:
        self.pid, self.alarm_fd = pid, alarm_fd
        self._commands, self._beat, self._kernel = commands, beat, kernel
        self._watched: int | None = None
        self._ended = False

    def watch(self, worker_pid: int, *, init: int | None = None, group: bool = False) -> bool:
        """Have it watch a worker too; return whether it has read the state of every thread of all, and found no tracer.

        Args:
            init: the process above the worker, which ends after it; None when the worker is this process's own child.
            group: whether the worker's process group is killed with it (where no namespace does that).
        """
        watching = self._ask(f"watch {worker_pid} {init or worker_pid} {int(group)}") == "watching"
        self._watched = worker_pid if watching else None
        return watching

    def watching(self, worker_pid: int | None = None) -> bool:
        """Return whether it is there, itself untraced, and has looked at agent (and worker) just now."""
        if worker_pid is not None and worker_pid != self._watched:
            return False
        return self.alive() and self._ask("look") == "clean"

    def refuses_readers(self, pid: int) -> bool | None:
        """Have it try to read a process as any other process of this user could; return whether the kernel refused.

        None when it could not be tried.
        """
        return {"refused": True, "opened": False}.get(self._ask(f"read {pid}"))

    def alive(self) -> bool:
        """Return whether it runs, is not traced or stopped, and finished a look a moment ago."""
        deadline = time.monotonic() + 2 * PERIOD_S
        while self.untouched():
            if self.silent_s() < SILENT_S:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(PERIOD_S / 4)
        return False

    def untouched(self) -> bool:
        """Return whether it runs, and is neither traced nor stopped; `silent_s` shows whether it still looks."""
        if self._ended:
            return False
        try:
            status = self._kernel.status(self.pid)
        except OSError:
            return False
        return status.get("TracerPid") == "0" and status.get("State", "Z")[:1] not in "TtZX"

    def silent_s(self) -> float:
        """Return how long ago it finished a look at what it watches."""
        if self._ended:
            return math.inf
        return (time.monotonic_ns() - int.from_bytes(self._beat[:BEAT_BYTES], "big")) / 1e9

    def alarm(self) -> Alarm | None:
        """Return what happened when `alarm_fd` is readable; None when nothing did."""
        if not select.select([self.alarm_fd], [], [], 0)[0]:
            return None
        words = os.read(self.alarm_fd, MESSAGE_BYTES).decode().splitlines()
        return Alarm(words[0]) if words else Alarm.WATCHDOG_GONE

    def stop(self) -> None:
        """End it, without an alarm having to be handled; may be called twice."""
        if self._ended:
            return
        self._ended = True
        end_child(self.pid)
        self._commands.close()
        os.close(self.alarm_fd)
        self._beat.close()

    def _ask(self, request: str) -> str:
        """Return its answer; empty when there is none."""
        if self._ended:
            return ""
        try:
            self._commands.send(request.encode())
            return self._commands.recv(MESSAGE_BYTES).decode()
        except OSError:
            return ""


def start(*, kernel: Kernel = REAL, period_s: float = PERIOD_S) -> Watchdog:
    """Fork the watchdog of this process, before it has threads or secrets.

    Raises:
        PlatformError: `platform-unsupported`: it cannot be started.
    """
    watched = os.getpid()
    try:
        agent = os.pidfd_open(watched)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alarm, alarm_writer = os.pipe()
        beat = mmap.mmap(-1, mmap.PAGESIZE)
        pid = os.fork()
    except OSError as error:
        raise PlatformError(Code.PLATFORM, f"no watchdog can be started: {error.strerror}") from error
    if pid == 0:
        code = 1
        try:
            watch = TracerWatch(kernel, watched, agent, theirs, alarm_writer, beat)
            watch.settle()
            watch.serve(period_s)
            code = 0
        finally:
            os._exit(code)
    os.close(agent)
    os.close(alarm_writer)
    theirs.close()
    ours.settimeout(_ANSWER_S)
    watchdog = Watchdog(pid, ours, alarm, beat, kernel)
    if watchdog._ask("look") != "clean":
        watchdog.stop()
        raise PlatformError(Code.PLATFORM, "the watchdog cannot read the state of this process, or it is traced")
    return watchdog
