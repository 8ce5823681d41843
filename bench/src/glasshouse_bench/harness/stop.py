"""A request to stop: it is looked at by every wait of the harness, and what is complete is kept.

Law: nothing is interrupted in the middle.
"""

from __future__ import annotations

import signal
import threading
from typing import Any, Self

__all__ = ["Stop"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether the measurement was asked to stop: by `ask`, or by a signal while its block lasts.

    Only the main thread can be asked by signals, and what its caller ignores stays ignored.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self.ask) for number in numbers}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, *_signal: object) -> None:
        """Ask the measurement to stop."""
        self.asked = True
