"""Names a process so that a later one with the same number is not taken for it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from glasshouse.runtime.watchdog.session_record import Process
from glasshouse.wire.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessName(Record, name="process"):
    """A process id and when that process began."""

    pid: int  # process id
    started: int  # start time in clock ticks since boot; 0 where the system has none

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessName:
        """Name a running process, ourselves by default."""
        number = os.getpid() if pid is None else pid
        try:
            process = Process.of(number)
        except OSError:  # gone, or a system without /proc
            return cls(pid=number, started=0)
        return cls(pid=number, started=process.started if process.lives else 0)

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        if self.pid < 1:  # a signal to such a number reaches a whole group
            return False
        # In this order: one that ends between the two is found by neither.
        try:
            process: Process | None = Process.of(self.pid)
        except OSError:
            process = None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        if process is None:
            return True  # a system without /proc, or one that hides it from us (`hidepid`)
        # One whose beginning is not known is not taken for any that has its number now: it might be sent a signal.
        return process.lives and process.started == self.started

    def send(self, number: signal.Signals) -> bool:
        """Send a signal if it still runs; return whether it was sent."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True
