"""What torch's calls mean: its options as values, its tensors as contiguous memory that the engine may use.

Laws: a tensor that cannot be sealed is refused, never copied elsewhere in the clear; what is made beside a caller's
tensor lies on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from glasshouse.collectives.operations.arithmetic import ELEMENTS, Reduction, ReductionKind
from glasshouse.errors import Code, CollectiveError

__all__ = [
    "StagedTensors",
    "chunks",
    "lists",
    "options",
    "portions",
    "reducing",
    "reduction",
    "refusal",
    "rooted",
    "tensors_of",
    "timeout_s",
]

DEVICES = frozenset({"cpu", "cuda"})

_KINDS = {
    dist.ReduceOp.SUM: ReductionKind.SUM,
    dist.ReduceOp.AVG: ReductionKind.AVG,
    dist.ReduceOp.MIN: ReductionKind.MIN,
    dist.ReduceOp.MAX: ReductionKind.MAX,
    dist.ReduceOp.PRODUCT: ReductionKind.PRODUCT,
    dist.ReduceOp.PREMUL_SUM: ReductionKind.PREMUL_SUM,
}


_LINEAR = frozenset({ReductionKind.SUM, ReductionKind.AVG, ReductionKind.PREMUL_SUM})


def refusal(what: str, *, hint: str = "") -> CollectiveError:
    """Return the error for what the sealed backend does not do."""
    return CollectiveError(Code.COLLECTIVE_UNSEALED, what, hint=hint)


def reduction(op: Any) -> Reduction:
    """Return what torch's reduce operation asks for.

    Raises:
        CollectiveError: `collective-unsealed`, one that is not offered.
    """
    kind = _KINDS.get(getattr(op, "op", op))
    if kind is None:
        name = str(getattr(op, "op", op)).rsplit(".", 1)[-1]
        raise refusal(f"the sealed backend does not reduce by {name}; it offers {', '.join(ReductionKind)}")
    if kind is not ReductionKind.PREMUL_SUM:
        return Reduction(kind=kind)
    # Pickling is the one way by which every torch shows the factor; it is None where none was given.
    factor = op.__getstate__()[1] if hasattr(op, "op") else None
    if factor is None or isinstance(factor, complex) or (isinstance(factor, torch.Tensor) and factor.is_complex()):
        raise refusal("premul_sum needs a factor, a real one")
    return Reduction(kind=kind, factor=factor)


def timeout_s(given: timedelta | None) -> float | None:
    """Return a call's timeout in seconds, or None for the group's: torch writes that as -1 ms or 0."""
    seconds = given.total_seconds() if given is not None else 0.0
    return seconds if seconds > 0 else None


def options(kind: Any, opts: Any, timeout: timedelta | None = None) -> Any:
    """Return a call's options, of torch's type `kind`, with the timeout that was given beside them."""
    found = kind() if opts is None else opts
    if timeout is not None:
        found.timeout = timeout
    return found


def reducing(kind: Any, opts: Any, timeout: timedelta | None, given: dict[str, Any]) -> Any:
    """Return options from any of torch's three ways to name a reduction: in the options, in their place, or as `op`.

    Raises:
        TypeError: other arguments than that.
    """
    if opts is not None and not isinstance(opts, (kind, c10d.AllreduceOptions, c10d.AllreduceCoalescedOptions)):
        given, opts = {"op": opts, **given}, None
    found = options(kind, opts, timeout)
    if "op" in given:
        found.reduceOp = given.pop("op")
    if given:
        raise TypeError(f"unexpected arguments: {', '.join(given)}")
    return found


def rooted(kind: Any, opts: Any, timeout: timedelta | None, given: dict[str, Any], size: int) -> Any:
    """Return options from any of torch's three ways to name a root: in the options, in their place, or as `root`.

    Raises:
        TypeError: other arguments than that, or than a reduction where one belongs there.
        ValueError: a group of `size` ranks has no such rank.
    """
    if isinstance(opts, int):
        given, opts = {"root": opts, **given}, None
    root = given.pop("root", None)
    found = reducing(kind, opts, timeout, given) if "op" in given else options(kind, opts, timeout)
    if root is not None:
        found.rootRank = root
    if given:
        raise TypeError(f"unexpected arguments: {', '.join(given)}")
    if not 0 <= found.rootRank < size:
        raise ValueError(f"root {found.rootRank} is not a rank of a group of {size}")
    return found


def lists(given: Any) -> list[list[Any]]:
    """Return the list of lists that torch's C++ takes, where Python may give one list."""
    each: list[Any] = list(given)
    return [each] if not each or isinstance(each[0], torch.Tensor) else [list(tensors) for tensors in each]


def tensors_of(given: Any) -> list[Any]:
    """Return the list that one tensor or several were meant as."""
    return [given] if isinstance(given, torch.Tensor) else list(given)


def chunks(tensor: Any, count: int) -> list[Any]:
    """Return the `count` equal parts of a contiguous tensor, flat.

    Raises:
        ValueError: it has no such parts.
    """
    if tensor.numel() % count:
        raise ValueError(f"{tensor.numel()} elements cannot be cut into {count} equal parts")
    size = tensor.numel() // count
    flat = tensor.view(-1)
    return [flat[index * size : (index + 1) * size] for index in range(count)]


def portions(tensor: Any, sizes: Sequence[int], count: int) -> list[Any]:
    """Return the parts of a contiguous tensor of `sizes` rows each, flat; no sizes mean equal parts.

    Raises:
        ValueError: the sizes do not add up to the tensor.
    """
    rows = tensor.size(0) if tensor.dim() else 1
    if not sizes:
        if rows % count:
            raise ValueError(f"{rows} rows cannot be cut into {count} equal parts")
        sizes = [rows // count] * count
    if len(sizes) != count or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(f"split sizes {list(sizes)} do not cut {rows} rows into {count} parts")
    row = tensor.numel() // rows if rows else 0
    flat = tensor.view(-1)
    parts = []
    at = 0
    for size in sizes:
        parts.append(flat[at * row : (at + size) * row])
        at += size
    return parts


class StagedTensors:
    """The memory of one call: contiguous tensors, and where those made aside belong.

    Args:
        of: the reduction that it is for, if one. Complex numbers that are summed are pairs of real ones; those that
            would be multiplied or compared stay what they are, and are refused by the reduction.
    """

    def __init__(self, *, of: Reduction | None = None) -> None:
        self._pairs = of is not None and of.kind in _LINEAR
        self._device: Any = None
        self._made: list[tuple[Any, Any]] = []

    def source(self, tensor: Any) -> Any:
        """Return the memory of a tensor that is read only."""
        return self._as_real(self._plain(self._checked(tensor)))

    def target(self, tensor: Any, *, read: bool = False) -> Any:
        """Return the memory for a tensor that is to be filled, and that is read before if `read`."""
        self._checked(tensor)
        if not _plain(tensor):
            if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise ValueError("a tensor whose elements share memory cannot be filled")
            made = _plainly(tensor) if read else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self._made.append((tensor.detach(), made))
            tensor = made
        return self._as_real(tensor.detach())

    def settle(self, succeeded: bool) -> None:
        """Bring what was filled aside to where it belongs, or zeros where the call failed."""
        # The thread that comes by here has its own mode: tensors made in inference mode may be filled only in it.
        with torch.inference_mode():
            for given, made in self._made:
                if succeeded:
                    given.copy_(made)
                else:
                    given.zero_()
        self._made.clear()

    @property
    def made(self) -> bool:
        """Whether there is anything to settle."""
        return bool(self._made)

    def _checked(self, tensor: Any) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise refusal("the sealed backend moves dense tensors only", hint="make it dense: tensor.to_dense()")
        if tensor.device.type not in DEVICES:
            raise refusal(f"the sealed backend does not move tensors on {tensor.device.type}")
        if tensor.dtype not in ELEMENTS:
            raise refusal(f"the sealed backend does not move {str(tensor.dtype).removeprefix('torch.')}")
        if self._device is not None and tensor.device != self._device:
            raise ValueError(f"the tensors of one call lie on {self._device} and {tensor.device}")
        self._device = tensor.device
        return tensor

    def _plain(self, tensor: Any) -> Any:
        return tensor.detach() if _plain(tensor) else _plainly(tensor)

    def _as_real(self, tensor: Any) -> Any:
        return torch.view_as_real(tensor) if self._pairs and tensor.is_complex() else tensor


def _plain(tensor: Any) -> bool:
    """Return whether a tensor's memory holds its elements, in order, as they are."""
    return bool(tensor.is_contiguous()) and not tensor.is_conj() and not tensor.is_neg()


def _plainly(tensor: Any) -> Any:
    """Return a contiguous copy of a tensor whose memory is not plain."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
