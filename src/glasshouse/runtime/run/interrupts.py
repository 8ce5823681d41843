"""What ends a run from outside: the watchdog's alarms, signals, and an agent that was kept from running."""

from __future__ import annotations

import os
import signal
from functools import partial

from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.runtime.run.run_state import Run
from glasshouse.runtime.watchdog.heartbeat import Heartbeat
from glasshouse.runtime.watchdog.watchdog import PERIOD_S
from glasshouse.runtime.watchdog.watchdog_process import Alarm
from glasshouse.runtime.worker.worker_init import SILENT_S
from glasshouse.runtime.worker.worker_session import Stage

_STOP_GRACE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What the agent itself notices is never explained away by an interruption that came before it.
_OURS = (Code.DEBUGGER, Code.LEASE_LOST, Code.DISK_FULL)


def install_interrupts(run: Run) -> None:
    """Watch for alarms of the watchdog, and for requests to end the run."""
    if run.processes.watchdog is not None:
        run.loop.watch(run.processes.watchdog.alarm_fd, partial(_read_alarm, run))
        gone = partial(_alarm, run, Alarm.WATCHDOG_GONE)
        Heartbeat(run.loop, run.processes.watchdog, gone, alive=partial(_keep_worker, run))
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    run.loop.watch(reader, partial(_read_signal, run, reader))
    # Each signal that arrives hands a traced process to its debugger, even one that it ignores: with these
    # blocked, an agent that is watched can still see to its own end. Not before the worker inherited the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ})


def true_cause(run: Run, error: BaseException) -> BaseException:
    """Return why the run ended, where what was noticed first is only a consequence."""
    if isinstance(error, RunError) and error.code is Code.WORKER_KILLED:
        # The watchdog kills a worker that is debugged, and its alarm comes a moment later, or is kept from coming.
        try:
            run.loop.sleep(PERIOD_S)
            if run.processes.watchdog is not None and not run.processes.watchdog.untouched():
                _alarm(run, Alarm.WATCHDOG_GONE)
        except GlasshouseError as alarm:
            return alarm
    if run.stopping is not None and isinstance(error, RunError) and error.code not in _OURS:
        return run.stopping
    return error


def _read_alarm(run: Run) -> None:
    alarm = run.processes.watchdog.alarm() if run.processes.watchdog is not None else None
    if alarm is not None:
        _alarm(run, alarm)


def _alarm(run: Run, alarm: Alarm) -> None:
    if run.ending is None:
        run.notice(alarm.value)
        raise RunError(Code.DEBUGGER, "a debugger is attached, or the watchdog against it is gone")


def _keep_worker(run: Run, since_s: float) -> None:
    """Send the beat without which the worker is ended: not before it is confirmed, which takes its time."""
    if since_s > SILENT_S and run.ending is None:
        run.notice("agent-silent")
    if run.session is not None and run.session.stage >= Stage.CONFIRMED:
        run.session.worker.beat()


def _read_signal(run: Run, reader: int) -> None:
    if set(os.read(reader, 512)) & set(_SIGNALS):
        run.stop(RunError(Code.INTERRUPTED, "the run was interrupted"), grace_s=_STOP_GRACE_S)
