"""The agent's own look at its sentinel: who watches the watch.

A sentinel that ends is an alarm by itself; one that somebody stops, traces or keeps from running says
nothing at all. So the agent looks at it, from its loop and for as long as the run lives, and with each look lets the
worker's init know that the loop comes round.

Laws: a look blocks for no longer than a read of /proc; sentinel and agent would have to be taken in the same
moment for neither to notice. What comes and goes between two looks is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from glasshouse.runtime.loop import Loop
from glasshouse.runtime.watchdog.watchdog import SILENT_S, Sentinel

__all__ = ["EVERY_S", "Vigil"]

EVERY_S = 1.0
# A machine that was paused as a whole, or is short of everything, needs a moment until its sentinel has looked again.
_SILENT_LOOKS = 3


class Vigil:
    """Looks at a sentinel every second.

    Args:
        loop: where it waits.
        sentinel: whom it looks at.
        gone: called once, from the loop, when the sentinel has ended, is stopped or traced, or has not looked
            at its wards for several seconds.
        came_round: called with each look that finds all well, with the seconds since the one before.
        every_s: how often it looks.
    """

    def __init__(
        self,
        loop: Loop,
        sentinel: Sentinel,
        gone: Callable[[], None],
        *,
        came_round: Callable[[float], None] = lambda _since_s: None,
        every_s: float = EVERY_S,
    ) -> None:
        self._loop, self._sentinel, self._gone, self._every_s = loop, sentinel, gone, every_s
        self._came_round, self._last_s = came_round, time.monotonic()
        self._silent = 0
        loop.after(every_s, self._look)

    def _look(self) -> None:
        self._silent = self._silent + 1 if self._sentinel.silent_s() >= SILENT_S else 0
        if self._silent >= _SILENT_LOOKS or not self._sentinel.untouched():
            self._gone()
        else:
            since_s, self._last_s = time.monotonic() - self._last_s, time.monotonic()
            self._came_round(since_s)
            self._loop.after(self._every_s, self._look)
