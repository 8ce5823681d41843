"""An operation that was submitted to an engine, until it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from glasshouse.collectives.operations.exchange import Exchange
from glasshouse.collectives.operations.point_to_point import P2PMessage
from glasshouse.errors import CollectiveError

__all__ = ["Completion", "Submission"]

Submission: TypeAlias = Exchange | P2PMessage


class _Driver(Protocol):
    condition: threading.Condition

    def drive(self, completion: Completion, timeout_s: float | None) -> None: ...


class Completion:
    """An operation that was submitted.

    `error` is why it failed, if it did; `source` is the rank that a received message came from.
    """

    __slots__ = (
        "__weakref__", "_engine", "background", "callbacks", "deadline", "error", "over", "source", "timeout_s", "work",
    )  # fmt: skip

    def __init__(self, engine: _Driver, work: Submission, timeout_s: float, *, background: bool) -> None:
        self._engine = engine
        self.work = work
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.background = background
        self.over = False
        self.error: CollectiveError | None = None
        self.source: int | None = None
        self.callbacks: list[Callable[[Completion], None]] = []

    def done(self) -> bool:
        """Return whether it is over, successful or not."""
        return self.over

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done; the waiting thread does the work.

        Args:
            timeout_s: ends the group when it has passed, as the operation's own timeout does.

        Raises:
            CollectiveError: it failed, or the group did.
        """
        if not self.over:
            self._engine.drive(self, timeout_s)
        if self.work.queue is not None:
            self.work.queue.end()
        if self.error is not None:
            raise self.error

    def add_done_callback(self, callback: Callable[[Completion], None]) -> None:
        """Call `callback` when it is over, from the driving thread; at once if it is."""
        with self._engine.condition:
            if not self.over:
                self.callbacks.append(callback)
                return
        callback(self)
