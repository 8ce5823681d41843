"""The arithmetic of reductions on two chunks.

Laws: float16 and bfloat16 are added up in float32 and rounded once; `avg` divides each contribution before it is added,
as torch defines it (integers: the sum is divided, towards zero).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from glasshouse.collectives.protocol.headers import ReductionCode
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
        self.wide = dtype in _NARROW and (ranks > 2 or self.scaled)  # partial results in float32
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
