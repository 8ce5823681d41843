"""Every private name of torch that sealed collectives use; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._dynamo import eval_frame
from torch.distributed import distributed_c10d

Work: Any = dist._Work  # the base of what a process group's methods return

_Class = TypeVar("_Class", bound=type)
_MARK = "_glasshouse_sealed"


def eager(owner: _Class) -> _Class:
    """Make the methods of a class, and all that they call, run as written, also amid code that is being compiled.

    Torch's C++ calls them from there: DistributedDataParallel's reducer within a compiled forward, for instance.
    torch.compiler.disable would do the same and import the compiler, which takes seconds.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(owner).values():
        if inspect.isfunction(member):
            eval_frame.set_code_exec_strategy(member.__code__, skip)
    return owner


def before_groups(choose: Callable[[str, Any], tuple[str, Any]]) -> None:
    """Have torch make each group with the backend and the options that `choose(backend, options)` returns."""

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(size: Any, rank: Any, ranks: Any, backend: Any, *more: Any, **named: Any) -> Any:
            chosen, named["backend_options"] = choose(str(backend), named.get("backend_options"))
            return original(size, rank, ranks, chosen, *more, **named)

        return make

    _replace(distributed_c10d, "_new_process_group_helper", made)


def instead_of_monitored_barrier(do: Callable[[Any, Any, bool], bool]) -> None:
    """Have `do(group, timeout, wait_all_ranks)` take the place of torch's function, which is for gloo alone.

    It returns False for a group that it leaves to torch's.
    """

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
            if not do(dist.group.WORLD if group is None else group, timeout, wait_all_ranks):
                original(group, timeout, wait_all_ranks)

        return monitored_barrier

    for owner in (distributed_c10d, dist):
        _replace(owner, "monitored_barrier", made)


def instead_of_async_save(saver: Any, save: Callable[..., Any]) -> None:
    """Have `save(torch's own, …)` take the place of `async_save` in torch.distributed.checkpoint.state_dict_saver."""
    _replace(saver, "async_save", lambda original: functools.partial(save, original))


def instead_of_rendezvous(store: Callable[[], Callable[[], object] | None]) -> None:
    """Have torch's rendezvous by environment or address end at what `store()` makes, where that is not None."""

    def before(*_: Any, **__: Any) -> object:
        own = store()
        return None if own is None else own()

    # A name that its package gives to a function.
    _intercept(sys.modules["torch.distributed.rendezvous"], "_create_c10d_store", before)


def before_exits(check: Callable[[str], None]) -> None:
    """Call `check(what)` before torch makes another way for tensors to leave this process, once for the process."""
    exits = [  # groups of torch.distributed._dist2 take their backends by `_register_backend`
        (dist.ProcessGroup, "_register_backend", "a backend that is not sealed"),
        (c10d._SymmetricMemory, "rendezvous", "symmetric memory"),
        (c10d._SymmetricMemory, "set_group_info", "symmetric memory"),
    ]
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and hasattr(rpc, "init_rpc"):  # not every torch has it
        exits.append((rpc, "init_rpc", "torch.distributed.rpc"))
        exits.append((sys.modules["torch.distributed.rpc.backend_registry"], "init_backend", "torch.distributed.rpc"))
    for owner, name, what in exits:

        def before(*_: Any, _what: str = what, **__: Any) -> None:
            check(_what)

        _intercept(owner, name, before, static=owner is c10d._SymmetricMemory)


def groups() -> Iterable[tuple[Any, str]]:
    """Return the groups of this process, each with the name of its backend."""
    return [(group, backend) for group, (backend, _) in distributed_c10d._world.pg_map.items()]


def rpc_runs() -> bool:
    """Return whether torch.distributed.rpc was started in this process."""
    api = sys.modules.get("torch.distributed.rpc.api")
    return api is not None and bool(getattr(api, "_is_current_rpc_agent_set", bool)())


def torchcomms_runs() -> bool:
    """Return whether torchcomms replaces every backend of torch.distributed."""
    return bool(getattr(distributed_c10d, "_use_torchcomms_enabled", bool)())


def premultiplier(op: Any) -> Any:
    """Return the factor of a `premul_sum`, None where none was given; pickling shows it in every torch."""
    return op.__getstate__()[1] if hasattr(op, "op") else None


def schemas() -> Iterable[Any]:
    """Return the schema of every operator of torch."""
    found: Iterable[Any] = torch._C._jit_get_all_schemas()
    return found


def resolve(given: Any) -> Any:
    """Return the process group that an operator's argument is, or the name of."""
    return c10d._resolve_process_group(given) if isinstance(given, str) else dist.ProcessGroup.unbox(given)


def boxed(work: Any) -> Any:
    """Return a work that keeps its Python half alive in C++; a subclass's own box would not."""
    return c10d.PythonCallbackWork(work.wait).boxed()


def register_work(tensor: Any, work: Any) -> None:
    """Have `wait_tensor(tensor)` wait for a work."""
    c10d._register_work(tensor, work)


def register_outputs(outputs: Iterable[Any], work: Any) -> None:
    """Register the tensors among a work's outputs, where those of collectives under way may go into a graph."""
    if c10d._allow_inflight_collective_as_graph_input():
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor):
                register_work(tensor, work)


class Kernels:
    """Kernels in the place of torch's own, until `remove`."""

    def __init__(self) -> None:
        self._libraries: dict[str, Any] = {}

    def replace(self, schema: Any, kernel: Callable[..., Any]) -> None:
        """Put a kernel in the place of an operator's on CPUs and CUDA devices."""
        namespace, _, name = schema.name.partition("::")
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
        overload = f"{name}.{schema.overload_name}" if schema.overload_name else name
        for key in ("CPU", "CUDA"):
            self._libraries[namespace].impl(overload, kernel, key, allow_override=True)

    def remove(self) -> None:
        """Give torch its own kernels back."""
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()


def _intercept(owner: Any, name: str, before: Callable[..., Any], *, static: bool = False) -> None:
    """Call `before` ahead of a function of torch's, and in its place where it returns a value."""

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def intercepted(*args: Any, **named: Any) -> Any:
            instead = before(*args, **named)
            return original(*args, **named) if instead is None else instead

        return intercepted

    _replace(owner, name, made, static=static)


def _replace(
    owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]], *, static: bool = False
) -> None:
    """Put what `made` makes of a function of torch's in its place, once for the process."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    replacement = functools.update_wrapper(made(original), original)
    setattr(replacement, _MARK, True)
    setattr(owner, name, staticmethod(replacement) if static else replacement)
