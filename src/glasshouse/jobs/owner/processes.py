"""Names a process so that a later one with the same number is not taken for it, and handles signals to this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from glasshouse.runtime.watchdog.session_record import Process
from glasshouse.wire.record import Record

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


class Interrupts:
    """Counts how often the run was asked to stop, and how often of these by a person's Ctrl-C; called by a handler."""

    def __init__(self) -> None:
        self.count = self.by_key = 0

    def __call__(self, number: int = signal.SIGTERM, *_frame: object) -> None:
        self.count += 1
        self.by_key += number == signal.SIGINT


def stoppable() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end this block as Ctrl-C does: by an exception that is cleaned up after."""
    return handled(signal.default_int_handler)


def interrupt() -> None:
    """End the main thread's `stoppable` block from another thread, also where it waits for a host that is silent."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def spawn(module: str, *arguments: str, log: Path, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a program of ours that outlives this process and its terminal, its errors appended to a log; may raise."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-m", module, *arguments],
            stderr=descriptor,
            cwd="/",
            start_new_session=True,  # a Ctrl-C in the terminal must not end it
            umask=0o077,
            **streams,
        )
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def giving_back(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Go on in spite of signals, and call `first` at the first Ctrl-C; a second one raises KeyboardInterrupt."""
    interrupts = Interrupts()

    def handle(number: int, _frame: FrameType | None) -> None:
        interrupts(number)
        if number == signal.SIGINT and interrupts.by_key == 1:
            first()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    with handled(handle):
        yield


@contextlib.contextmanager
def handled(handler: Callable[..., object]) -> Iterator[None]:
    """Call `handler`, such as `Interrupts`, at SIGINT, SIGTERM and SIGHUP while the block lasts."""
    if threading.current_thread() is not threading.main_thread():  # another thread's run is not ended by signals
        yield
        return
    # What our caller had ignored stays ignored: `nohup` means it.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
