"""What ends a run from outside: the watchdog's alarms, signals, and an agent that was kept from running.

A watchdog that ends is an alarm by itself; one that is stopped, traced or kept from running raises none. So the agent
looks at it, from its loop and for as long as the run lives, and with each look beats to the worker's init.

Laws: a look blocks for no longer than a read of /proc; watchdog and agent would have to be taken in the same
moment for neither to notice. What comes and goes between two looks is not seen.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial

from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.run.run_state import Run
from glasshouse.runtime.watchdog import watchdog
from glasshouse.runtime.watchdog.watchdog import PERIOD_S, Watchdog
from glasshouse.runtime.watchdog.watchdog_process import Alarm
from glasshouse.runtime.worker import SILENT_S
from glasshouse.runtime.worker.worker_session import Stage

EVERY_S = 1.0
# A machine that was paused as a whole, or is short of everything, needs a moment until its watchdog has looked again.
_SILENT_LOOKS = 3
_STOP_GRACE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What the agent itself notices is never explained away by an interruption that came before it.
_OURS = (Code.DEBUGGER, Code.LEASE_LOST, Code.DISK_FULL)


def install_interrupts(run: Run) -> None:
    """Watch for alarms of the watchdog, and for requests to end the run."""
    if run.processes.watchdog is not None:
        run.loop.watch(run.processes.watchdog.alarm_fd, partial(_read_alarm, run))
        gone = partial(_alarm, run, Alarm.WATCHDOG_GONE)
        Heartbeat(run.loop, run.processes.watchdog, gone, partial(_keep_worker, run))
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


class Heartbeat:
    """Looks at a watchdog every second, and calls `alive` with the seconds since the look before, where all is well.

    `gone` is called once, when it has ended, is stopped or traced, or has not looked itself for several seconds.
    """

    def __init__(
        self,
        loop: Loop,
        watched: Watchdog,
        gone: Callable[[], None],
        alive: Callable[[float], None],
    ) -> None:
        self._loop, self._watched, self._gone, self._alive = loop, watched, gone, alive
        self._last_s, self._silent = time.monotonic(), 0
        loop.after(EVERY_S, self._look)

    def _look(self) -> None:
        self._silent = self._silent + 1 if self._watched.silent_s() >= watchdog.SILENT_S else 0
        if self._silent >= _SILENT_LOOKS or not self._watched.untouched():
            self._gone()
        else:
            since_s, self._last_s = time.monotonic() - self._last_s, time.monotonic()
            self._alive(since_s)
            self._loop.after(EVERY_S, self._look)
