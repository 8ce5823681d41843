"""Which connections are open, and which of them give way to others.

Laws: a socket that is open is worth nothing; a request that has arrived is. So a connection whose request is not
whole gives way, the oldest first, to a new one: of the same address when that has too many, of the address that has
most of them when there is no room at all. Of unfinished requests that keep too many bytes, the longest gives way of the
address that keeps most. An address with few of them, or with no more bytes than one message has, takes no more than any
other: between such ones age decides, so that many addresses with a little each cannot cut an honest one with a little
more. One whose request is whole is not cut off for others until its whole answer has left. Nothing is turned away
while anything idles.
"""

from __future__ import annotations

import ipaddress
import itertools
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

MOST_CONNECTIONS = 512
MOST_OF_ADDRESS = 64
MOST_BYTES = 16 * 1024 * 1024
SHARES = 64  # an address with no more than its share of the room, in connections or bytes, takes no more than others
ACCEPTED_AT_ONCE = 16
# The database, the listeners, the standard streams; and what the loop has accepted or cut and not yet counted or
# closed: a few turns' worth. Without it a burst uses all up, and the loop accepts no connection for a second.
_OTHER_DESCRIPTORS = 64 + 4 * ACCEPTED_AT_ONCE
_LOG_EVERY_S = 60.0


class Connection(Protocol):
    """Something that can be cut off."""

    def cut(self) -> None:
        """End the connection at once."""


def address_of(host: str | None) -> str:
    """Return what a sender is counted as: an IPv4 address, an IPv6 network of 64 bits, or nothing on a Unix socket."""
    if host is None or ":" not in host:
        return host or ""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


def room_for(listeners: int) -> int:
    """Return how many connections each of so many listeners may have: below the limit of descriptors, all in all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(8, (soft - _OTHER_DESCRIPTORS) // listeners))


@dataclass(slots=True)
class _Address:
    """What one address has here."""

    connections: int = 0
    # Those whose request is not whole, the oldest first, and how many bytes of it have come.
    idle: dict[Connection, int] = field(default_factory=dict)
    bytes: int = 0  # of them all


class Room:
    """The connections of one listener; used from the loop's thread only.

    Args:
        most: connections at a time.
        of_address: connections of one address at a time; those without an address are not counted by it.
    """

    def __init__(self, most: int, of_address: int = MOST_OF_ADDRESS) -> None:
        self._most = most
        self._of_address = of_address
        self._numbers = itertools.count()
        self._open: dict[Connection, tuple[str, int]] = {}  # and its place in the order of arrival
        self._addresses: dict[str, _Address] = {}
        self._bytes = 0

    def enter(self, connection: Connection, address: str) -> bool:
        """Count a connection; return whether there was a place for it, or an idle one that was cut for it."""
        mine = self._addresses.get(address)
        if address and mine is not None and mine.connections >= self._of_address:
            if not self._drop_oldest(mine):
                return False
        elif len(self._open) >= self._most and not self._drop_oldest(self._with_most_idle()):
            return False
        mine = self._addresses.setdefault(address, _Address())
        mine.connections += 1
        mine.idle[connection] = 0
        self._open[connection] = address, next(self._numbers)
        return True

    def received(self, connection: Connection, count: int) -> None:
        """Count bytes of a request; of too many, drop the longest request of the address that sent most."""
        address, _ = self._open.get(connection, ("", 0))
        mine = self._addresses.get(address)
        if mine is not None and connection in mine.idle:
            mine.idle[connection] += count
            mine.bytes += count
            self._bytes += count
        while self._bytes > MOST_BYTES:
            few = MOST_BYTES // SHARES  # as many as the longest message has
            keeping = [one for one in self._addresses.values() if one.bytes]
            most = max(keeping, key=lambda one: (max(one.bytes, few), -self._first(one, least=1)))
            if most.bytes > few:
                self._drop(max(most.idle, key=most.idle.__getitem__))
            else:
                self._drop(next(one for one, count in most.idle.items() if count))

    def whole(self, connection: Connection) -> None:
        """Record that a connection's request has arrived: it gives way no more."""
        if connection in self._open:
            mine = self._addresses[self._open[connection][0]]
            count = mine.idle.pop(connection, 0)
            mine.bytes -= count
            self._bytes -= count

    def answered(self, connection: Connection) -> None:
        """Record that nothing is owed to a connection any more: it gives way again, as one that idles."""
        self.whole(connection)
        if connection in self._open:
            self._addresses[self._open[connection][0]].idle[connection] = 0

    def leave(self, connection: Connection) -> None:
        """Drop a connection from the counts."""
        self.whole(connection)
        address, _ = self._open.pop(connection, (None, 0))
        if address is not None:
            self._addresses[address].connections -= 1
            if not self._addresses[address].connections:
                del self._addresses[address]

    def _with_most_idle(self) -> _Address:
        """Return the address with most connections that idle; of several, that of the one that idles longest."""
        idling = [one for one in self._addresses.values() if one.idle]
        return max(
            idling, key=lambda one: (max(len(one.idle), self._most // SHARES), -self._first(one)), default=_Address()
        )

    def _first(self, of: _Address, least: int = 0) -> int:
        """Return the place of the oldest that idles, of those with so many bytes at least."""
        return self._open[next(one for one, count in of.idle.items() if count >= least)][1]

    def _drop_oldest(self, of: _Address) -> bool:
        oldest = next(iter(of.idle), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _drop(self, connection: Connection) -> None:
        self.leave(connection)
        connection.cut()


class Troubles:
    """Logs what goes wrong in an event loop: one line a minute at most, and nothing of what clients sent."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._logged_s = -_LOG_EVERY_S
        self._unlogged = 0

    def __call__(self, _loop: object, context: dict[str, Any]) -> None:
        """Take the place of a loop's exception handler."""
        if self._clock_s() - self._logged_s < _LOG_EVERY_S:
            self._unlogged += 1
            return
        error = context.get("exception")
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        again = f" ({self._unlogged} more since the last such line)" if self._unlogged else ""
        sys.stderr.write(f"glasshouse broker: a connection could not be served: {why}{again}\n")
        sys.stderr.flush()
        self._logged_s, self._unlogged = self._clock_s(), 0
