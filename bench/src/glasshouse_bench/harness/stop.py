"""A request to stop that reaches whoever waits: a signal wakes every wait of the harness and ends none half-way.

Law: nothing is interrupted in the middle; whoever waits looks, and what is complete is kept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Stop"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Counts how often the measurement was asked to stop; readable, as a descriptor, from the first time on."""

    def __init__(self) -> None:
        self.count = 0
        self._read, self._write = os.pipe()

    def __enter__(self) -> Stop:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._read)
        os.close(self._write)

    @property
    def asked(self) -> bool:
        return self.count > 0

    def fileno(self) -> int:
        return self._read

    def ask(self) -> None:
        """Ask the measurement to stop."""
        self.count += 1
        if self.count == 1:
            os.write(self._write, b"!")

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP ask; what our caller ignores stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may; whoever calls from another one asks by itself
            return

        def ask(_number: int, _frame: FrameType | None) -> None:
            self.ask()

        numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, ask) for number in numbers}
        try:
            yield
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)
