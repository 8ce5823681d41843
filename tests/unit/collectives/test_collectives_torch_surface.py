"""Everything that torch offers on a process group is sealed or refused; what a later torch adds fails here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from glasshouse.collectives.torch_backend import guard, torch_hooks
from glasshouse.collectives.torch_backend.group_base import GroupBase
from glasshouse.collectives.torch_backend.guard import LOCAL, SEALED
from glasshouse.collectives.torch_backend.process_group import SealedGroup
from glasshouse.errors import Code, CollectiveError
from simulators.sealed_engines import NotingEngine

T = torch.ones

MOVES: dict[str, Callable[[Any], Any]] = {
    "_allgather_base": lambda g: g._allgather_base(T(2), T(2)),
    "_reduce_scatter_base": lambda g: g._reduce_scatter_base(T(2), T(2)),
    "all_gather_single": lambda g: g.all_gather_single(T(2), T(2)),
    "all_gather_single_coalesced": lambda g: g.all_gather_single_coalesced([T(2)], [T(2)]),
    "all_to_all_single": lambda g: g.all_to_all_single(T(2), T(2), [], []),
    "allgather": lambda g: g.allgather([[T(2)]], [T(2)]),
    "allgather_coalesced": lambda g: g.allgather_coalesced([[T(2)]], [T(2)]),
    "allgather_into_tensor_coalesced": lambda g: g.allgather_into_tensor_coalesced([T(2)], [T(2)]),
    "allreduce": lambda g: g.allreduce([T(2)]),
    "allreduce_coalesced": lambda g: g.allreduce_coalesced([T(2), T(3)]),
    "alltoall": lambda g: g.alltoall([T(2)], [T(2)]),
    "alltoall_base": lambda g: g.alltoall_base(T(2), T(2), [2], [2]),
    "barrier": lambda g: g.barrier(),
    "broadcast": lambda g: g.broadcast([T(2)]),
    "gather": lambda g: g.gather([[T(2)]], [T(2)]),
    "monitored_barrier": lambda g: g.monitored_barrier(),
    "recv": lambda g: g.recv([T(2)], 0, 0),
    "recv_anysource": lambda g: g.recv_anysource([T(2)], 0),
    "reduce": lambda g: g.reduce([T(2)]),
    "reduce_scatter": lambda g: g.reduce_scatter([T(2)], [[T(2)]]),
    "reduce_scatter_single": lambda g: g.reduce_scatter_single(T(2), T(2)),
    "reduce_scatter_single_coalesced": lambda g: g.reduce_scatter_single_coalesced([T(2)], [T(2)]),
    "reduce_scatter_tensor_coalesced": lambda g: g.reduce_scatter_tensor_coalesced([T(2)], [T(2)]),
    "scatter": lambda g: g.scatter([T(2)], [[T(2)]]),
    "send": lambda g: g.send([T(2)], 0, 0),
}
"""Methods that move tensors, and how to call each."""

REFUSED: dict[str, Callable[[Any], Any]] = {
    "_enable_collectives_timing": lambda g: g._enable_collectives_timing(),
    "_register_backend": lambda g: g._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, None),
    "_register_on_completion_hook": lambda g: g._register_on_completion_hook(print),
    "_wait_for_pending_works": lambda g: g._wait_for_pending_works(),
    "merge_remote_group": lambda g: g.merge_remote_group(None, 2),
    "split_group": lambda g: g.split_group([0]),
}
"""Methods that the sealed group does not have, and how to call each."""

KNOWS = {
    "_backend_id", "_device_types", "_end_coalescing", "_get_backend", "_get_backend_name",
    "_get_sequence_number_for_group", "_has_hooks", "_set_group_desc", "_set_group_name",
    "_set_sequence_number_for_group", "_start_coalescing", "abort", "get_group_store", "group_desc", "group_name",
    "name", "set_timeout", "shutdown", "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip
"""Members that move nothing, which the sealed group answers itself: torch's own look at a backend beneath."""

INHERITED = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_id", "_pybind11_conduit_v1_",
    "_set_default_backend", "bound_device_id", "boxed", "rank", "size", "unbox",
}  # fmt: skip
"""Members that move nothing and look at nothing beneath."""


@pytest.fixture
def engine() -> NotingEngine:
    return NotingEngine()


@pytest.fixture
def group(engine: NotingEngine) -> Iterator[SealedGroup]:
    """A sealed group that this process holds, known to torch's operators by its name."""
    made = SealedGroup(engine, name="the group", timeout_s=30.0)
    guard.add_group(made)
    c10d._register_process_group("the group", made)
    yield made
    c10d._unregister_process_group("the group")
    guard.remove_group(made)


def test_every_member_of_torchs_process_group_is_judged() -> None:
    offered = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
    unjudged = offered - MOVES.keys() - REFUSED.keys() - KNOWS - INHERITED
    assert not unjudged, "torch has new members: seal or refuse them"
    inherited = {name for name in offered - INHERITED if name not in vars(SealedGroup) | vars(GroupBase)}
    assert not inherited, "these would be torch's own"


def test_private_names_of_torch_stand_in_one_file() -> None:
    private = re.compile(r"\b(torch|dist|distributed|c10d|distributed_c10d|_C)\._\w|(from|import) torch\S*\._")
    room = Path(torch_hooks.__file__).parent.parent
    assert {path.name for path in room.rglob("*.py") if private.search(path.read_text())} == {"torch_hooks.py"}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_tensors_goes_to_the_engine(name: str, group: SealedGroup, engine: NotingEngine) -> None:
    MOVES[name](group)
    assert engine.given
    assert all(timeout == 30.0 for _, timeout, _ in engine.given)


@pytest.mark.parametrize("name", sorted(MOVES.keys() & vars(dist.ProcessGroup).keys()))
def test_what_moves_tensors_goes_to_the_engine_when_cpp_does_not_ask_python(
    name: str, group: SealedGroup, engine: NotingEngine
) -> None:
    class Cpp:
        """Calls torch's own methods on the group, as its C++ does."""

        def __getattr__(self, method: str) -> Callable[..., Any]:
            own = getattr(dist.ProcessGroup, method)
            return lambda *args: own(group, *args)

    if name in {"_reduce_scatter_base", "reduce", "reduce_scatter_single"}:
        # Their C++ names the reduction by an object that Python cannot look into.
        with pytest.raises(CollectiveError) as refused:
            MOVES[name](Cpp())
        assert refused.value.code is Code.COLLECTIVE_UNSEALED
        assert not engine.given
    else:
        MOVES[name](Cpp())
        assert engine.given


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_group_does_not_have_is_refused(name: str, group: SealedGroup, engine: NotingEngine) -> None:
    with pytest.raises(CollectiveError) as refused:
        REFUSED[name](group)
    assert refused.value.code is Code.COLLECTIVE_UNSEALED
    assert not engine.given


OPERATORS = {
    f"{schema.name}.{schema.overload_name}": schema
    for schema in torch._C._jit_get_all_schemas()
    if re.match(r"(c10d|_?c10d_functional\w*|symm_mem|_dtensor)::", schema.name)
    # What Python itself built on the operators below.
    and not {"tag", "ranks"} <= {each.name for each in schema.arguments}
}

HARMLESS = LOCAL | {
    "_c10d_functional::_wrap_tensor_autograd",
    "_c10d_functional::wait_tensor",
    "c10d_functional::wait_tensor",
}


def argument(name: str, kind: str, group: SealedGroup) -> Any:
    """Return something that fits an operator's argument."""
    if name in {"group_name", "process_group"}:
        return "the group" if name == "group_name" else group.boxed()
    if name in {"group_size", "output_split_sizes", "input_split_sizes"}:
        return 1 if name == "group_size" else [2]
    special = {"reduce_op": "sum", "op_list": ["isend"], "peer_list": [0], "tag_list": [0], "timeout": 1000}
    if name in special and "ReduceOp" not in kind:
        return special[name]
    if "ReduceOp" in kind:
        return torch.classes.c10d.ReduceOp()
    plain: dict[str, Any] = {
        "Tensor": T(2), "Optional[Tensor]": None, "List[Tensor]": [T(2)], "List[List[Tensor]]": [[T(2)]],
        "int": 0, "bool": True, "List[int]": [0], "str": "sum", "Optional[str]": None, "Optional[int]": None,
        "Optional[List[int]]": None,
    }  # fmt: skip
    return plain[kind]


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_operator_of_torch_between_ranks_is_sealed_or_refused(
    name: str, group: SealedGroup, engine: NotingEngine
) -> None:
    schema = OPERATORS[name]
    if schema.name in HARMLESS:
        return
    if any("SymmetricMemory" in str(given.type) for given in schema.arguments):
        # There is none to give it: the one way to get one is refused.
        with pytest.raises(CollectiveError):
            c10d._SymmetricMemory.rendezvous(T(2), "the group")
        return
    operator = getattr(torch.ops, schema.name.split("::")[0])
    operator = getattr(getattr(operator, schema.name.split("::")[1]), schema.overload_name or "default")
    positional = [argument(each.name, str(each.type), group) for each in schema.arguments if not each.kwarg_only]
    named = {each.name: argument(each.name, str(each.type), group) for each in schema.arguments if each.kwarg_only}
    refused, result = None, None
    try:
        result = operator(*positional, **named)
    except CollectiveError as error:
        refused = error.code
    assert refused in {None, Code.COLLECTIVE_UNSEALED}
    assert (refused is None) == bool(engine.given), "it went neither to the engine nor was it refused"
    if refused is None:
        for tensor in [*positional, *(result if isinstance(result, list | tuple) else [result])]:
            if isinstance(tensor, torch.Tensor):
                torch.ops._c10d_functional.wait_tensor(tensor)
        assert not c10d._get_work_registry_size()


def test_there_are_operators_to_judge() -> None:
    names = {schema.name for schema in OPERATORS.values()}
    assert SEALED.keys() - names <= {"_c10d_functional::batch_p2p_ops"}, "torch 2.11 does not have this one"
    assert len(names) > 60


def test_a_group_that_is_not_sealed_is_refused_by_the_operators(group: SealedGroup, engine: NotingEngine) -> None:
    stranger = dist.ProcessGroup(0, 1)
    with pytest.raises(CollectiveError) as refused:
        torch.ops.c10d.broadcast_([T(2)], stranger.boxed(), 0, 0)
    assert refused.value.code is Code.COLLECTIVE_UNSEALED
    assert not engine.given


def test_torch_has_its_own_operators_back_when_the_last_sealed_group_is_gone(engine: NotingEngine) -> None:
    group = SealedGroup(engine, name="short")
    guard.add_group(group)
    guard.remove_group(group)
    with pytest.raises(RuntimeError, match="No backend type associated") as torchs:
        dist.ProcessGroup.gather(group, [[T(2)]], [T(2)])
    assert not isinstance(torchs.value, CollectiveError)
