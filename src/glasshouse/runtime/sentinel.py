"""A process of its own that watches agent and worker for a debugger.

A stopped process cannot notice its own debugger, so a sibling does: every period it reads the TracerPid of
every thread of the agent, of the worker and of all that the worker started. On a tracer it kills the
worker and writes one word to the agent; an agent that stays stopped is killed too, and the worker with it.
It also looks from outside with no capability, as another process of the same user would, which shows what
`dumpable` is worth (`Sentinel.refuses_readers`).

Laws: it is forked before the agent has threads or secrets; it holds no descriptor but its own; its end is
an alarm by itself (`alarm_fd` reaches its end of file); it does not outlive the agent. Reading memory by
root through /proc/PID/mem, and a tracer that comes and goes between two looks, are not noticed.
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

from glasshouse.errors import Code, PlatformError
from glasshouse.runtime import seccomp
from glasshouse.runtime.kernel import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, REAL, Kernel, KernelError

__all__ = ["Alarm", "Sentinel", "start"]

PERIOD_S = 0.4
STOPPED_AGENT_S = 5.0
_ANSWER_S = 5.0
# A machine that was paused as a whole needs a moment until its sentinel has looked again.
_SILENT_S = 3.0
_MESSAGE_BYTES = 64
_BEAT_BYTES = 8


class Alarm(StrEnum):
    """What the sentinel saw."""

    AGENT_TRACED = "agent-traced"
    WORKER_TRACED = "worker-traced"
    SENTINEL_GONE = "sentinel-gone"


class Sentinel:
    """The agent's handle on its sentinel.

    Attributes:
        pid: the sentinel's.
        alarm_fd: readable once there is an alarm; `alarm` says which.
    """

    def __init__(self, pid: int, commands: socket.socket, alarm_fd: int, beat: mmap.mmap, kernel: Kernel) -> None:
        self.pid, self.alarm_fd = pid, alarm_fd
        self._commands, self._beat, self._kernel = commands, beat, kernel
        self._watched: int | None = None
        self._ended = False

    def watch(self, worker_pid: int, *, group: bool = False) -> bool:
        """Let it watch a worker too.

        Args:
            worker_pid: as this process sees it.
            group: whether the worker's process group is killed with it (where no namespace does that).

        Returns:
            whether the sentinel answered that it has read the state of every thread of both, and found no
            tracer.
        """
        watching = self._ask(f"watch {worker_pid} {int(group)}") == "watching"
        self._watched = worker_pid if watching else None
        return watching

    def watching(self, worker_pid: int | None = None) -> bool:
        """Return whether it is there, itself untraced, and has looked at agent (and worker) just now."""
        if worker_pid is not None and worker_pid != self._watched:
            return False
        return self.alive() and self._ask("look") == "clean"

    def refuses_readers(self, pid: int) -> bool | None:
        """Let it try to read a process as any other process of this user could.

        Returns:
            whether the kernel refused; None when it could not be tried.
        """
        return {"refused": True, "opened": False}.get(self._ask(f"read {pid}"))

    def alive(self) -> bool:
        """Return whether it runs, is not traced or stopped, and looked at its wards a moment ago."""
        if self._ended:
            return False
        deadline = time.monotonic() + 2 * PERIOD_S
        while True:
            try:
                status = self._kernel.status(self.pid)
            except OSError:
                return False
            if status.get("TracerPid") != "0" or status.get("State", "Z")[:1] in "TtZX":
                return False
            silent_s = (time.monotonic_ns() - int.from_bytes(self._beat[:_BEAT_BYTES], "big")) / 1e9
            if silent_s < _SILENT_S:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(PERIOD_S / 4)

    def alarm(self) -> Alarm | None:
        """Return what happened when `alarm_fd` is readable; None when nothing did."""
        if not select.select([self.alarm_fd], [], [], 0)[0]:
            return None
        words = os.read(self.alarm_fd, _MESSAGE_BYTES).decode().splitlines()
        return Alarm(words[0]) if words else Alarm.SENTINEL_GONE

    def stop(self) -> None:
        """End it, without an alarm having to be handled; may be called twice."""
        if self._ended:
            return
        self._ended = True
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it was reaped elsewhere
        self._commands.close()
        os.close(self.alarm_fd)
        self._beat.close()

    def _ask(self, request: str) -> str:
        """Return its answer; empty when there is none."""
        if self._ended:
            return ""
        try:
            self._commands.send(request.encode())
            return self._commands.recv(_MESSAGE_BYTES).decode()
        except OSError:
            return ""


def start(agent_pid: int | None = None, *, kernel: Kernel = REAL, period_s: float = PERIOD_S) -> Sentinel:
    """Fork the sentinel of this process, before it has threads or secrets.

    Args:
        agent_pid: the process to watch; this one when None.
        kernel: the kernel.
        period_s: how often it looks.

    Raises:
        PlatformError: `platform-unsupported`: it cannot be started.
    """
    try:
        agent = os.pidfd_open(os.getpid() if agent_pid is None else agent_pid)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alarm, alarm_writer = os.pipe()
        beat = mmap.mmap(-1, mmap.PAGESIZE)
        watched = os.getpid() if agent_pid is None else agent_pid
        pid = os.fork()
    except OSError as error:
        raise PlatformError(Code.PLATFORM, f"no sentinel can be started: {error.strerror}") from error
    if pid == 0:
        _run(_Watch(kernel, watched, agent, theirs, alarm_writer, beat), period_s)
    for descriptor in (agent, alarm_writer):
        os.close(descriptor)
    theirs.close()
    ours.settimeout(_ANSWER_S)
    sentinel = Sentinel(pid, ours, alarm, beat, kernel)
    if sentinel._ask("look") != "clean":
        sentinel.stop()
        raise PlatformError(Code.PLATFORM, "the sentinel cannot read the state of this process, or it is traced")
    return sentinel


def _run(watch: _Watch, period_s: float) -> None:
    """Be the sentinel; never returns."""
    code = 1
    try:
        watch.settle()
        watch.serve(period_s)
        code = 0
    finally:
        os._exit(code)


class _Watch:
    """The sentinel's own side."""

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

    def serve(self, period_s: float) -> None:
        poll = select.poll()
        poll.register(self._commands.fileno(), select.POLLIN)
        poll.register(self._agent, select.POLLIN)
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + period_s
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, due - time.monotonic()) * 1000 + 1)]
            if self._agent in ready or not self._obey(self._commands.fileno() in ready):
                self._kill_worker()
                return

    def _obey(self, asked: bool) -> bool:
        if not asked:
            return True
        words = self._commands.recv(_MESSAGE_BYTES).decode().split()
        if not words:
            return False
        answer = "unknown"
        if words[0] == "watch":
            answer = self._adopt(int(words[1]), words[2] == "1")
        elif words[0] == "look":
            answer = "clean" if self._tick() else "traced"
        elif words[0] == "read":
            answer = _read_attempt(int(words[1]))
        self._commands.send(answer.encode())
        return True

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
        self._beat[:_BEAT_BYTES] = time.monotonic_ns().to_bytes(_BEAT_BYTES, "big")
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
            program = seccomp.worker(self._kernel.machine, named_sockets=False, own_session=False)
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
