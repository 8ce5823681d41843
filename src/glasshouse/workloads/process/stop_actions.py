"""What a process does when the owner stops its job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

__all__ = ["Stop"]


class Stop:
    """What is to be done when the owner stops the job; each action is done once, however early the owner asks."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []
        self._asked = False

    def register(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        if self._asked:
            self._act()

    def ask(self) -> None:
        self._asked = True
        self._act()

    def _act(self) -> None:
        # Asked from another thread or from a signal handler between two lines: the thread that takes an action does it.
        with contextlib.suppress(IndexError):
            while True:
                self._actions.pop()()
