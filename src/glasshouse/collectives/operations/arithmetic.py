"""The arithmetic of reductions: on two chunks, and chunk by chunk over all ranks, in rank order.

Laws: float16 and bfloat16 are added up in float32 and rounded once; `avg` divides each contribution before it is added,
as torch defines it (integers: the sum is divided, towards zero); a contribution is opened only when its turn has come,
into memory that the caches hold, so nothing waits in plaintext; the own one is read before the result is written over
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.flows import Gate, Sink
from glasshouse.collectives.operations.regions import Span
from glasshouse.collectives.protocol.headers import ReductionCode
from glasshouse.collectives.protocol.traffic import FrameOpener
from glasshouse.errors import Code, CollectiveError

_NARROW = frozenset({torch.float16, torch.bfloat16})
_SUMMED = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    }
)  # fmt: skip
_COMBINE = {
    ReductionCode.MIN: torch.minimum,
    ReductionCode.MAX: torch.maximum,
    ReductionCode.PRODUCT: torch.mul,
}  # torch.add for every other


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How elements are combined."""

    kind: ReductionCode
    factor: Any = None  # multiplies each contribution of a `premul_sum`: a number, or a tensor of one element

    def __post_init__(self) -> None:
        if (self.kind is ReductionCode.PREMUL_SUM) != (self.factor is not None):
            raise ValueError("premul_sum, and nothing else, takes a factor")

    def premultiplied(self, tensor: Any) -> Any:
        """Return a rank's contribution as it leaves the rank: a copy, where there is a factor.

        Each rank multiplies its own by its own factor, as NCCL does; the factors may differ.
        """
        return tensor if self.factor is None else tensor.detach() * torch.as_tensor(self.factor).to(tensor)


class Arithmetic:
    """A reduction over elements of one type, one contribution a rank.

    Raises:
        CollectiveError: `collective-unsealed`, elements that the reduction is not defined for.
    """

    def __init__(self, reduction: Reduction, dtype: Any, ranks: int) -> None:
        kind = reduction.kind
        if dtype not in _SUMMED or (kind is ReductionCode.PREMUL_SUM and not dtype.is_floating_point):
            raise CollectiveError(
                Code.COLLECTIVE_UNSEALED,
                f"the sealed backend does not reduce {str(dtype).removeprefix('torch.')} by {kind.name.lower()}",
                hint="convert the tensor to a type that it reduces, such as float32",
            )
        averaged = kind is ReductionCode.AVG
        if dtype is torch.bool and averaged:
            raise CollectiveError(Code.COLLECTIVE_UNSEALED, "the average of truth values is not defined")
        self._combine = _COMBINE.get(kind, torch.add)
        self.scaled = averaged and dtype.is_floating_point
        self._divisor = ranks
        self._quotient = ranks if averaged and not self.scaled else None
        # Two narrow numbers are added in float32 and rounded once by torch itself; more need the wide sum kept.
        self.wide = dtype in _NARROW and (ranks > 2 or self.scaled)
        """Whether partial results are kept in float32 though the elements are not."""
        self.accumulator = torch.float32 if self.wide else dtype  # the type in which partial results are kept

    def scale(self, contribution: Any, out: Any) -> Any:
        """Write a contribution as it is to be combined into `out`, of the accumulator's type; only where `scaled`."""
        # Converted first: torch would divide narrow numbers, and round, before it widens them.
        out.copy_(contribution)
        return out.div_(self._divisor)

    def combine(self, left: Any, right: Any, out: Any) -> Any:
        """Write `left` and `right` combined, in this order, into `out`."""
        return self._combine(left, right, out=out)

    def finish(self, result: Any) -> None:
        """Turn a combination of all contributions into the result, in place."""
        if self._quotient is not None:
            torch.div(result, self._quotient, rounding_mode="trunc", out=result)


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
