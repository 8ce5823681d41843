"""Adds up what comes from the ranks, chunk by chunk and in rank order, whatever order it comes in.

Laws: a contribution is opened only when its turn has come, into memory that the caches hold, so nothing waits in
plaintext; the own contribution is read before the result is written over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from glasshouse.collectives.operations.arithmetic import Arithmetic
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.regions import Span
from glasshouse.collectives.protocol.frame_memory import FrameOpener

__all__ = ["Fold"]


class Fold:
    """Combines one span of every rank into one.

    Args:
        communicator: the group.
        order: the ranks in the order of the sum; the own one is among them.
        own: this rank's contribution.
        out: where the result goes: the same memory as `own`, or memory that does not overlap it.
        arithmetic: how two become one.
        may: tells whether a chunk of `own` may be overwritten yet, None if any may.
    """

    __slots__ = (
        "_arithmetic",
        "_buffer",
        "_chunk",
        "_due",
        "_high",
        "_low",
        "_may",
        "_mine",
        "_mine_at",
        "_mine_is_read",
        "_opened",
        "_out",
        "_own",
        "_place",
        "_plain",
        "_pools",
        "_result",
        "_sum",
        "finished",
    )

    def __init__(
        self,
        communicator: Communicator,
        order: Sequence[int],
        own: Span,
        out: Span,
        arithmetic: Arithmetic,
        may: Callable[[int], bool] | None = None,
    ) -> None:
        self._opened = communicator.opened
        self._pools = communicator.pools(own.region)
        self._due = [rank for rank in order if rank != communicator.rank]
        self._mine_at = list(order).index(communicator.rank)
        self._own = own
        self._out = out
        self._arithmetic = arithmetic
        self._plain = not arithmetic.scaled and not arithmetic.wide
        self._may = may
        self._place = 0
        self._chunk = 0
        self._low = self._high = 0
        self._mine: Any = None
        """The chunk's own contribution where it lies, None where tensors meet in it."""
        self._result: Any = None
        """The chunk's place in the result, likewise."""
        self._mine_is_read = False
        self._sum: Any = None
        self._buffer: memoryview | None = None
        self.finished = 0
        """How many chunks of the result stand."""

    def has(self, chunk: int) -> bool:
        """Return whether that chunk of the result stands."""
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
        self._add_theirs(opener, frame)
        self._place = place = place + 1
        if place == len(self._due):
            if place == self._mine_at:
                self._add_own()
            self._finish()

    def _begin(self) -> None:
        own, out = self._own, self._out
        self._low, self._high = own.bounds(self._chunk)
        self._mine = own.region.direct(self._low, self._high)
        self._result = self._mine if out is own else out.region.direct(*out.bounds(self._chunk))
        self._buffer = self._pools.scratch.take()

    def _add_own(self) -> None:
        arithmetic = self._arithmetic
        values = self._own.region.read(self._low, self._high) if self._mine is None else self._mine
        if arithmetic.scaled:
            values = arithmetic.scale(values, self._partial() if self._sum is None else self._second())
        self._mine_is_read = True
        if self._sum is not None:
            self._sum = arithmetic.combine(self._sum, values, self._target())
        elif arithmetic.scaled or (self._plain and self._mine is not None):
            self._sum = values
        else:
            self._sum = self._partial().copy_(values)

    def _add_theirs(self, opener: FrameOpener, frame: memoryview) -> None:
        region, arithmetic = self._own.region, self._arithmetic
        size = self._high - self._low
        if self._sum is None and self._plain:
            self._sum = region.opened(size, opener, frame, self._held())
            return
        values = region.opened(size, opener, frame, self._opened(size))
        if arithmetic.scaled:
            values = arithmetic.scale(values, self._partial() if self._sum is None else self._second())
        if self._sum is not None:
            self._sum = arithmetic.combine(self._sum, values, self._target())
        else:
            self._sum = values if arithmetic.scaled else self._partial().copy_(values)

    def _finish(self) -> None:
        self._arithmetic.finish(self._sum)
        if self._sum is not self._result:
            self._out.region.write(*self._out.bounds(self._chunk), self._sum)
        self._pools.scratch.give_back(self._held())
        self._sum = self._buffer = self._mine = self._result = None
        self._mine_is_read = False
        self._place = 0
        self._chunk = self.finished = self._chunk + 1

    def _target(self) -> Any:
        """Return where the next partial result goes: to its place as soon as nothing is read from there any more."""
        if self._mine_is_read and self._result is not None and not self._arithmetic.wide:
            return self._result
        return self._partial()

    def _held(self) -> memoryview:
        if self._buffer is None:
            raise RuntimeError("no chunk is being added up")
        return self._buffer

    def _partial(self) -> Any:
        """Return the tensor for partial results that may not go to their place yet."""
        return self._own.region.blank(self._high - self._low, self._arithmetic.accumulator, self._held())

    def _second(self) -> Any:
        """Return a tensor for a scaled contribution, behind the partial result."""
        behind = self._held()[2 * self._pools.chunk_bytes :]
        return self._own.region.blank(self._high - self._low, self._arithmetic.accumulator, behind)
