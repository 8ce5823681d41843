"""The arguments of torch's calls: options as values, tensors as contiguous memory that the engine may use.

Laws: a tensor that cannot be sealed is refused, never copied elsewhere in the clear; a copy made beside a caller's
tensor lies on the same device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.operations.regions import ELEMENTS
from glasshouse.collectives.protocol.headers import ReductionCode
from glasshouse.collectives.torch_backend.torch_hooks import premultiplier
from glasshouse.errors import Code, CollectiveError

_DEVICES = frozenset({"cpu", "cuda"})
_KINDS = {getattr(dist.ReduceOp, kind.name): kind for kind in ReductionCode if kind is not ReductionCode.NONE}
_LINEAR = frozenset({ReductionCode.SUM, ReductionCode.AVG, ReductionCode.PREMUL_SUM})


def refusal(what: str, *, hint: str = "") -> CollectiveError:
    """Return the error for what the sealed backend does not do."""
    return CollectiveError(Code.COLLECTIVE_UNSEALED, what, hint=hint)


def reduction(op: Any) -> Reduction:
    """Return torch's reduce operation as a `Reduction`.

    Raises:
        CollectiveError: `collective-unsealed`, one that is not offered.
    """
    kind = _KINDS.get(getattr(op, "op", op))
    if kind is None:
        name = str(getattr(op, "op", op)).rsplit(".", 1)[-1]
        offered = ", ".join(each.name.lower() for each in _KINDS.values())
        raise refusal(f"the sealed backend does not reduce by {name}; it offers {offered}")
    if kind is not ReductionCode.PREMUL_SUM:
        return Reduction(kind=kind)
    factor = premultiplier(op)
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
    """Return options from any of torch's three ways to name a reduction: in the options, in their place, or as `op`."""
    if opts is not None and not isinstance(opts, (kind, c10d.AllreduceOptions, c10d.AllreduceCoalescedOptions)):
        given, opts = {"op": opts, **given}, None
    found = options(kind, opts, timeout)
    if "op" in given:
        found.reduceOp = given.pop("op")
    if given:
        raise TypeError(f"unexpected arguments: {', '.join(given)}")
    return found


def rooted(kind: Any, opts: Any, timeout: timedelta | None, given: dict[str, Any], size: int) -> Any:
    """Return options from any of torch's three ways to name a root: in the options, in their place, or as `root`."""
    if isinstance(opts, int):
        given, opts = {"root": opts, **given}, None
    root = given.pop("root", None)
    found = reducing(kind, opts, timeout, given)
    if root is not None:
        found.rootRank = root
    if not 0 <= found.rootRank < size:
        raise ValueError(f"root {found.rootRank} is not a rank of a group of {size}")
    return found


def lists(given: Any) -> list[list[Any]]:
    """Return the list of lists that torch's C++ takes, where Python may give one list."""
    each: list[Any] = list(given)
    return [each] if not each or isinstance(each[0], torch.Tensor) else [list(tensors) for tensors in each]


def tensors_of(given: Any) -> list[Any]:
    """Return one tensor or several as a list."""
    return [given] if isinstance(given, torch.Tensor) else list(given)


def portions(tensor: Any, sizes: Sequence[int], count: int) -> list[Any]:
    """Return the parts of a contiguous tensor of `sizes` rows each, flat; no sizes mean equal parts."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not sizes:
        if rows % count:
            raise ValueError(f"{rows} rows cannot be cut into {count} equal parts")
        sizes = [rows // count] * count
    if len(sizes) != count or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(f"split sizes {list(sizes)} do not cut {rows} rows into {count} parts")
    row = tensor.numel() // rows if rows else 0
    return list(tensor.view(-1).split([size * row for size in sizes]))


class StagedTensors:
    """The memory of one call: contiguous tensors, and the copies that were made of others.

    Args:
        of: the reduction that it is for, if one. Complex numbers that are summed are pairs of real ones; those that
            would be multiplied or compared stay as they are, and are refused by the reduction.
    """

    def __init__(self, *, of: Reduction | None = None) -> None:
        self._pairs = of is not None and of.kind in _LINEAR
        self._device: Any = None
        self._made: list[tuple[Any, Any]] = []

    def source(self, tensor: Any) -> Any:
        """Return the memory of a tensor that is read only."""
        self._check(tensor)
        return self._as_real(tensor.detach() if _plain(tensor) else _plainly(tensor))

    def sources(self, tensors: Iterable[Any]) -> list[Any]:
        """Return the memory of several tensors that are read only."""
        return [self.source(tensor) for tensor in tensors]

    def target(self, tensor: Any, *, read: bool = False) -> Any:
        """Return the memory for a tensor that is to be filled, and that is read before if `read`."""
        self._check(tensor)
        if not _plain(tensor):
            if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise ValueError("a tensor whose elements share memory cannot be filled")
            made = _plainly(tensor) if read else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self._made.append((tensor.detach(), made))
            tensor = made
        return self._as_real(tensor.detach())

    def targets(self, tensors: Iterable[Any]) -> list[Any]:
        """Return the memory for several tensors that are to be filled."""
        return [self.target(tensor) for tensor in tensors]

    def settle(self, succeeded: bool) -> None:
        """Copy results from copies to the caller's tensors, or zero those where the call failed."""
        # The calling thread has its own mode: tensors made in inference mode may be filled only in it.
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

    def _check(self, tensor: Any) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise refusal("the sealed backend moves dense tensors only", hint="make it dense: tensor.to_dense()")
        if tensor.device.type not in _DEVICES:
            raise refusal(f"the sealed backend does not move tensors on {tensor.device.type}")
        if tensor.dtype not in ELEMENTS:
            raise refusal(f"the sealed backend does not move {str(tensor.dtype).removeprefix('torch.')}")
        if self._device is not None and tensor.device != self._device:
            raise ValueError(f"the tensors of one call lie on {self._device} and {tensor.device}")
        self._device = tensor.device

    def _as_real(self, tensor: Any) -> Any:
        return torch.view_as_real(tensor) if self._pairs and tensor.is_complex() else tensor


def _plain(tensor: Any) -> bool:
    """Return whether a tensor's memory holds its elements, in order, as they are."""
    return bool(tensor.is_contiguous()) and not tensor.is_conj() and not tensor.is_neg()


def _plainly(tensor: Any) -> Any:
    """Return a contiguous copy of a tensor whose memory is not plain."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
