"""The agent's own look at its watchdog.

A watchdog that ends is an alarm by itself; one that is stopped, traced or kept from running raises none. So the agent
looks at it, from its loop and for as long as the run lives, and with each look lets the worker's init know that the
loop goes round.

Laws: a look blocks for no longer than a read of /proc; watchdog and agent would have to be taken in the same
moment for neither to notice. What comes and goes between two looks is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from glasshouse.runtime.loop import Loop
from glasshouse.runtime.watchdog.watchdog import SILENT_S, Watchdog

EVERY_S = 1.0
# A machine that was paused as a whole, or is short of everything, needs a moment until its watchdog has looked again.
_SILENT_LOOKS = 3


class Heartbeat:
    """Looks at a watchdog every second, and calls `alive` with the seconds since the look before, where all is well.

    `gone` is called once, when it has ended, is stopped or traced, or has not looked itself for several seconds.
    """

    def __init__(
        self,
        loop: Loop,
        watchdog: Watchdog,
        gone: Callable[[], None],
        *,
        alive: Callable[[float], None] = lambda _since_s: None,
        every_s: float = EVERY_S,
    ) -> None:
        self._loop, self._watchdog, self._gone, self._every_s = loop, watchdog, gone, every_s
        self._alive, self._last_s = alive, time.monotonic()
        self._silent = 0
        loop.after(every_s, self._look)

    def _look(self) -> None:
        self._silent = self._silent + 1 if self._watchdog.silent_s() >= SILENT_S else 0
        if self._silent >= _SILENT_LOOKS or not self._watchdog.untouched():
            self._gone()
        else:
            since_s, self._last_s = time.monotonic() - self._last_s, time.monotonic()
            self._alive(since_s)
            self._loop.after(self._every_s, self._look)
