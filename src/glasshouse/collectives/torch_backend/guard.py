"""Keeps groups of another backend, RPC, and memory that GPUs share away from sealed groups.

Laws: as long as a process has a sealed group, torch makes no other way for tensors to leave it, in whichever order
they are asked for; init_process_group and new_group make no other group in a process that inherits its environment
either, to which torch's own checkpointing hands tensors. When the last sealed group is gone, torch is as it was. This
keeps a script from sending plaintext by mistake or by a default; against one that opens sockets of its own there is the
sandbox.
Operators of torch's dispatcher, by which its C++ calls a group without asking for Python's overrides, look for a
backend beneath it; with a sealed group they lead back to its own methods. One that moves tensors between ranks is led
back or refused; one that a later torch adds is refused.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from glasshouse.collectives.torch_backend import torch_hooks
from glasshouse.collectives.torch_backend.reach import NAME, PARENT_VARIABLE
from glasshouse.errors import Code, CollectiveError

LOCAL = frozenset(
    {"c10d::check_for_nan", "symm_mem::_async_input_mm", "symm_mem::memset32_", "symm_mem::stream_write_value32_"}
)
"""Operators of these namespaces that move nothing between ranks."""

_NAMESPACES = ("c10d", "symm_mem")
_OPTIONS = {"root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp", "timeout": "timeout"}

_groups: set[Any] = set()
_overrides: torch_hooks.Kernels | None = None


def check_backend(backend: str) -> None:
    """Check that a group of `backend` (torch's string) may be made now.

    Raises:
        CollectiveError: `collective-unsealed`, it mixes backends, or another than this process's groups have.
    """
    names = names_in(backend)
    if NAME in names:
        others = sorted(names - {NAME})
        if others:
            raise _refusal(f"a group is sealed for all of its devices or for none, not {NAME} and {', '.join(others)}")
        if torch_hooks.torchcomms_runs():
            raise _refusal("torchcomms replaces every backend of torch.distributed; a sealed group cannot use it")
    elif _groups:
        raise _refusal(f"a group of the backend {backend} would not be sealed, and this process's groups are")
    elif PARENT_VARIABLE in os.environ:
        raise _refusal(
            f"a group of the backend {backend} would not be sealed, and those of the process that started this one are",
            hint="asynchronous checkpoints can be written by a thread instead (AsyncCheckpointerType.THREAD); if"
            f" this process may send in plaintext, start it without {PARENT_VARIABLE} in its environment",
        )


def names_in(backend: str) -> set[str]:
    """Return the backends that torch's string names, of one or of several devices."""
    return {part.strip().rsplit(":", 1)[-1] for part in backend.lower().split(",")}


def check_unsealed() -> None:
    """Check that nothing of this process's could go around a sealed group.

    Raises:
        CollectiveError: `collective-unsealed`, there is a group of another backend, or RPC.
    """
    for group, backend in torch_hooks.groups():
        if group not in _groups:
            raise _refusal(f"there is a group of the backend {backend} already, which is not sealed")
    if torch_hooks.rpc_runs():
        raise _refusal("torch.distributed.rpc runs in this process, and is not sealed")


def add_group(group: Any) -> None:
    """Keep everything else out until `remove_group(group)`."""
    global _overrides
    torch_hooks.before_exits(_check_exit)
    _groups.add(group)
    os.environ.setdefault(PARENT_VARIABLE, str(os.getpid()))
    if _overrides is None:
        _overrides = _override_operators(lambda found: found in _groups)


def remove_group(group: Any) -> None:
    """Undo `add_group`; without effect for a group that was not added."""
    global _overrides
    _groups.discard(group)
    if not _groups and _overrides is not None:
        if os.environ.get(PARENT_VARIABLE) == str(os.getpid()):  # and not an ancestor's
            del os.environ[PARENT_VARIABLE]
        _overrides.remove()
        _overrides = None


def groups() -> tuple[Any, ...]:
    """Return the sealed groups of this process."""
    return tuple(_groups)


def _check_exit(what: str) -> None:
    if _groups:
        raise _refusal(f"{what} cannot be used beside a sealed group")


def _refusal(
    what: str, *, hint: str = "destroy the sealed group first, or use the backend `sealed` for all of them"
) -> CollectiveError:
    return CollectiveError(Code.COLLECTIVE_UNSEALED, what, hint=hint)


def _override_operators(sealed: Callable[[Any], bool]) -> torch_hooks.Kernels:
    """Put kernels in the place of torch's own, until their `remove`, for the groups that are `sealed`."""

    def find(given: Any) -> Any:
        group = torch_hooks.resolve(given)
        if not sealed(group):
            raise CollectiveError(Code.COLLECTIVE_UNSEALED, "this process has sealed groups, and this one is not")
        return group

    kernels = torch_hooks.Kernels()
    with warnings.catch_warnings():
        # Torch warns where one kernel takes another's place, as is meant here.
        warnings.simplefilter("ignore")
        for schema in torch_hooks.schemas():
            if schema.name in SEALED:
                kernels.replace(schema, functools.partial(SEALED[schema.name], find, schema))
            elif schema.name.partition("::")[0] in _NAMESPACES and schema.name not in LOCAL:
                kernels.replace(schema, functools.partial(_refuse, schema.name))
    return kernels


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise CollectiveError(
        Code.COLLECTIVE_UNSEALED, f"the operator {name} is not sealed", hint="use the functions of torch.distributed"
    )


# Operators whose reduction is an object of C++ that Python cannot look into are refused; torch's own callers of those
# ask Python first.


def _to(method: str, kind: Any = None) -> Callable[..., Any]:
    """Return a kernel that calls a method of the group with the operator's arguments.

    Those behind the group are members of the options, of torch's type `kind`, or follow the tensors.
    """

    def kernel(find: Callable[[Any], Any], schema: Any, *args: Any, **named: Any) -> Any:
        given = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
        given |= dict(zip((each.name for each in schema.arguments), args, strict=False)) | named
        names = [each.name for each in schema.arguments]
        at = names.index("process_group")
        tensors, behind = [given[name] for name in names[:at]], names[at + 1 :]
        more = [given[name] for name in behind if name not in _OPTIONS]
        if kind is not None:
            more.append(_options(kind(), **{_OPTIONS[name]: given[name] for name in behind if name in _OPTIONS}))
        work = torch_hooks.boxed(getattr(find(given["process_group"]), method)(*tensors, *more))
        return (tensors[0], work) if len(schema.returns) > 1 else work

    return kernel


def _options(options: Any, *, timeout: int = -1, **members: Any) -> Any:
    options.timeout = timedelta(milliseconds=timeout if timeout > 0 else -1)
    for name, value in members.items():
        setattr(options, name, value)
    return options


def _barrier(find: Any, _: Any, _tensor: Any, group: Any, _devices: Any, later: bool = True, timeout: int = -1) -> Any:
    options = _options(c10d.BarrierOptions(), timeout=timeout, asyncOp=later)
    return torch_hooks.boxed(find(group).barrier(options))


def _monitored_barrier(
    find: Any, _: Any, _tensor: Any, group: Any, _devices: Any, timeout: int, wait_all_ranks: bool
) -> None:
    find(group).monitored_barrier(timedelta(milliseconds=timeout) if timeout > 0 else None, wait_all_ranks)


def _reduce_scatter_tensor_out(find: Any, _: Any, given: Any, op: str, _size: int, group: Any, *, out: Any) -> Any:
    """Stand in for the one functional collective that goes around Python with a reduction: here it is still a word."""
    reduction = getattr(dist.ReduceOp, op.upper(), None)
    if reduction is None:
        raise CollectiveError(Code.COLLECTIVE_UNSEALED, f"the sealed backend does not reduce by {op}")
    options = _options(c10d.ReduceScatterOptions(), asyncOp=True, reduceOp=reduction)
    torch_hooks.register_work(out, find(group)._reduce_scatter_base(out, given, options))
    return out


def _batch_p2p_ops(find: Any, _: Any, ops: Any, peers: Any, tags: Any, tensors: Any, group: Any) -> list[Any]:
    """Begin several sends and receives; each result can be waited for, as torch's own."""
    found = find(group)
    results = []
    for op, peer, tag, tensor in zip(ops, peers, tags, tensors, strict=True):
        received = op == "irecv"
        result = tensor if received else tensor.new_empty(0)
        torch_hooks.register_work(result, (found.recv if received else found.send)([tensor], peer, tag))
        results.append(result)
    return results


SEALED: dict[str, Callable[..., Any]] = {
    "_c10d_functional::batch_p2p_ops": _batch_p2p_ops,
    "_c10d_functional::reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
    "c10d::_allgather_base_": _to("_allgather_base", c10d.AllgatherOptions),
    "c10d::allgather_": _to("allgather", c10d.AllgatherOptions),
    "c10d::allgather_coalesced_": _to("allgather_coalesced", c10d.AllgatherOptions),
    "c10d::allgather_into_tensor_coalesced_": _to("allgather_into_tensor_coalesced", c10d.AllgatherOptions),
    "c10d::alltoall_": _to("alltoall", c10d.AllToAllOptions),
    "c10d::alltoall_base_": _to("alltoall_base", c10d.AllToAllOptions),
    "c10d::barrier": _barrier,
    "c10d::broadcast_": _to("broadcast", c10d.BroadcastOptions),
    "c10d::gather_": _to("gather", c10d.GatherOptions),
    "c10d::monitored_barrier_": _monitored_barrier,
    "c10d::recv_": _to("recv"),
    "c10d::recv_any_source_": _to("recv_anysource"),
    "c10d::scatter_": _to("scatter", c10d.ScatterOptions),
    "c10d::send": _to("send"),
}
"""Operators that lead back to a method of the group."""
