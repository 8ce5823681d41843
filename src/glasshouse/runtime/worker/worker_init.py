"""The process above the worker: it runs our code alone, ends with the agent, and takes all of the worker's along.

In a process namespace of its own it is the first process there, so that the kernel ends everything else with it;
elsewhere it ends the worker's group, and is where the kernel leaves orphans (a subreaper). Laws: it is signalled when
the agent ends, and the worker is killed when it does, which the worker's filter does not let it change; it also ends
the worker when the agent has not beaten for a minute, whatever holds it, and for that it opens no file and takes no
memory of which it could be kept; it holds no key, and no descriptor but the agent's pidfd and the socket on which the
agent's beats come and the worker's wait status is written last. Imports are few: nothing is compiled beforehand.
"""

from __future__ import annotations

# The C module beneath `signal`, which costs 40 ms to import without compiled bytecode.
import _signal  # type: ignore[import-not-found]
import os
import select
import time

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import core_dumps, seccomp
from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.worker import SILENT_S, STATUS_BYTES

# A signal that came in the moment before it was listened for would be lost.
_LOOK_S = 1.0
_BEAT_BYTES = 16
_FORWARDED = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2)
_HEARD = (_signal.SIGCHLD, _signal.SIGCONT, *_FORWARDED)


def fork_worker(kernel: Kernel, agent_pid: int, agent: int, answer: int, *, own_namespace: bool) -> None:
    """Become the init, in a child of the agent; return in a child of that, which is to become the worker.

    The pidfd `agent` is closed; the worker's wait status is written to `answer`, 4 bytes big endian.

    Raises:
        OSError: the agent is gone, or (in the worker) the init is.
    """
    init = os.getpid()
    # Without a namespace it has to act, and SIGCONT reaches it even while it is stopped.
    kernel.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL if own_namespace else _signal.SIGCONT)
    # Asked after the signal was set: a parent that ended before left nothing to signal it.
    if _has_ended(agent) or kernel.status("self")["PPid"] != str(agent_pid):
        raise OSError("the agent is gone")
    settled, writer = os.pipe()
    worker = os.fork()
    if worker:
        try:
            os.close(settled)
            _settle(kernel, {agent, answer, writer})
            os.close(writer)
            _serve(worker, agent, answer, own_namespace)
        finally:
            os._exit(0)
    kernel.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL)
    if os.getppid() != init:
        raise OSError("the init is gone")
    for descriptor in (writer, agent):
        os.close(descriptor)
    # The file system changes beneath it next; and what is observed of it later is then so from the start.
    os.read(settled, 1)
    os.close(settled)


def _settle(kernel: Kernel, keep: set[int]) -> None:
    """Become small: no reader, no descriptor, no capability, no terminal."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _HEARD)
    os.setsid()
    os.chdir("/")
    linux.close_all_but(keep)
    core_dumps.limit()
    for step in (
        lambda: kernel.prctl(linux.PR_SET_DUMPABLE, 0),
        lambda: kernel.prctl(linux.PR_SET_CHILD_SUBREAPER, 1),
        kernel.drop_capabilities,
        lambda: kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1),
        lambda: kernel.seccomp(seccomp.worker(kernel.machine, isolated=False)),
    ):
        try:
            step()
        except KernelError:
            continue  # what counts is observed, of this process as of the worker


def _serve(worker: int, agent: int, answer: int, own_namespace: bool) -> None:
    """Reap until the worker has ended, or the agent is gone or silent; leave nothing of the worker's."""
    beats, silent_s, looked_s = False, 0.0, time.monotonic()
    # One child a round: a worker whose orphans end without a pause must not keep the agent's end from being seen.
    while not _has_ended(agent) and silent_s < SILENT_S:
        found = _ended_child()
        if found == worker:
            # Not reaped yet: while its number is its own, so is its group's.
            status = _end_everything(worker, own_namespace)
            os.write(answer, status.to_bytes(STATUS_BYTES, "big"))
            return
        if found is not None:
            os.waitpid(found, 0)
        heard = _signal.sigtimedwait(_HEARD, _LOOK_S if found is None else 0)
        if heard is not None and heard.si_signo in _FORWARDED:
            os.kill(worker, heard.si_signo)
        now_s = time.monotonic()
        if _has_beaten(answer):
            beats, silent_s = True, 0.0
        elif beats:
            # A longer gap was a pause of the whole machine, the agent's too.
            silent_s += min(now_s - looked_s, 2 * _LOOK_S)
        looked_s = now_s
    if not own_namespace:
        _end_everything(worker, own_namespace)  # else the kernel does, with this process


def _end_everything(worker: int, own_namespace: bool) -> int:
    """Kill what is left, reap it, and return the worker's wait status."""
    if own_namespace:
        _kill(worker)
        return os.waitpid(worker, 0)[1]  # the kernel ends the others with this process
    status: int | None = None
    while True:
        if status is None:
            _kill(worker, group=True)
        for child in _children():
            _kill(child)  # an orphan outside the group, where no filter keeps it in
        try:
            pid, found = os.waitpid(-1, 0)
        except ChildProcessError:
            return status or 0
        if pid == worker:
            status = found


def _children() -> list[int]:
    try:
        return [int(word) for word in linux.REAL.read("/proc/thread-self/children").split()]
    except OSError:
        return []


def _ended_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else int(found.si_pid)


def _has_beaten(answer: int) -> bool:
    beaten = False
    while select.select([answer], [], [], 0)[0] and os.read(answer, _BEAT_BYTES):
        beaten = True
    return beaten


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _kill(pid: int, *, group: bool = False) -> None:
    try:
        (os.killpg if group else os.kill)(pid, _signal.SIGKILL)
    except OSError:
        return
