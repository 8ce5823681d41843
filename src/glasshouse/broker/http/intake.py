"""Reads and authenticates messages, on threads that decide nothing, and bounds the cost of each address.

Laws: only a message that was found authentic is passed on to be decided. Reading that came to nothing, or to a
recording played again, is charged to the address that it came from; an address beyond its share waits behind all
others, and few of its messages wait. What an honest runtime repeats, no more often than it should, is not charged. No
address is locked out for itself alone: an honest runtime behind the same address is read too, small messages first.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import PriorityQueue
from typing import TypeVar

from glasshouse.broker.decide.decisions import PACE_US, Decision, Effect, keep
from glasshouse.broker.http.rests import Rests, busy

MOST_REQUESTS = 96
RESERVED_REQUESTS = 32  # besides, for addresses from which something authentic came lately: heads of attested runs
LATE_OF_ADDRESS = 16
MOST_LATE = 48
SHARE = 0.05  # of the reading thread's time, for messages of one address that came to nothing
BURST_S = 0.1
KNOWN_FOR_S = 3600.0
MOST_ADDRESSES = 4096
PACES_AHEAD = 2  # a runtime is not exact, and tries again where it was not answered
_SIZE_STEP_BYTES = 4096

Result = TypeVar("Result")


class Shares:
    """What each address has cost for nothing, and which of them something authentic came from."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        # Least recently used first, so that a sender with many addresses displaces their own.
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._known: OrderedDict[str, float] = OrderedDict()

    def charge(self, address: str, seconds: float) -> None:
        """Add what reading a message for nothing took."""
        with self._lock:
            keep(self._spent, address, (self._owed(address) + seconds, self._clock_s()), most=MOST_ADDRESSES)

    def credit(self, address: str) -> None:
        """Record that something authentic came from an address."""
        with self._lock:
            keep(self._known, address, self._clock_s(), most=MOST_ADDRESSES)

    def rank(self, address: str) -> int:
        """Return 0 for an address with authentic messages, 1 for another, 2 for one beyond its share."""
        with self._lock:
            if self._owed(address) > BURST_S:
                return 2
            return 0 if self._clock_s() - self._known.get(address, -KNOWN_FOR_S) < KNOWN_FOR_S else 1

    def _owed(self, address: str) -> float:
        spent_s, at_s = self._spent.get(address, (0.0, 0.0))
        return max(0.0, spent_s - SHARE * (self._clock_s() - at_s))


class Pace:
    """Separates what an honest runtime repeats, once a second while it waits, from what comes faster.

    Args:
        clock_us: microseconds since the epoch; it may be set back.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._next_us: OrderedDict[str, int] = OrderedDict()

    def kept(self, name: str, every_us: int = PACE_US) -> bool:
        """Count one of this name and sender; return whether it is no more than one in that time, and a few at once."""
        now_us = self._clock_us()
        next_us = max(now_us, self._next_us.get(name, 0))
        if next_us > now_us + (1 + PACES_AHEAD) * every_us:
            next_us = now_us  # the clock was set back
        if next_us > now_us + PACES_AHEAD * every_us:
            return False
        keep(self._next_us, name, next_us + every_us, most=MOST_ADDRESSES)
        return True

    def effect(self, decision: Decision, address: str) -> Effect:
        """Return the effect on an address: what it repeats faster than it should is charged to it, and to no other."""
        if decision.effect is Effect.NOTHING and not self.kept(f"{decision.repeats} {address}", decision.every_us):
            return Effect.CHARGE
        return decision.effect


class Intake:
    """Counts requests, and reads them one after the other."""

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = shares or Shares()
        self._requests = 0
        self._late: Counter[str] = Counter()
        self.rests = Rests(self._shares.charge)
        self._numbers = itertools.count()
        self._waiting: PriorityQueue[tuple[int, int, int, Callable[[], None] | None]] = PriorityQueue()
        self._aside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="appraise")
        self._thread = threading.Thread(target=self._work, name="read")
        self._thread.start()

    @contextmanager
    def request(self, address: str) -> Iterator[None]:
        """Count a request, from when it is whole until it is answered; from the loop's thread only.

        Raises:
            PeerError: `broker-unreachable` when there are too many.
        """
        reserved = RESERVED_REQUESTS if self._shares.rank(address) == 0 else 0
        if self._requests >= MOST_REQUESTS + reserved and not self.rests.make_room():
            raise busy()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def read(
        self,
        read: Callable[[], Result],
        *,
        address: str,
        size: int,
        effect: Callable[[Result], Effect] = lambda _: Effect.CREDIT,
    ) -> Result:
        """Read a message when its turn comes.

        Args:
            read: returns what was read; it raises where that came to nothing.
            size: of the message, in bytes: small ones go first.

        Raises:
            PeerError: `broker-unreachable` when too many wait that came from this address and it is beyond its share,
                or from all such.
        """
        rank = self._shares.rank(address)
        late = rank == 2
        # A bound for one address keeps places for the late of others; one for all late ones, for the rest.
        if late and (self._late[address] >= LATE_OF_ADDRESS or self._late.total() >= MOST_LATE):
            raise busy()
        future: Future[Result] = Future()
        work = partial(self._read, future, read, address, effect)
        self._waiting.put((rank, size // _SIZE_STEP_BYTES, next(self._numbers), work))
        self._late[address] += late
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._late[address] -= late
            self._late += Counter()  # drops counts of zero

    def _read(
        self, future: Future[Result], read: Callable[[], Result], address: str, effect: Callable[[Result], Effect]
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        began_s = time.thread_time()
        try:
            result = read()
        except BaseException as error:
            self._shares.charge(address, time.thread_time() - began_s)
            future.set_exception(error)
        else:
            found = effect(result)
            if found is Effect.CREDIT:
                self._shares.credit(address)
            elif found is Effect.CHARGE:
                self._shares.charge(address, time.thread_time() - began_s)
            future.set_result(result)

    async def ahead(self, decision: Decision) -> None:
        """Do what can be done before a decision, neither on the thread that reads nor on the one that decides."""
        if decision.ahead is not None:
            await asyncio.get_running_loop().run_in_executor(self._aside, decision.ahead)

    def close(self) -> None:
        """Read what waits, then end the threads."""
        self._aside.shutdown()
        self._waiting.put((3, 0, next(self._numbers), None))
        self._thread.join()

    def _work(self) -> None:
        while (work := self._waiting.get()[3]) is not None:
            work()
