"""Reductions: every rank has the same bits, and they are those of the sum in rank order."""

from __future__ import annotations

from functools import reduce as fold_left
from typing import Any

import pytest
import torch

from benchmarks.collectives import ring
from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations import plans
from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.protocol.headers import Algorithm, ReductionCode
from glasshouse.errors import Code, CollectiveError
from simulators.engine_ranks import in_ranks, operate

SUM = Reduction(kind=ReductionCode.SUM)
SMALL = 64 << 10
"""Many chunks for few bytes."""
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]


def contribution(rank: int, elements: int, dtype: Any) -> Any:
    numbers = torch.randn(elements, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64) * 3
    return numbers.abs().to(dtype) if dtype is torch.uint8 else numbers.to(dtype)


def in_rank_order(parts: list[Any]) -> Any:
    """Return the sum that is promised: left to right, narrow numbers in float32 and rounded once."""
    wide = [part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in parts]
    return fold_left(torch.add, wide).to(parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", [None, Algorithm.ONE_SHOT, Algorithm.DIRECT], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_have_the_bits_of_the_sum_in_rank_order(size: int, algorithm: Algorithm | None, dtype: Any) -> None:
    for elements in (1, 1000, 300_001):
        parts = [contribution(rank, elements, dtype) for rank in range(size)]
        expected = in_rank_order(parts)

        def story(engine: Engine, parts: list[Any] = parts) -> Any:
            tensor = parts[engine.rank].clone()
            operate(engine, ring.all_reduce([tensor], SUM, algorithm))
            return tensor

        for result in in_ranks(size, story, chunk_bytes=SMALL):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.SERIAL], ids=lambda one: one.name)
@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_has_the_same_bits_on_all_ranks(size: int, algorithm: Algorithm) -> None:
    parts = [contribution(rank, 300_001, torch.float32) for rank in range(size)]

    def story(engine: Engine) -> Any:
        tensor = parts[engine.rank].clone()
        tiny = parts[engine.rank][:2].clone()
        operate(engine, ring.all_reduce([tensor], SUM, algorithm), ring.all_reduce([tiny], SUM, algorithm))
        return tensor, tiny

    results = in_ranks(size, story, chunk_bytes=SMALL)
    for tensor, tiny in results:
        assert torch.equal(tensor, results[0][0])
        torch.testing.assert_close(tensor, in_rank_order(parts))
        torch.testing.assert_close(tiny, in_rank_order(parts)[:2])


def test_nan_and_infinity_reach_every_rank() -> None:
    parts = [
        torch.tensor([float("nan"), 1.0, float("inf"), float("inf")]),
        torch.tensor([1.0, 2.0, 1.0, -float("inf")]),
    ]

    def story(engine: Engine) -> Any:
        tensor = parts[engine.rank].clone()
        operate(engine, plans.all_reduce([tensor], SUM))
        return tensor.view(torch.int32)

    first, second = in_ranks(2, story)
    assert torch.equal(first, second)
    assert first.view(torch.float32).isnan().tolist() == [True, False, False, True]


KINDS = {
    ReductionCode.MIN: lambda stack: stack.min(0).values,
    ReductionCode.MAX: lambda stack: stack.max(0).values,
    ReductionCode.PRODUCT: lambda stack: stack.prod(0, dtype=stack.dtype),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING])
def test_minimum_maximum_and_product(algorithm: Algorithm, dtype: Any, kind: ReductionCode) -> None:
    parts = [torch.tensor([1, 2, -3, 4, 0] * 40, dtype=dtype) + rank for rank in range(3)]

    def story(engine: Engine) -> Any:
        tensor = parts[engine.rank].clone()
        operate(engine, ring.all_reduce([tensor], Reduction(kind=kind), algorithm))
        return tensor

    for result in in_ranks(3, story):
        torch.testing.assert_close(result, KINDS[kind](torch.stack(parts)))


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING])
def test_an_average_divides_each_contribution_before_it_is_added(algorithm: Algorithm) -> None:
    parts = [contribution(rank, 5000, torch.float32) for rank in range(3)]
    integers = [torch.tensor([7, -7, 1]) + rank for rank in range(3)]
    narrow = [part.to(torch.bfloat16) for part in parts]

    def story(engine: Engine) -> Any:
        tensors = [parts[engine.rank].clone(), integers[engine.rank].clone(), narrow[engine.rank].clone()]
        average = Reduction(kind=ReductionCode.AVG)
        operate(engine, *(ring.all_reduce([tensor], average, algorithm) for tensor in tensors))
        return tensors

    for floats, whole, halves in in_ranks(3, story):
        divided = in_rank_order([part / 3 for part in parts])
        if algorithm is Algorithm.RING:
            torch.testing.assert_close(floats, divided)
        else:
            assert torch.equal(floats, divided)
            assert torch.equal(halves, fold_left(torch.add, [part.float() / 3 for part in narrow]).to(torch.bfloat16))
        assert whole.tolist() == [8, -6, 2]


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING], ids=lambda one: one.name)
def test_a_premultiplied_sum_multiplies_each_contribution_by_its_ranks_factor(algorithm: Algorithm) -> None:
    def story(engine: Engine) -> Any:
        mine = Reduction(kind=ReductionCode.PREMUL_SUM, factor=10.0**engine.rank)
        same = Reduction(kind=ReductionCode.PREMUL_SUM, factor=torch.tensor([0.25]))
        tensor, kept, output = torch.ones(1000), torch.ones(9), torch.empty(5)
        inputs = [torch.full((5,), 4.0) for _ in range(3)]
        operate(engine, ring.all_reduce([tensor], mine, algorithm), plans.reduce(kept, mine, 1))
        operate(engine, plans.reduce_scatter(inputs, output, same))
        return tensor[-1].item(), kept[0].item(), output[0].item(), inputs[0][0].item()

    assert in_ranks(3, story) == [(111.0, 1.0, 3.0, 4.0), (111.0, 111.0, 3.0, 4.0), (111.0, 1.0, 3.0, 4.0)]


def test_serial_takes_a_shard_of_more_than_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "MAX_PAYLOAD_BYTES", 1 << 20)

    def story(engine: Engine) -> Any:
        tensor = torch.ones(6_000_000)
        operate(engine, ring.all_reduce([tensor], SUM, Algorithm.SERIAL))
        return bool((tensor == 2).all())

    assert in_ranks(2, story) == [True, True]


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tensors_are_one_exchange(dtype: Any, algorithm: Algorithm) -> None:
    sizes = (3, 90_000, 0, 7, 70_001, 1)

    def story(engine: Engine) -> Any:
        tensors = [torch.full((size,), float(engine.rank + at), dtype=dtype) for at, size in enumerate(sizes)]
        operate(engine, ring.all_reduce(tensors, SUM, algorithm))
        return tensors

    for tensors in in_ranks(4, story, chunk_bytes=SMALL):
        for at, tensor in enumerate(tensors):
            assert (tensor == 6 + 4 * at).all()


def test_truth_values_are_summed_as_or_and_multiplied_as_and() -> None:
    def story(engine: Engine) -> Any:
        either = torch.tensor([False, engine.rank == 1])
        both = torch.tensor([True, engine.rank == 1])
        product = Reduction(kind=ReductionCode.PRODUCT)
        operate(engine, plans.all_reduce([either], SUM), plans.all_reduce([both], product))
        return either.tolist(), both.tolist()

    assert in_ranks(2, story) == [([False, True], [True, False])] * 2


def test_reduce_gives_the_root_the_sum_and_the_others_their_own_back() -> None:
    def story(engine: Engine) -> Any:
        tensor = torch.full((100_000,), engine.rank + 1.0)
        operate(engine, plans.reduce(tensor, SUM, root=2))
        return tensor[0].item(), bool((tensor == tensor[0]).all())

    assert in_ranks(4, story, chunk_bytes=SMALL) == [(1.0, True), (2.0, True), (10.0, True), (4.0, True)]


def test_reduce_scatter_leaves_the_inputs_alone_even_where_the_output_is_one_of_them() -> None:
    def story(engine: Engine) -> Any:
        inputs = [torch.full((50_000 + to,), float(10 * engine.rank + to)) for to in range(3)]
        output = torch.empty(50_000 + engine.rank)
        operate(engine, plans.reduce_scatter(inputs, output, SUM))
        kept = all((tensor == 10 * engine.rank + to).all() for to, tensor in enumerate(inputs))
        operate(engine, plans.reduce_scatter(inputs, inputs[engine.rank], SUM))
        return kept, output, inputs[engine.rank]

    for rank, (kept, output, in_place) in enumerate(in_ranks(3, story, chunk_bytes=SMALL)):
        assert kept
        assert (output == 30 + 3 * rank).all()
        assert torch.equal(output, in_place)


def test_a_group_of_one_has_its_own_sum_at_once() -> None:
    def story(engine: Engine) -> Any:
        tensor, part, output = torch.ones(5), torch.full((5,), 2.0), torch.empty(5)
        operate(engine, plans.all_reduce([tensor], SUM), plans.reduce(tensor, SUM, 0))
        operate(engine, plans.reduce_scatter([part], output, SUM), plans.barrier())
        operate(engine, plans.all_reduce([part], Reduction(kind=ReductionCode.PREMUL_SUM, factor=3.0)))
        return tensor.tolist(), output.tolist(), part.tolist()

    assert in_ranks(1, story) == [([1.0] * 5, [2.0] * 5, [6.0] * 5)]


def test_nothing_to_reduce_is_reduced_at_once() -> None:
    def story(engine: Engine) -> Any:
        tensor = torch.empty(0)
        operate(engine, plans.all_reduce([tensor], SUM), plans.reduce(tensor, SUM, 1), plans.barrier())
        return tensor.numel()

    assert in_ranks(2, story) == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        (torch.complex64, SUM),
        (torch.float8_e5m2, SUM),
        (torch.int32, Reduction(kind=ReductionCode.PREMUL_SUM, factor=2.0)),
        (torch.bool, Reduction(kind=ReductionCode.AVG)),
    ],
    ids=str,
)
def test_what_is_not_defined_is_refused_before_anything_is_sent(dtype: Any, reduction: Reduction) -> None:
    def story(engine: Engine) -> Any:
        with pytest.raises(CollectiveError) as caught:
            engine.submit(plans.all_reduce([torch.zeros(4).to(dtype)], reduction), background=False)
        operate(engine, plans.barrier())
        return caught.value.code

    assert in_ranks(2, story) == [Code.COLLECTIVE_UNSEALED] * 2


def test_tensors_that_do_not_belong_together_are_the_callers_mistake() -> None:
    def story(engine: Engine) -> None:
        with pytest.raises(ValueError, match="one type"):
            plans.all_reduce([torch.zeros(1), torch.zeros(1, dtype=torch.int32)], SUM)
        with pytest.raises(ValueError, match="one each"):
            engine.submit(plans.reduce_scatter([torch.zeros(1)], torch.zeros(1), SUM), background=False)
        with pytest.raises(ValueError, match="contiguous"):
            engine.submit(plans.all_reduce([torch.zeros(4, 4).t()[1:]], SUM), background=False)
        with pytest.raises(ValueError, match="bytes"):
            engine.submit(plans.reduce_scatter([torch.zeros(1)] * 2, torch.zeros(3), SUM), background=False)
        operate(engine, plans.barrier())

    in_ranks(2, story)


def test_only_a_premultiplied_sum_has_a_factor() -> None:
    for kind, factor in ((ReductionCode.SUM, 2.0), (ReductionCode.PREMUL_SUM, None)):
        with pytest.raises(ValueError, match="factor"):
            Reduction(kind=kind, factor=factor)
