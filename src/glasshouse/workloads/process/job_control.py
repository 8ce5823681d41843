"""How a job ends before its workload does: by its owner, or by a script that ends its process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from glasshouse.errors import RunError
from glasshouse.task.handle import Task
from glasshouse.task.result import Result


class JobControl:
    """What a workload registers for the owner's stop; each action is done once, however early the stop comes."""

    def __init__(self, conclude: Callable[[Task, Result | RunError], int]) -> None:
        self.conclude = conclude  # reports the end of a script that ends its process itself; returns the exit status
        self._actions: list[Callable[[], None]] = []
        self._stopped = False

    def on_stop(self, action: Callable[[], None]) -> None:
        """Have an action done, in any thread, when the owner stops the job."""
        self._actions.append(action)
        if self._stopped:
            self._act()

    def stop(self) -> None:
        """Do every registered action, and those to come."""
        self._stopped = True
        self._act()

    def _act(self) -> None:
        # Called from another thread or a signal handler between two lines: the thread that takes an action does it.
        with contextlib.suppress(IndexError):
            while True:
                self._actions.pop()()
