"""Torch's ways to say the same thing, and what is no sense in them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.protocol.headers import ReductionCode
from glasshouse.collectives.torch_backend.arguments import StagedTensors, portions, reduction
from glasshouse.collectives.torch_backend.process_group import SealedGroup
from glasshouse.errors import Code, CollectiveError
from simulators.sealed_engines import NotingEngine

T = torch.ones
SHORT = timedelta(seconds=3)
MAX = dist.ReduceOp.MAX


def with_options(kind: Any, **members: Any) -> Any:
    options = kind()
    for name, value in members.items():
        setattr(options, name, value)
    return options


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.allreduce(T(2), MAX, SHORT),
        lambda g: g.allreduce([T(2)], op=MAX, timeout=SHORT),
        lambda g: g.allreduce([T(2)], with_options(c10d.AllreduceOptions, reduceOp=MAX, timeout=SHORT)),
        lambda g: g.reduce(T(2), 0, MAX, SHORT),
        lambda g: g.reduce(T(2), root=0, op=MAX, timeout=SHORT),
        lambda g: g.reduce_scatter(T(2), [T(2)], MAX, SHORT),
        lambda g: g.broadcast(T(2), 0, SHORT),
        lambda g: g.broadcast(T(2), root=0, timeout=SHORT),
        lambda g: g.allgather([T(2)], T(2), timeout=SHORT),
        lambda g: g.gather([T(2)], T(2), 0, SHORT),
        lambda g: g.scatter(T(2), [T(2)], root=0, timeout=SHORT),
        lambda g: g.barrier(timeout=SHORT),
        lambda g: g.monitored_barrier(SHORT),
    ],
)
def test_each_of_torchs_overloads_is_understood(call: Callable[[SealedGroup], Any]) -> None:
    engine = NotingEngine()
    call(SealedGroup(engine, timeout_s=30.0))
    ((_, timeout_s, _),) = engine.given
    assert timeout_s == 3.0


def test_the_groups_timeout_can_be_changed_and_serves_where_none_is_given() -> None:
    engine = NotingEngine()
    group = SealedGroup(engine, timeout_s=30.0)
    group.barrier()
    group.set_timeout(timedelta(seconds=9))
    group.barrier()
    assert [timeout_s for _, timeout_s, _ in engine.given] == [30.0, 9.0]


def test_who_waits_at_once_is_not_driven_in_the_background() -> None:
    engine = NotingEngine()
    group = SealedGroup(engine)
    group.allreduce([T(1)], with_options(c10d.AllreduceOptions, asyncOp=False))
    group.allreduce([T(1)], with_options(c10d.AllreduceOptions, asyncOp=True))
    assert [background for _, _, background in engine.given] == [False, True]
    assert engine.begun[0].waited_s


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda g: g.broadcast(T(2), 1), ValueError),
        (lambda g: g.reduce(T(2), -1), ValueError),
        (lambda g: g.broadcast(T(2), colour="red"), TypeError),
        (lambda g: g.allreduce(T(2), op=MAX, colour="red"), TypeError),
        (lambda g: g.alltoall([T(2), T(2)], [T(2), T(2)]), ValueError),
        (lambda g: g.allgather_coalesced([[T(2)]], [T(2), T(2)]), ValueError),
        (lambda g: g.all_to_all_single(T(3), T(3), [2], [3]), ValueError),
        (lambda g: g.allreduce([T(2), torch.ones(2, device="meta")]), CollectiveError),
        (lambda g: g._end_coalescing(torch.device("cpu")), ValueError),
    ],
)
def test_calls_without_sense_reach_nobody(call: Callable[[SealedGroup], Any], error: type[Exception]) -> None:
    engine = NotingEngine()
    with pytest.raises(error):
        call(SealedGroup(engine))
    assert not engine.given


def test_reductions_are_torchs() -> None:
    assert reduction(dist.ReduceOp.SUM) == Reduction(kind=ReductionCode.SUM)
    assert reduction(c10d._make_nccl_premul_sum(0.25)) == Reduction(kind=ReductionCode.PREMUL_SUM, factor=0.25)
    assert reduction(c10d._make_nccl_premul_sum(torch.tensor([0.5]))).factor.item() == 0.5
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR, dist.ReduceOp.PREMUL_SUM):
        with pytest.raises(CollectiveError) as refused:
            reduction(op)
        assert refused.value.code is Code.COLLECTIVE_UNSEALED


def test_complex_numbers_are_summed_as_pairs_and_never_multiplied_or_compared_as_such() -> None:
    number = torch.tensor([1 + 2j])
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, c10d._make_nccl_premul_sum(2.0)):
        assert StagedTensors(of=reduction(op)).target(number).tolist() == [[1.0, 2.0]]
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        assert StagedTensors(of=reduction(op)).target(number).is_complex()
    with pytest.raises(CollectiveError):
        reduction(c10d._make_nccl_premul_sum(torch.tensor([1j])))


def test_rows_are_cut_by_their_sizes() -> None:
    tensor = torch.arange(12.0).view(4, 3)
    assert [len(part) for part in portions(tensor, [1, 0, 3], 3)] == [3, 0, 9]
    assert [len(part) for part in portions(tensor, [], 2)] == [6, 6]
    assert [len(part) for part in portions(torch.zeros(0, 3), [], 2)] == [0, 0]
    for sizes in ([1, 2], [5, -1], [1, 1, 2]):
        with pytest.raises(ValueError, match="do not cut"):
            portions(tensor, sizes, 2)
    with pytest.raises(ValueError, match="equal parts"):
        portions(tensor, [], 3)


def test_memory_that_holds_the_elements_as_they_are_is_used_itself() -> None:
    staged = StagedTensors()
    plain = torch.zeros(4, 2)
    assert staged.target(plain).data_ptr() == plain.data_ptr()
    assert staged.source(plain[1:]).data_ptr() == plain[1:].data_ptr()
    assert not staged.made
    crossed = torch.arange(8.0).view(4, 2).t()
    aside = staged.target(crossed, read=True)
    assert aside.is_contiguous()
    assert torch.equal(aside, crossed)
    assert staged.made
    aside.fill_(5)
    staged.settle(True)
    assert (crossed == 5).all()
    assert not staged.made
