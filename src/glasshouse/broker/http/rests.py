"""Room for what follows first parts that were authentic, and which of it gives way.

Laws: a first part bears its sender's signatures, and everyone on the way can record it and play it again; so it is no
title to keep its place. Of one launch a newer body always finds a place, and the sender who takes most of them, then
the one that sends slowest, loses one: to keep the honest runtime out, a replayer has to send more than it does, not
only begin more often. Beyond the bounds of an address and of all, that gives way which will not arrive in its time
anyhow. What has arrived gives way to nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from glasshouse.errors import Code, PeerError

MOST_REST_BYTES = 32 * 1024 * 1024  # from when they are asked for
REST_BYTES_OF_ADDRESS = 16 * 1024 * 1024
RESTS_OF_LAUNCH = 8  # so many that who begins a hundred a second leaves the honest one time for its first bytes
REST_S = 0.002  # about what reading a first part takes: charged where the rest does not come
BODY_TIMEOUT_S = 10.0
START_S = 0.5  # for the first bytes to come from far away
_TICK_S = 0.001


class Arriving(Protocol):
    """A connection on which a second part arrives."""

    def arrived(self) -> int:
        """Return how many bytes of it have come, read or not."""

    def cut(self) -> None:
        """End the connection at once."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Rest:
    connection: Arriving
    address: str
    of: str
    size: int
    began_s: float
    has_place: bool = True
    is_whole: bool = False
    is_signed: bool = False

    def whole(self) -> None:
        """Record that all of it is here; raises where it has just lost its place, so that nothing is decided on it."""
        if not self.has_place:
            raise busy()
        self.is_whole = True

    def signed(self) -> None:
        """Record that it was found to be what was signed: else its address is charged."""
        self.is_signed = True


class Rests:
    """The second parts that are awaited; used from the loop's thread only.

    Args:
        charge: takes an address and what it has cost for nothing, in seconds.
    """

    def __init__(self, charge: Callable[[str, float], None], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._charge = charge
        self._clock_s = clock_s
        self._all: list[_Rest] = []  # the oldest first, and no more than requests may wait

    @contextmanager
    def place(self, connection: Arriving, *, address: str, of: str, size: int) -> Iterator[_Rest]:
        """Keep a place until it is answered.

        Args:
            of: the launch that signed it.

        Raises:
            PeerError: `broker-unreachable` when there is no room.
        """
        while (in_the_way := self._in_the_way(address, of, size)) is not None:
            if not self._drop_one(in_the_way):
                raise busy()
        mine = _Rest(connection=connection, address=address, of=of, size=size, began_s=self._clock_s())
        self._all.append(mine)
        try:
            yield mine
        finally:
            self._leave(mine)
            if not mine.is_signed:
                self._charge(address, REST_S)

    def make_room(self) -> bool:
        """Cut one that will not arrive in its time; return whether there was one."""
        return self._drop_one(self._late(self._all))

    def _in_the_way(self, address: str, of: str, size: int) -> list[_Rest] | None:
        """Return those that may give way to another; None where there is room."""
        launch = [one for one in self._all if one.of == of]
        if len(launch) >= RESTS_OF_LAUNCH:
            return launch
        for rests, most in (
            ([one for one in self._all if one.address == address], REST_BYTES_OF_ADDRESS),
            (self._all, MOST_REST_BYTES),
        ):
            if sum(one.size for one in rests) + size > most:
                return self._late(rests)
        return None

    def _late(self, rests: list[_Rest]) -> list[_Rest]:
        since_s = self._clock_s() - START_S
        return [one for one in rests if one.connection.arrived() * BODY_TIMEOUT_S < one.size * (since_s - one.began_s)]

    def _speed(self, rest: _Rest) -> float:
        """Return which part of it has come a second: so what keeps more room has to send more."""
        return rest.connection.arrived() / rest.size / max(_TICK_S, self._clock_s() - rest.began_s)

    def _drop_one(self, rests: list[_Rest]) -> bool:
        of_address = Counter(one.address for one in rests)
        slowest = min(
            (one for one in rests if not one.is_whole),
            key=lambda one: (-of_address[one.address], self._speed(one)),
            default=None,
        )
        if slowest is None:
            return False
        self._leave(slowest)
        slowest.connection.cut()
        return True

    def _leave(self, rest: _Rest) -> None:
        if rest.has_place:
            rest.has_place = False
            self._all.remove(rest)


def busy() -> PeerError:
    """Return what is raised when there is no room."""
    return PeerError(Code.BROKER_UNREACHABLE, "the broker is busy; nothing was read, try again")
