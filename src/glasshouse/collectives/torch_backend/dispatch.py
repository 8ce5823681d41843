"""Torch's dispatcher, as far as it leads to a process group.

Some methods of a process group are called by torch's C++ without asking whether Python overrides them. Those arrive
at an operator of the namespace `c10d`, whose kernels would look for a backend beneath the group. As long as the fence
stands, they lead back to the sealed group's own methods.

Laws: an operator that moves tensors between ranks is led back or refused; one that a later torch adds is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from glasshouse.errors import Code, CollectiveError

__all__ = ["LOCAL", "NAMESPACES", "SEALED", "OperatorOverrides"]

NAMESPACES = ("c10d", "symm_mem")
LOCAL = frozenset(
    {"c10d::check_for_nan", "symm_mem::_async_input_mm", "symm_mem::memset32_", "symm_mem::stream_write_value32_"}
)
"""Operators of these namespaces that move nothing between ranks."""

_KEYS = ("CPU", "CUDA")
_UNSET = timedelta(milliseconds=-1)


class OperatorOverrides:
    """Kernels in the place of torch's own, until `remove`.

    Args:
        sealed: whether a process group is a sealed one.
    """

    def __init__(self, sealed: Callable[[Any], bool]) -> None:
        self._sealed = sealed
        self._libraries: dict[str, Any] = {}
        with warnings.catch_warnings():
            # Torch warns where one kernel takes another's place, as is meant here.
            warnings.simplefilter("ignore")
            for schema in torch._C._jit_get_all_schemas():
                self._close(schema)

    def remove(self) -> None:
        """Give torch its own kernels back."""
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()

    def _close(self, schema: Any) -> None:
        namespace, _, name = schema.name.partition("::")
        if schema.name in SEALED:
            kernel = self._led_back(SEALED[schema.name])
        elif namespace in NAMESPACES and schema.name not in LOCAL:
            kernel = _refusing(schema.name)
        else:
            return
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
        overload = f"{name}.{schema.overload_name}" if schema.overload_name else name
        for key in _KEYS:
            self._libraries[namespace].impl(overload, kernel, key, allow_override=True)

    def _led_back(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def led(*args: Any, **named: Any) -> Any:
            return kernel(self._group, *args, **named)

        return led

    def _group(self, given: Any) -> Any:
        """Return the sealed group that an operator's argument is, or the name of."""
        group = c10d._resolve_process_group(given) if isinstance(given, str) else dist.ProcessGroup.unbox(given)
        if not self._sealed(group):
            raise CollectiveError(Code.COLLECTIVE_UNSEALED, "this process has sealed groups, and this one is not")
        return group


def _refusing(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise CollectiveError(
            Code.COLLECTIVE_UNSEALED,
            f"the operator {name} is not sealed",
            hint="use the functions of torch.distributed",
        )

    return refused


def _boxed(work: Any) -> Any:
    """Return a work that keeps its Python half alive in C++; a subclass's own box would not."""
    return c10d.PythonCallbackWork(work.wait).boxed()


def _filled(options: Any, timeout: int, *, later: bool = True, **members: Any) -> Any:
    options.timeout = timedelta(milliseconds=timeout) if timeout > 0 else _UNSET
    options.asyncOp = later
    for name, value in members.items():
        setattr(options, name, value)
    return options


# Each takes what its operator takes, behind the function that finds the group. Operators whose reduction is an object
# of C++ that Python cannot look into are not among them, and refused; torch's own callers of those ask Python first.


def _allgather(find: Any, outputs: Any, inputs: Any, group: Any, later: bool = True, timeout: int = -1) -> Any:
    options = _filled(c10d.AllgatherOptions(), timeout, later=later)
    return outputs, _boxed(find(group).allgather(outputs, inputs, options))


def _allgather_base(find: Any, output: Any, given: Any, group: Any, later: bool = True, timeout: int = -1) -> Any:
    options = _filled(c10d.AllgatherOptions(), timeout, later=later)
    return output, _boxed(find(group)._allgather_base(output, given, options))


def _allgather_coalesced(find: Any, outputs: Any, inputs: Any, group: Any, later: bool = True) -> Any:
    options = _filled(c10d.AllgatherOptions(), -1, later=later)
    return _boxed(find(group).allgather_coalesced(outputs, inputs, options))


def _allgather_into_tensor_coalesced(find: Any, outputs: Any, inputs: Any, group: Any, later: bool = True) -> Any:
    options = _filled(c10d.AllgatherOptions(), -1, later=later)
    return _boxed(find(group).allgather_into_tensor_coalesced(outputs, inputs, options))


def _broadcast(
    find: Any, tensors: Any, group: Any, root: int, tensor: int, later: bool = True, timeout: int = -1
) -> Any:
    options = _filled(c10d.BroadcastOptions(), timeout, later=later, rootRank=root, rootTensor=tensor)
    return tensors, _boxed(find(group).broadcast(tensors, options))


def _gather(find: Any, outputs: Any, inputs: Any, group: Any, root: int, later: bool = True, timeout: int = -1) -> Any:
    options = _filled(c10d.GatherOptions(), timeout, later=later, rootRank=root)
    return _boxed(find(group).gather(outputs, inputs, options))


def _scatter(find: Any, outputs: Any, inputs: Any, group: Any, root: int, later: bool = True, timeout: int = -1) -> Any:
    options = _filled(c10d.ScatterOptions(), timeout, later=later, rootRank=root)
    return outputs, _boxed(find(group).scatter(outputs, inputs, options))


def _alltoall(find: Any, outputs: Any, inputs: Any, group: Any, later: bool = True, timeout: int = -1) -> Any:
    options = _filled(c10d.AllToAllOptions(), timeout, later=later)
    return outputs, _boxed(find(group).alltoall(outputs, inputs, options))


def _alltoall_base(
    find: Any,
    output: Any,
    given: Any,
    group: Any,
    output_sizes: Any,
    input_sizes: Any,
    later: bool = True,
    timeout: int = -1,
) -> Any:
    options = _filled(c10d.AllToAllOptions(), timeout, later=later)
    return _boxed(find(group).alltoall_base(output, given, output_sizes, input_sizes, options))


def _barrier(find: Any, tensor: Any, group: Any, devices: Any, later: bool = True, timeout: int = -1) -> Any:
    del tensor, devices
    return _boxed(find(group).barrier(_filled(c10d.BarrierOptions(), timeout, later=later)))


def _monitored_barrier(find: Any, tensor: Any, group: Any, devices: Any, timeout: int, wait_all_ranks: bool) -> None:
    del tensor, devices
    find(group).monitored_barrier(timedelta(milliseconds=timeout) if timeout > 0 else None, wait_all_ranks)


def _send(find: Any, tensors: Any, group: Any, destination: int, tag: int) -> Any:
    return _boxed(find(group).send(tensors, destination, tag))


def _recv(find: Any, tensors: Any, group: Any, source: int, tag: int) -> Any:
    return _boxed(find(group).recv(tensors, source, tag))


def _recv_any_source(find: Any, tensors: Any, group: Any, tag: int) -> Any:
    return _boxed(find(group).recv_anysource(tensors, tag))


def _reduce_scatter_tensor_out(find: Any, given: Any, op: str, size: int, group: Any, *, out: Any) -> Any:
    """Stand in for the one functional collective that goes around Python with a reduction: here it is still a word."""
    del size
    reduction = getattr(dist.ReduceOp, op.upper(), None)
    if reduction is None:
        raise CollectiveError(Code.COLLECTIVE_UNSEALED, f"the sealed backend does not reduce by {op}")
    options = _filled(c10d.ReduceScatterOptions(), -1, reduceOp=reduction)
    c10d._register_work(out, find(group)._reduce_scatter_base(out, given, options))
    return out


def _batch_p2p_ops(find: Any, ops: Any, peers: Any, tags: Any, tensors: Any, group: Any) -> list[Any]:
    """Begin several sends and receives; what is returned for each can be waited for, as torch's own does it."""
    found = find(group)
    results = []
    for op, peer, tag, tensor in zip(ops, peers, tags, tensors, strict=True):
        received = op == "irecv"
        result = tensor if received else tensor.new_empty(0)
        c10d._register_work(result, (found.recv if received else found.send)([tensor], peer, tag))
        results.append(result)
    return results


SEALED: dict[str, Callable[..., Any]] = {
    "_c10d_functional::batch_p2p_ops": _batch_p2p_ops,
    "_c10d_functional::reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
    "c10d::_allgather_base_": _allgather_base,
    "c10d::allgather_": _allgather,
    "c10d::allgather_coalesced_": _allgather_coalesced,
    "c10d::allgather_into_tensor_coalesced_": _allgather_into_tensor_coalesced,
    "c10d::alltoall_": _alltoall,
    "c10d::alltoall_base_": _alltoall_base,
    "c10d::barrier": _barrier,
    "c10d::broadcast_": _broadcast,
    "c10d::gather_": _gather,
    "c10d::monitored_barrier_": _monitored_barrier,
    "c10d::recv_": _recv,
    "c10d::recv_any_source_": _recv_any_source,
    "c10d::scatter_": _scatter,
    "c10d::send": _send,
}
"""Operators that lead back to a method of the group."""
