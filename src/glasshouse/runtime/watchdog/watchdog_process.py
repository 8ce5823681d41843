"""The watchdog's own side: a loop that looks, and acts on what it sees.

Laws: it holds no descriptor but its own, no capability, and nothing of the agent's; it kills what is traced
before it writes the alarm; it leaves when the agent is gone. See `watchdog` for what it cannot see.
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

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import seccomp
from glasshouse.runtime.kernel import Kernel, detach
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.watchdog.process_tree import ProcessTree, TreeState

STOPPED_AGENT_S = 5.0
# A look at thousands of threads takes a while: the watchdog takes a tenth of a core for it at most, and still looks
# more often than the agent demands (`watchdog.SILENT_S`).
_PAUSE_PER_LOOK = 9
_LONGEST_PAUSE_S = 1.5
MESSAGE_BYTES = 64
BEAT_BYTES = 8


class Alarm(StrEnum):
    """What the watchdog saw."""

    AGENT_TRACED = "agent-traced"
    WORKER_TRACED = "worker-traced"
    LOOK_INCOMPLETE = "look-incomplete"
    WATCHDOG_GONE = "sentinel-gone"


class TracerWatch:
    """One watchdog of the process `agent_pid`, whose pidfd is `agent`; made in its own process.

    It writes to `alarm` what it saw, and to `beat`, which is shared memory, the time of its last look.
    """

    def __init__(
        self, kernel: Kernel, agent_pid: int, agent: int, commands: socket.socket, alarm: int, beat: mmap.mmap
    ) -> None:
        self._kernel, self._agent_pid, self._agent = kernel, agent_pid, agent
        self._commands, self._alarm, self._beat = commands, alarm, beat
        # The topmost process of the worker's, its pidfd, and the group that is killed with it: 0 for none.
        self._worker_pid, self._worker, self._group = 0, -1, 0
        self._stopped_since: float | None = None
        self._raised: set[Alarm] = set()
        self._tree = ProcessTree(agent_pid, left_out=os.getpid())
        self._seen: set[int] = set()

    def settle(self) -> None:
        """Give up descriptors, capabilities, and readers of this process."""
        detach({self._agent, self._commands.fileno(), self._alarm})
        signal.set_wakeup_fd(-1)
        for step in (
            lambda: self._kernel.prctl(linux.PR_SET_DUMPABLE, 0),
            lambda: self._kernel.prctl(linux.PR_SET_PDEATHSIG, signal.SIGCONT),  # a stopped watchdog wakes and leaves
            lambda: self._kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1),
            self._kernel.drop_capabilities,
            lambda: self._kernel.seccomp(seccomp.worker(self._kernel.machine, isolated=False)),
        ):
            with contextlib.suppress(KernelError):  # what counts is observed on agent and worker
                step()

    def serve(self, period_s: float) -> None:
        """Look every `period_s`, and answer the agent, until it is gone."""
        poll = select.poll()
        poll.register(self._commands.fileno(), select.POLLIN)
        poll.register(self._agent, select.POLLIN)
        due_s = time.monotonic()
        while True:
            begun_s = time.monotonic()
            if begun_s >= due_s:
                self._tick()
                now_s = time.monotonic()
                due_s = now_s + max(period_s, min(_PAUSE_PER_LOOK * (now_s - begun_s), _LONGEST_PAUSE_S))
            wait_s = max(0.0, due_s - time.monotonic())
            ready = [descriptor for descriptor, _ in poll.poll(wait_s * 1000 + 1)]
            if self._agent in ready or (self._commands.fileno() in ready and not self._obey()):
                self._kill_worker()
                return

    def _obey(self) -> bool:
        words = self._commands.recv(MESSAGE_BYTES).decode().split()
        if not words:
            return False
        answer = "unknown"
        if words[0] == "watch":
            answer = self._adopt(int(words[1]), int(words[2]), int(words[1]) if words[3] == "1" else 0)
        elif words[0] == "look":
            answer = "clean" if self._tick() else "traced"
        elif words[0] == "read":
            answer = _read_attempt(int(words[1]))
        self._commands.send(answer.encode())
        return True

    def _adopt(self, pid: int, top: int, group: int) -> str:
        try:
            self._worker = os.pidfd_open(top)
        except OSError:
            return "gone"
        self._worker_pid, self._group = top, group
        clean = self._tick()
        return "unseen" if not {pid, top} <= self._seen else "watching" if clean else "traced"

    def _tick(self) -> bool:
        """Look at everything once; returns whether none of them is traced."""
        if self._worker >= 0 and select.select([self._worker], [], [], 0)[0]:
            # What is above the worker has ended; a member of its group may not have. While there is one, the group's
            # number is no other's; where there is none, it would have to be given away again since the last look.
            self._kill_worker()
            os.close(self._worker)
            self._worker, self._worker_pid, self._group = -1, 0, 0
        found = self._tree.look(self._worker_pid)
        if not self._is_whole(found):
            self._tree.forget()  # once more, with as many descriptors as it has
            again = self._tree.look(self._worker_pid)
            found.traced |= again.traced
            found.seen, found.complete, found.root_stopped = again.seen, self._is_whole(again), again.root_stopped
        self._seen = found.seen
        if found.traced or not found.complete:
            self._kill_worker()
        if found.traced:
            for pid in found.traced.keys() - {self._agent_pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            in_worker = all(found.traced.values())
            self._raise_alarm(Alarm.WORKER_TRACED if in_worker else Alarm.AGENT_TRACED)
        elif not found.complete:
            self._raise_alarm(Alarm.LOOK_INCOMPLETE)
        self._judge_stop(found.root_stopped)
        self._beat[:BEAT_BYTES] = time.monotonic_ns().to_bytes(BEAT_BYTES, "big")
        return not found.traced and found.complete

    def _is_whole(self, found: TreeState) -> bool:
        """Return whether it read all that lives; agent and worker are gone only when their pidfds are readable."""
        wards = ((self._agent_pid, self._agent), (self._worker_pid, self._worker))
        return found.complete and all(
            pidfd < 0 or pid in found.seen or bool(select.select([pidfd], [], [], 0)[0]) for pid, pidfd in wards
        )

    def _judge_stop(self, stopped: bool) -> None:
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        elif time.monotonic() - self._stopped_since > STOPPED_AGENT_S:
            self._kill_worker()
            _send(self._agent)

    def _kill_worker(self) -> None:
        if self._worker >= 0:
            if self._group:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left in it
                    os.killpg(self._group, signal.SIGKILL)
            _send(self._worker)

    def _raise_alarm(self, alarm: Alarm) -> None:
        if alarm not in self._raised:
            self._raised.add(alarm)
            os.write(self._alarm, alarm.value.encode() + b"\n")


def _read_attempt(pid: int) -> str:
    try:
        os.close(os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return "refused"
    except OSError:
        return "gone"
    return "opened"


def _send(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
