"""All-reduce along a ring: each rank sends to the next and takes from the one before, 2(N−1) dependent hops.

Laws: every hop is sealed and opened on its own; the sum begins with the rank after its shard's owner and goes round,
so it is the same on all ranks but not the rank-order sum; float16 and bfloat16 are rounded at every hop.
`serial` is the pattern that Lee et al. (arXiv:2501.11771, section 4) measure: per hop encrypt, send, receive, decrypt,
one after the other, a shard at a time; it is here to be measured beside the others.
"""

from __future__ import annotations

from collections.abc import Callable

from glasshouse.collectives.operations.arithmetic import Arithmetic
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.exchange import Exchange
from glasshouse.collectives.operations.flows import CopySink, Outflow, Sink
from glasshouse.collectives.operations.plans import SCHEDULES, all_reduce
from glasshouse.collectives.operations.regions import Region, Span, copy
from glasshouse.collectives.protocol.headers import MAX_PAYLOAD_BYTES, Algorithm
from glasshouse.collectives.protocol.traffic import FrameOpener

__all__ = ["all_reduce"]


def _ring(exchange: Exchange, communicator: Communicator, region: Region, arithmetic: Arithmetic) -> None:
    _plan(exchange, communicator, region, arithmetic, serial=False)


def _serial(exchange: Exchange, communicator: Communicator, region: Region, arithmetic: Arithmetic) -> None:
    _plan(exchange, communicator, region, arithmetic, serial=True)


SCHEDULES.update({Algorithm.RING: _ring, Algorithm.SERIAL: _serial})  # no group chooses them


class _Hop(Sink):
    """A shard from the rank before, combined with the own one and put in its place.

    Args:
        last: whether this rank's is the last contribution.
    """

    __slots__ = ("_arithmetic", "_communicator", "_last", "_span", "_wait", "taken")

    def __init__(
        self,
        communicator: Communicator,
        span: Span,
        arithmetic: Arithmetic,
        *,
        last: bool,
        wait: Callable[[int], bool] | None,
    ) -> None:
        self._communicator = communicator
        self._span = span
        self._arithmetic = arithmetic
        self._last = last
        self._wait = wait
        self.taken = 0

    def ready(self, source: int, chunk: int) -> bool:
        return self._wait is None or self._wait(chunk)

    def take(self, source: int, chunk: int, opener: FrameOpener, frame: memoryview) -> None:
        low, high = self._span.bounds(chunk)
        region = self._span.region
        values = region.opened(high - low, opener, frame, self._communicator.opened(high - low))
        own = region.read(low, high)
        self._arithmetic.combine(values, own, own)
        if self._last:
            self._arithmetic.finish(own)
        region.write(low, high, own)
        self.taken = chunk + 1


def _plan(
    exchange: Exchange, communicator: Communicator, region: Region, arithmetic: Arithmetic, *, serial: bool
) -> None:
    """Add the hops of an all-reduce to an exchange."""
    size, rank = communicator.size, communicator.rank
    shards = communicator.shards(region, MAX_PAYLOAD_BYTES if serial else None)
    if arithmetic.scaled:
        copy(region, region, lambda values: arithmetic.scale(values, values.clone()))
    following, before = (rank + 1) % size, (rank - 1) % size
    arrived: _Hop | CopySink | None = None
    for hop in range(2 * (size - 1)):
        if hop < size - 1:
            mine, theirs = shards[(rank - hop) % size], shards[(rank - hop - 1) % size]
        else:
            at = hop - (size - 1)
            mine, theirs = shards[(rank + 1 - at) % size], shards[(rank - at) % size]
        # What this hop sends is what the hop before brought.
        gate = _gate(arrived, mine.count if serial else None)
        flow = exchange.send(following, mine, phase=hop % 256, gate=gate)
        wait = _gone(flow) if serial else None
        if hop < size - 1:
            arrived = _Hop(communicator, theirs, arithmetic, last=hop == size - 2, wait=wait)
        else:
            arrived = CopySink(theirs, may=wait)
        exchange.receive(before, theirs, arrived, phase=hop % 256)


def _gate(arrived: _Hop | CopySink | None, count: int | None) -> Callable[[int], bool] | None:
    """Return what a hop's sending waits for: the same chunk of the hop before, or all of it (`count` chunks)."""
    if arrived is None:
        return None
    if count is not None:
        return lambda chunk: arrived.taken >= count
    return lambda chunk: arrived.taken > chunk


def _gone(flow: Outflow) -> Callable[[int], bool]:
    """Return whether as much has been sent as is to be taken; a shard that is one frame is sent whole before that."""
    gone = 0

    def release(chunk: int) -> Callable[[], None]:
        def went() -> None:
            nonlocal gone
            gone = chunk + 1

        return went

    setattr(flow, "release", release)  # noqa: B010 - a method of this flow alone
    return lambda chunk: gone > min(chunk, flow.span.count - 1)
