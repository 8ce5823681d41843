"""Which connections are open, and which of them give way to others.

Laws: a socket that is open is worth nothing; a request that has arrived is. So a connection whose request is not
whole gives way, the oldest first, to a new one: of the same address when that has too many, of any when there is no
room at all, and so do those that keep too many bytes of unfinished requests. One whose request is whole is never cut
off for others. Nothing is turned away while anything idles.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["ACCEPTED_AT_ONCE", "Connection", "Room", "Troubles", "room_for"]

MOST_CONNECTIONS = 512
MOST_OF_ADDRESS = 64
MOST_BYTES = 16 * 1024 * 1024
ACCEPTED_AT_ONCE = 16
# The database, the listeners, the standard streams; and what the loop has accepted or cut and not yet counted or
# closed: a few turns' worth. Without it a burst uses all up, and the loop accepts no connection for a second.
_OTHER_DESCRIPTORS = 64 + 4 * ACCEPTED_AT_ONCE
_SAY_EVERY_S = 60.0


class Connection(Protocol):
    """Something that can be cut off."""

    def cut(self) -> None: ...


def room_for(listeners: int) -> int:
    """Return how many connections each of so many listeners may have: below the limit of descriptors, all in all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(8, (soft - _OTHER_DESCRIPTORS) // listeners))


class Room:
    """The connections of one listener; used from the loop's thread only.

    Args:
        most: connections at a time.
        of_address: connections of one address at a time; those without an address are not counted by it.
    """

    def __init__(self, most: int, of_address: int = MOST_OF_ADDRESS) -> None:
        self._most = most
        self._of_address = of_address
        # All in the order of arrival; those in `_idle` have no whole request yet.
        self._open: dict[Connection, str] = {}
        self._idle: dict[Connection, int] = {}  # and how many bytes of it have come
        self._bytes = 0
        self._by_address: dict[str, dict[Connection, None]] = {}

    def enter(self, connection: Connection, address: str) -> bool:
        """Take a connection in; return whether there was room for it, or something idle that gave way."""
        mine = self._by_address.setdefault(address, {})
        full = (bool(address) and len(mine) >= self._of_address, len(self._open) >= self._most)
        if (full[0] and not self._make_room(mine)) or (full[1] and not full[0] and not self._make_room(self._open)):
            self._forget_empty(address)
            return False
        self._open[connection] = address
        self._idle[connection] = 0
        self._by_address.setdefault(address, {})[connection] = None
        return True

    def received(self, connection: Connection, count: int) -> None:
        """Note that bytes of a request have come; of too many, those that came first are dropped."""
        if connection in self._idle:
            self._idle[connection] += count
            self._bytes += count
        while self._bytes > MOST_BYTES and self._make_room(self._open):
            pass

    def whole(self, connection: Connection) -> None:
        """Note that a connection's request has arrived: it gives way no more."""
        self._bytes -= self._idle.pop(connection, 0)

    def leave(self, connection: Connection) -> None:
        """Forget a connection."""
        self.whole(connection)
        address = self._open.pop(connection, None)
        if address is not None:
            self._by_address[address].pop(connection, None)
            self._forget_empty(address)

    def _make_room(self, among: dict[Connection, Any]) -> bool:
        # Of all, the first that idles is the oldest; of one address there are few to look through.
        oldest = next(iter(self._idle) if among is self._open else (one for one in among if one in self._idle), None)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.cut()
        return True

    def _forget_empty(self, address: str) -> None:
        if not self._by_address.get(address, True):
            del self._by_address[address]


class Troubles:
    """Says what goes wrong in an event loop: one line a minute at most, and nothing of what anyone sent.

    Args:
        clock_s: monotonic seconds.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._said_s: float | None = None
        self._unsaid = 0

    def __call__(self, _loop: object, context: dict[str, Any]) -> None:
        """Take the place of a loop's exception handler."""
        if self._said_s is not None and self._clock_s() - self._said_s < _SAY_EVERY_S:
            self._unsaid += 1
            return
        error = context.get("exception")
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        again = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        sys.stderr.write(f"glasshouse broker: a connection could not be served: {why}{again}\n")
        sys.stderr.flush()
        self._said_s, self._unsaid = self._clock_s(), 0
