"""The sentinel's own side: a loop that looks, and acts on what it sees.

Laws: it holds no descriptor but its own, no capability, and nothing of the agent's; it kills what is traced
before it says so; it leaves when the agent is gone. See `sentinel` for what it is for and what it cannot see.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import time
from enum import StrEnum

from glasshouse.runtime import seccomp
from glasshouse.runtime.kernel import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, Kernel, KernelError

__all__ = ["BEAT_BYTES", "LATE_S", "MESSAGE_BYTES", "REST_PERIOD_S", "STOPPED_AGENT_S", "Alarm", "Watch"]

# A run that is measured rests for as long as the slices of the other side take: mostly less than this.
REST_PERIOD_S = 10.0
# A look that is due in a rest and comes later than this was missed: somebody stopped the sentinel, or starved it.
LATE_S = 4.0

STOPPED_AGENT_S = 5.0
MESSAGE_BYTES = 64
BEAT_BYTES = 8


class Alarm(StrEnum):
    """What the sentinel saw."""

    AGENT_TRACED = "agent-traced"
    WORKER_TRACED = "worker-traced"
    SENTINEL_GONE = "sentinel-gone"


class Watch:
    """One sentinel.

    Args:
        kernel: the kernel.
        agent_pid, agent: whom it watches, by number and by pidfd.
        commands: its end of the socket to the agent.
        alarm: where it writes alarms.
        beat: shared memory for the time of its last look.
    """

    def __init__(
        self, kernel: Kernel, agent_pid: int, agent: int, commands: socket.socket, alarm: int, beat: mmap.mmap
    ) -> None:
        self._kernel, self._agent_pid, self._agent = kernel, agent_pid, agent
        self._commands, self._alarm, self._beat = commands, alarm, beat
        self._worker_pid, self._worker, self._group = 0, -1, False
        self._stopped_since: float | None = None
        self._told: set[Alarm] = set()
        self._files: dict[str, int] = {}
        self._seen: set[int] = set()
        self._own_pid = 0
        self._due_s = 0.0
        # While it rests: how long after waking it looks again, had it not rested.
        self._left_s: float | None = None
        self._missed = False

    def settle(self) -> None:
        """Become small: no descriptors, no capability, no reader."""
        self._own_pid = os.getpid()
        keep = {self._agent, self._commands.fileno(), self._alarm}
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) > 2 and int(name) not in keep:
                _close(int(name))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        for step in (
            lambda: self._kernel.prctl(PR_SET_DUMPABLE, 0),
            lambda: self._kernel.prctl(PR_SET_PDEATHSIG, signal.SIGCONT),  # a stopped sentinel wakes and leaves
            lambda: self._kernel.prctl(PR_SET_NO_NEW_PRIVS, 1),
            self._kernel.drop_capabilities,
            self._filter,
        ):
            try:
                step()
            except KernelError:
                continue  # it watches all the same; what counts is observed on agent and worker

    def serve(self, period_s: float, rest_period_s: float = REST_PERIOD_S) -> None:
        poll = select.poll()
        poll.register(self._commands.fileno(), select.POLLIN)
        poll.register(self._agent, select.POLLIN)
        self._due_s = time.monotonic()
        while True:
            if time.monotonic() >= self._due_s:
                self._note_missed()
                self._tick()
                self._due_s = time.monotonic() + (period_s if self._left_s is None else rest_period_s)
            wait_s = max(0.0, self._due_s - time.monotonic())
            ready = [descriptor for descriptor, _ in poll.poll(wait_s * 1000 + 1)]
            if self._agent in ready or not self._obey(self._commands.fileno() in ready, rest_period_s):
                self._kill_worker()
                return

    def _obey(self, asked: bool, rest_period_s: float) -> bool:
        if not asked:
            return True
        words = self._commands.recv(MESSAGE_BYTES).decode().split()
        if not words:
            return False
        answer = "unknown"
        if words[0] == "watch":
            answer = self._adopt(int(words[1]), words[2] == "1")
        elif words[0] == "look":
            answer = "clean" if self._tick() else "traced"
        elif words[0] == "rest":
            answer = self._rest(rest_period_s)
        elif words[0] == "wake":
            answer = self._wake()
        elif words[0] == "read":
            answer = _read_attempt(int(words[1]))
        self._commands.send(answer.encode())
        return True

    def _rest(self, rest_period_s: float) -> str:
        if self._left_s is None:
            now_s = time.monotonic()
            self._left_s, self._due_s = max(0.0, self._due_s - now_s), now_s + rest_period_s
            self._missed = False
        return "resting"

    def _wake(self) -> str:
        """Look before anything goes on; the next look is due as much later as the rest was long."""
        self._note_missed()
        clean = self._tick()
        if self._left_s is not None:
            self._due_s, self._left_s = time.monotonic() + self._left_s, None
        return "traced" if not clean else "missed" if self._missed else "clean"

    def _note_missed(self) -> None:
        """Keep in mind, until the next rest, that it looked at nobody for longer than a rest allows."""
        if self._left_s is not None and time.monotonic() > self._due_s + LATE_S:
            self._missed = True

    def _adopt(self, pid: int, group: bool) -> str:
        try:
            self._worker = os.pidfd_open(pid)
        except OSError:
            return "gone"
        self._worker_pid, self._group = pid, group
        clean = self._tick()
        return "unseen" if pid not in self._seen else "watching" if clean else "traced"

    def _tick(self) -> bool:
        """Look at everything once; returns whether nobody is traced."""
        if self._worker >= 0 and select.select([self._worker], [], [], 0)[0]:
            os.close(self._worker)  # it has ended, and its number may soon be another's
            self._worker, self._worker_pid = -1, 0
        used: set[str] = set()
        traced, stopped = self._look(used)
        for path in self._files.keys() - used:
            _close(self._files.pop(path))
        if traced:
            self._kill_worker()
            for pid in traced.keys() - {self._agent_pid}:
                _kill(pid)
            in_worker = all(traced.values())
            self._tell(Alarm.WORKER_TRACED if in_worker else Alarm.AGENT_TRACED)
        self._judge_stop(stopped)
        self._beat[:BEAT_BYTES] = time.monotonic_ns().to_bytes(BEAT_BYTES, "big")
        return not traced

    def _judge_stop(self, stopped: bool) -> None:
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        elif time.monotonic() - self._stopped_since > STOPPED_AGENT_S:
            self._kill_worker()
            _send(self._agent)

    def _look(self, used: set[str]) -> tuple[dict[int, bool], bool]:
        """Look at every thread of the agent and of all that descends from it: custodian, worker, its children.

        Args:
            used: receives the paths that were read.

        Returns:
            the traced processes, each with whether it belongs to the worker; whether the agent is stopped.
        """
        traced: dict[int, bool] = {}
        stopped = False
        self._seen = set()
        waiting = [(self._agent_pid, False)]
        while waiting:
            pid, in_worker = waiting.pop()
            try:
                threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
            except OSError:
                continue  # it has ended
            for thread in threads:
                place = f"/proc/{pid}/task/{thread}/"
                status = self._fresh(place + "status", used)
                if status:
                    self._seen.add(pid)
                    if b"\nTracerPid:\t0\n" not in status:
                        traced[pid] = in_worker
                    if pid == self._agent_pid:
                        stopped = stopped or b"\nState:\tT" in status or b"\nState:\tt" in status
                for child in self._fresh(place + "children", used).split():
                    number = int(child)
                    if number != self._own_pid:
                        waiting.append((number, in_worker or number == self._worker_pid))
        return traced, stopped

    def _fresh(self, path: str, used: set[str]) -> bytes:
        """Read a file of /proc whose descriptor is kept open, which halves the cost."""
        descriptor = self._files.get(path, -1)
        try:
            if descriptor < 0:
                descriptor = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            used.add(path)
            return os.pread(descriptor, 4096, 0)
        except OSError:
            _close(self._files.pop(path, -1))
            return b""

    def _kill_worker(self) -> None:
        if self._worker >= 0:
            if self._group:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
                    os.killpg(self._worker_pid, signal.SIGKILL)
            _send(self._worker)

    def _tell(self, alarm: Alarm) -> None:
        if alarm not in self._told:
            self._told.add(alarm)
            os.write(self._alarm, alarm.value.encode() + b"\n")

    def _filter(self) -> None:
        if seccomp.supports(self._kernel.machine):
            program = seccomp.worker(self._kernel.machine, private_root=False, own_session=False)
            seccomp.install(self._kernel, program)


def _read_attempt(pid: int) -> str:
    try:
        os.close(os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return "refused"
    except OSError:
        return "gone"
    return "opened"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _send(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        try:
            os.close(descriptor)
        except OSError:
            return
