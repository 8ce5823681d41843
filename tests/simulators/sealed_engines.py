"""Engines that exchange nothing: one that notes what it was given, one whose operations fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from glasshouse.errors import Code, CollectiveError

__all__ = ["Due", "NotingEngine"]


class Due:
    """A completion that a test brings about."""

    source = 0

    def __init__(self) -> None:
        self.error: CollectiveError | None = None
        self.waited_s: list[float | None] = []
        self._callbacks: list[Callable[[Any], None]] = []
        self._event = threading.Event()

    def finish(self, error: CollectiveError | None = None) -> None:
        self.error = error
        self._event.set()
        for callback in self._callbacks:
            callback(self)

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        self.waited_s.append(timeout_s)
        assert self._event.wait(10), "nobody brought it about"
        if self.error is not None:
            raise self.error

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        if self.done():
            fn(self)
        else:
            self._callbacks.append(fn)


class NotingEngine:
    """Notes operations; each is done at once, unless the test is to finish it.

    Args:
        error: what every operation fails with.
        held: leave operations unfinished.
    """

    def __init__(
        self, *, rank: int = 0, size: int = 1, error: CollectiveError | None = None, held: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self.given: list[tuple[Any, float | None, bool]] = []
        self.begun: list[Due] = []
        self.closed = False
        self.aborted: Code | None = None
        self._error = error
        self._held = held

    def submit(self, operation: Any, *, timeout_s: float | None = None, background: bool) -> Due:
        self.given.append((operation, timeout_s, background))
        due = Due()
        self.begun.append(due)
        if not self._held:
            due.finish(self._error)
        return due

    def close(self) -> None:
        self.closed = True

    def abort(self, error: CollectiveError) -> None:
        self.aborted = error.code
