"""Reads what strangers send, on one thread that decides nothing, and bounds what each address may cost.

Laws: only a message that was found authentic is handed on to be decided. Reading that came to nothing, or to a
recording played again, is charged to the address that it came from; an address beyond its share waits behind all
others, and few of its messages wait. No address is locked out for itself alone: an honest runtime behind the same
address is read too, small messages first.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import PriorityQueue
from typing import Any, TypeVar

from glasshouse.errors import Code, PeerError

__all__ = ["Intake", "Shares", "address_of", "busy"]

MOST_REQUESTS = 96
RESERVED_REQUESTS = 32  # besides, for addresses from which something authentic came lately: heads of attested runs
MOST_LATE = 16
SHARE = 0.05  # of the reading thread's time, for messages of one address that came to nothing
BURST_S = 0.1
KNOWN_FOR_S = 3600.0
MOST_ADDRESSES = 4096
_SIZE_STEP_BYTES = 4096

Result = TypeVar("Result")


def address_of(host: str | None) -> str:
    """Return what one party is taken for: an IPv4 address, an IPv6 network of 64 bits, or nothing on a Unix socket."""
    if host is None or ":" not in host:
        return host or ""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


def busy() -> PeerError:
    """Return the error of a request that is turned away unread: it may come again."""
    return PeerError(Code.BROKER_UNREACHABLE, "the broker is busy; nothing was read, try again")


class Shares:
    """What each address has cost for nothing, and which of them something authentic came from.

    Args:
        clock_s: monotonic seconds.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        # Least recently used first, so that who goes through many addresses forgets their own.
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._known: OrderedDict[str, float] = OrderedDict()

    def charge(self, address: str, seconds: float) -> None:
        """Add what reading a message for nothing took."""
        with self._lock:
            _keep(self._spent, address, (self._owed(address) + seconds, self._clock_s()))

    def credit(self, address: str) -> None:
        """Remember that something authentic came from an address."""
        with self._lock:
            _keep(self._known, address, self._clock_s())

    def rank(self, address: str) -> int:
        """Return 0 for an address that is known, 1 for another, 2 for one beyond its share."""
        with self._lock:
            if self._owed(address) > BURST_S:
                return 2
            return 0 if self._clock_s() - self._known.get(address, -KNOWN_FOR_S) < KNOWN_FOR_S else 1

    def _owed(self, address: str) -> float:
        spent_s, at_s = self._spent.get(address, (0.0, 0.0))
        return max(0.0, spent_s - SHARE * (self._clock_s() - at_s))


def _keep(table: OrderedDict[str, Any], address: str, value: object) -> None:
    table[address] = value
    table.move_to_end(address)
    if len(table) > MOST_ADDRESSES:
        table.popitem(last=False)


class Intake:
    """Counts requests, and reads them one after the other.

    Args:
        shares: who waits behind whom.
    """

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = shares or Shares()
        self._requests = 0
        self._late = 0
        self._numbers = itertools.count()
        self._waiting: PriorityQueue[tuple[int, int, int, Callable[[], None] | None]] = PriorityQueue()
        self._thread = threading.Thread(target=self._work, name="read")
        self._thread.start()

    @contextmanager
    def request(self, address: str) -> Iterator[None]:
        """Count a request, from when it is whole until it is answered; from the loop's thread only.

        Raises:
            PeerError: `broker-unreachable` when there are too many.
        """
        reserved = RESERVED_REQUESTS if self._shares.rank(address) == 0 else 0
        if self._requests >= MOST_REQUESTS + reserved:
            raise busy()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def read(
        self, read: Callable[[], Result], *, address: str, size: int, fresh: Callable[[Result], bool] = lambda _: True
    ) -> Result:
        """Read a message when its turn comes.

        Args:
            read: returns what was read; it raises where that came to nothing.
            address: whom it came from, see `address_of`.
            size: of the message, in bytes: small ones go first.
            fresh: whether what was read is more than a recording played again, which anyone on the way can do.

        Raises:
            PeerError: `broker-unreachable` when too many wait that came from addresses beyond their share.
        """
        rank = self._shares.rank(address)
        late = rank == 2
        if late and self._late >= MOST_LATE:
            raise busy()
        future: Future[Result] = Future()
        work = partial(self._read, future, read, address, fresh)
        self._waiting.put((rank, size // _SIZE_STEP_BYTES, next(self._numbers), work))
        self._late += late
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._late -= late

    def _read(
        self, future: Future[Result], read: Callable[[], Result], address: str, fresh: Callable[[Result], bool]
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
            if fresh(result):
                self._shares.credit(address)
            else:
                self._shares.charge(address, time.thread_time() - began_s)
            future.set_result(result)

    def close(self) -> None:
        """Read what waits, then end the thread."""
        self._waiting.put((3, 0, next(self._numbers), None))
        self._thread.join()

    def _work(self) -> None:
        while (work := self._waiting.get()[3]) is not None:
            work()
