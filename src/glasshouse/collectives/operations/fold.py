"""Adds up the contributions of the ranks, chunk by chunk and in rank order, in whatever order they arrive.

Laws: a contribution is opened only when its turn has come, into memory that the caches hold, so nothing waits in
plaintext; the own contribution is read before the result is written over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasshouse.collectives.operations.arithmetic import Arithmetic
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.flows import Gate, Sink
from glasshouse.collectives.operations.regions import Span
from glasshouse.collectives.protocol.traffic import FrameOpener


class Fold(Sink):
    """Combines one span of every rank into `out`: the memory of the own one, or memory that does not overlap it."""

    def __init__(
        self, communicator: Communicator, own: Span, out: Span, arithmetic: Arithmetic, may: Gate = None
    ) -> None:
        self._opened = communicator.opened
        self._pools = communicator.pools(own.region)
        self._due: Sequence[int] = communicator.peers
        self._mine_at = communicator.rank  # how many contributions come before the own one
        self._own = own
        self._out = out
        self._arithmetic = arithmetic
        self._plain = not arithmetic.scaled and not arithmetic.wide
        self._may = may
        self._place = 0
        self._chunk = 0
        self._low = self._high = 0
        self._mine: Any = None  # the chunk's own contribution where it lies, None where tensors meet in it
        self._result: Any = None  # the chunk's place in the result, likewise
        self._mine_is_read = False
        self._sum: Any = None
        self._buffer = memoryview(bytearray())
        self.finished = 0  # how many chunks of the result are complete

    def has(self, chunk: int) -> bool:
        """Return whether that chunk of the result is complete."""
        return chunk < self.finished

    def ready(self, source: int, chunk: int) -> bool:
        if chunk != self._chunk or self._due[self._place] != source:
            return False
        # A fold that begins later never holds what an earlier one needs to begin: all begin with the same rank.
        return self._place > 0 or (self._pools.scratch.available and (self._may is None or self._may(chunk)))

    def take(self, source: int, chunk: int, opener: FrameOpener, frame: memoryview) -> None:
        place = self._place
        if place == 0:
            self._begin()
        if place == self._mine_at:
            self._add_own()
        size = self._high - self._low
        if self._sum is None and self._plain:
            self._sum = self._own.region.opened(size, opener, frame, self._buffer)
        else:
            self._add(self._own.region.opened(size, opener, frame, self._opened(size)))
        self._place = place = place + 1
        if place == len(self._due):
            if place == self._mine_at:
                self._add_own()
            self._finish()

    def _begin(self) -> None:
        own, out = self._own, self._out
        buffer = self._pools.scratch.take()
        if buffer is None:
            raise RuntimeError("a chunk begins when there is memory for it")
        self._buffer = buffer
        self._low, self._high = own.bounds(self._chunk)
        self._mine = own.region.direct(self._low, self._high)
        self._result = self._mine if out is own else out.region.direct(*out.bounds(self._chunk))

    def _add_own(self) -> None:
        values = self._own.region.read(self._low, self._high) if self._mine is None else self._mine
        self._mine_is_read = True
        if self._sum is None and self._plain and self._mine is not None:
            self._sum = values
        else:
            self._add(values)

    def _add(self, values: Any) -> None:
        arithmetic = self._arithmetic
        if arithmetic.scaled:
            values = arithmetic.scale(values, self._partial(behind=self._sum is not None))
        if self._sum is not None:
            # The partial result goes to its place as soon as nothing is read from there any more.
            there = self._mine_is_read and self._result is not None and not arithmetic.wide
            self._sum = arithmetic.combine(self._sum, values, self._result if there else self._partial())
        else:
            self._sum = values if arithmetic.scaled else self._partial().copy_(values)

    def _finish(self) -> None:
        self._arithmetic.finish(self._sum)
        if self._sum is not self._result:
            self._out.region.write(*self._out.bounds(self._chunk), self._sum)
        self._pools.scratch.give_back(self._buffer)
        self._sum = self._mine = self._result = None
        self._mine_is_read = False
        self._place = 0
        self._chunk = self.finished = self._chunk + 1

    def _partial(self, *, behind: bool = False) -> Any:
        """Return a tensor for a partial result, or for a scaled contribution `behind` it."""
        buffer = self._buffer[2 * self._pools.chunk_bytes :] if behind else self._buffer
        return self._own.region.blank(self._high - self._low, self._arithmetic.accumulator, buffer)
