"""An operation that was submitted to an engine, until it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from glasshouse.errors import CollectiveError


class Driver(Protocol):
    """What carries operations out, as torch's group and those that wait use it: see `engine.Engine`."""

    rank: int
    size: int
    condition: threading.Condition

    def submit(self, operation: Any, *, timeout_s: float | None, background: bool) -> Completion: ...

    def drive(self, completion: Completion, timeout_s: float | None) -> None: ...

    def close(self) -> None: ...

    def abort(self, error: CollectiveError) -> None: ...


@dataclass(eq=False)
class Completion:
    """An operation that was submitted."""

    engine: Driver
    queue: Any  # of the device that its tensors are on, None for host memory
    timeout_s: float
    background: bool
    over: bool = False
    error: CollectiveError | None = None  # why it failed, if it did
    source: int | None = None  # the rank that a received message came from
    callbacks: list[Callable[[Completion], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    def done(self) -> bool:
        """Return whether it is over, successful or not."""
        return self.over

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done; the waiting thread does the work. A timeout that has passed ends the group.

        Raises:
            CollectiveError: it failed, or the group did.
        """
        if not self.over:
            self.engine.drive(self, timeout_s)
        if self.queue is not None:
            self.queue.end()
        if self.error is not None:
            raise self.error

    def add_done_callback(self, callback: Callable[[Completion], None]) -> None:
        """Call `callback` when it is over, from the driving thread; at once if it is."""
        with self.engine.condition:
            if not self.over:
                self.callbacks.append(callback)
                return
        callback(self)
