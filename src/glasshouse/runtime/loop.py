"""The agent's one place to wait: a `poll` over file descriptors and a few timers.

Laws: nothing else in the agent blocks for longer than a local system call takes. A handler that raises
ends the wait, so an alarm, a signal or a dead worker surfaces as an exception wherever the run
happens to be. With nothing to do the process sleeps in the kernel.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

READ = select.POLLIN
WRITE = select.POLLOUT

Handler: TypeAlias = Callable[[], object]

_FOREVER_S = 3600.0
# What comes beside the bytes of a Unix socket is closed by its reader. A TCP socket that the sender set to linger
# waits there until its peer has read all, or never, unless a signal arrives.
_LONGEST_CLOSE_S = 0.5
_SO_PASSRIGHTS = 83  # since Linux 6.16


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Let no call in this block wait for long: a signal, which does nothing else, ends what waits in the kernel."""
    signal.signal(signal.SIGALRM, lambda _number, _frame: None)
    signal.setitimer(signal.ITIMER_REAL, _LONGEST_CLOSE_S, _LONGEST_CLOSE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def refuse_descriptors(connection: socket.socket) -> None:
    """Let nothing come beside what is read from a Unix socket, where the kernel can: closing it would take time."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


class Timer:
    """One call at one moment."""

    __slots__ = ("handler", "when_s")

    def __init__(self, when_s: float, handler: Handler) -> None:
        self.when_s = when_s
        self.handler: Handler | None = handler

    def cancel(self) -> None:
        """Drop the call."""
        self.handler = None


class Loop:
    """Waits for file descriptors and timers; single-threaded, first come first served."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Handler] = {}
        self._timers: list[Timer] = []

    @staticmethod
    def now_s() -> float:
        """Return the time by the clock of every deadline here; a machine that sleeps does not stop it."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def watch(self, descriptor: int, handler: Handler, events: int = READ) -> None:
        """Call `handler` whenever `descriptor` is ready, closed by its peer or broken."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor; one that is not watched is fine."""
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def after(self, delay_s: float, handler: Handler) -> Timer:
        """Call `handler` once, `delay_s` from now."""
        timer = Timer(self.now_s() + delay_s, handler)
        self._timers.append(timer)
        return timer

    def step(self, longest_s: float = _FOREVER_S) -> None:
        """Wait for the next thing to happen, at most `longest_s`, and handle it."""
        self._timers = [timer for timer in self._timers if timer.handler is not None]
        now_s = self.now_s()
        wait_s = min([longest_s, *(timer.when_s - now_s for timer in self._timers)])
        # Rounded up: a wait that is a fraction short would spin until the timer is due.
        ready = self._poll.poll(max(0, -int(-wait_s * 1000 // 1)))
        for descriptor, _ in ready:
            handler = self._handlers.get(descriptor)
            if handler is not None:
                handler()
        for timer in self._timers:
            if timer.handler is not None and timer.when_s <= self.now_s():
                due, timer.handler = timer.handler, None
                due()

    def run_until(self, done: Callable[[], bool], *, within_s: float | None = None) -> bool:
        """Handle what happens until `done()`; return whether it became true in time."""
        deadline_s = None if within_s is None else self.now_s() + within_s
        while not done():
            left_s = _FOREVER_S if deadline_s is None else deadline_s - self.now_s()
            if left_s <= 0:
                return False
            self.step(left_s)
        return True

    def sleep(self, delay_s: float) -> None:
        """Handle what happens for `delay_s`."""
        self.run_until(lambda: False, within_s=delay_s)
