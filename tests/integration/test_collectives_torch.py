"""torch.distributed over `sealed`, in real processes: every collective, type and shape; groups, objects, messages."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d

from glasshouse.errors import Code, CollectiveError
from tools.sealed_ranks import in_ranks
from tools.waiting import wait_for

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)

warnings.filterwarnings("ignore", category=FutureWarning)  # names that 2.13 calls old and 2.11 has no others for


def of(rank: int, size: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what a rank brings along: every other rank can compute it too."""
    values = torch.arange(size) % 3 + rank + 1
    return values.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


@contextmanager
def unsealed() -> Iterator[None]:
    """Demand that what is done here is refused."""
    with pytest.raises(CollectiveError) as refused:
        yield
    assert refused.value.code is Code.COLLECTIVE_UNSEALED


def everything_that_moves(rank: int) -> None:
    size = dist.get_world_size()
    for dtype in (*FLOATS, *INTEGERS, *OTHERS):
        if dtype is torch.float8_e4m3fn:
            inputs = [of(each).to(dtype) for each in range(size)]
        else:
            inputs = [of(each, dtype=dtype) for each in range(size)]
        mine, empty = inputs[rank], lambda n=1, d=dtype: torch.zeros(5 * n).to(d)

        for root in range(size):
            tensor = mine.clone()
            dist.broadcast(tensor, root)
            assert same(tensor, inputs[root]), (dtype, root)

        gathered = [empty() for _ in range(size)]
        dist.all_gather(gathered, mine)
        assert all(map(same, gathered, inputs))
        flat = empty(size)
        dist.all_gather_into_tensor(flat, mine)
        assert all(map(same, flat.chunk(size), inputs))

        gathered = [empty() for _ in range(size)]
        dist.gather(mine, gathered if rank == 1 else None, dst=1)
        assert rank != 1 or all(map(same, gathered, inputs))

        tensor = empty()
        dist.scatter(tensor, inputs if rank == 1 else None, src=1)
        assert same(tensor, mine)

        received = [empty() for _ in range(size)]
        dist.all_to_all(received, [mine] * size)
        assert all(map(same, received, inputs))

        # Rank r sends r + 1 rows to rank 0, none to rank 1, two to rank 2 ...
        rows = lambda source, target: (source + 1, 0, 2)[target]  # noqa: E731
        source = torch.cat([mine[:1]] * sum(rows(rank, target) for target in range(size)))
        target = empty()[:1].repeat(sum(rows(peer, rank) for peer in range(size)))
        dist.all_to_all_single(
            target,
            source,
            [rows(peer, rank) for peer in range(size)],
            [rows(rank, peer) for peer in range(size)],
        )
        expected = [inputs[peer][:1] for peer in range(size) for _ in range(rows(peer, rank))]
        assert same(target, torch.cat(expected) if expected else empty()[:0])


def everything_that_is_summed(rank: int) -> None:
    size = dist.get_world_size()
    ops = dist.ReduceOp
    half = c10d._make_nccl_premul_sum(0.5)
    reference: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "SUM": lambda all_: all_.sum(0),
        "AVG": lambda all_: all_.sum(0) / size,
        "MIN": lambda all_: all_.amin(0),
        "MAX": lambda all_: all_.amax(0),
        "PRODUCT": lambda all_: all_.prod(0),
        "half": lambda all_: all_.sum(0) * 0.5,
    }
    for dtype in (*FLOATS, *INTEGERS):
        inputs = [of(each, dtype=dtype) for each in range(size)]
        for name, compute in reference.items():
            if not dtype.is_floating_point and name in {"AVG", "half"}:
                continue
            op = half if name == "half" else getattr(ops, name)
            expected = compute(torch.stack(inputs).double()).to(dtype)

            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op)
            assert torch.allclose(tensor, expected), (dtype, name, tensor, expected)

            tensor = inputs[rank].clone()
            dist.reduce(tensor, 1, op)
            assert rank != 1 or torch.allclose(tensor, expected)

            parts = [of(rank, dtype=dtype) + target for target in range(size)]
            expected = compute(torch.stack([of(each, dtype=dtype) + rank for each in range(size)]).double()).to(dtype)
            tensor = torch.zeros_like(parts[0])
            dist.reduce_scatter(tensor, parts, op)
            assert torch.allclose(tensor, expected)
            tensor = torch.zeros_like(parts[0])
            dist.reduce_scatter_tensor(tensor, torch.cat(parts), op)
            assert torch.allclose(tensor, expected)

    number = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    dist.all_reduce(number)
    assert torch.allclose(number, torch.tensor([1 + 2j, 3 - 1j]) * sum(range(1, size + 1)))
    truth = torch.tensor([rank == 0, True, False])
    dist.all_reduce(truth, ops.MAX)
    assert truth.tolist() == [True, True, False]
    dist.all_reduce(average := torch.tensor([7, -7]) * (rank + 1), ops.AVG)
    assert average.tolist() == [14, -14]

    for op in (ops.BAND, ops.BOR, ops.BXOR):
        with unsealed():
            dist.all_reduce(torch.ones(2, dtype=torch.int32), op)
    for op in (ops.PRODUCT, ops.MIN, ops.MAX):
        for call in (
            lambda op=op: dist.group.WORLD.allreduce([number.clone()], op),
            lambda op=op: dist.group.WORLD.reduce([number.clone()], 0, op),
            lambda op=op: dist.group.WORLD.reduce_scatter([number.clone()], [[number] * size], op),
        ):
            with unsealed():
                call()


def tensors_of_every_shape(rank: int) -> None:
    size = dist.get_world_size()
    total = sum(range(1, size + 1))

    for empty in (torch.zeros(0), torch.zeros(3, 0), torch.zeros(0, dtype=torch.int64)):
        dist.all_reduce(empty)
        dist.broadcast(empty, 1)
        dist.all_gather([empty.clone() for _ in range(size)], empty)
    dist.all_reduce(scalar := torch.tensor(float(rank + 1)))
    assert scalar == total

    # Not contiguous, in and out, also in the background.
    for given in (
        torch.zeros(4, 6).t(),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ):
        given += rank + 1
        dist.all_reduce(given)
        assert (given == total).all()
        work = dist.all_reduce(given, dist.ReduceOp.MAX, async_op=True)
        work.wait()
        assert (given == total).all()
        outputs = [torch.zeros(given.shape[::-1]).permute(*reversed(range(given.dim()))) for _ in range(size)]
        dist.all_gather(outputs, given)
        assert all((each == total).all() for each in outputs)
        dist.broadcast(given, 0)
    conjugate = (torch.tensor([1 + 1j]) * (rank + 1)).conj()
    dist.group.WORLD.allreduce([conjugate]).wait()
    assert torch.equal(conjugate.resolve_conj(), torch.tensor([1 - 1j]) * total)

    leaf = torch.ones(3, requires_grad=True)
    dist.broadcast(leaf, 0)
    dist.all_reduce(leaf)
    assert leaf.is_leaf
    assert leaf.tolist() == [float(size)] * 3
    with torch.inference_mode():
        inferred = torch.ones(2, 3).t()
        dist.all_reduce(inferred)
    assert (inferred == size).all()

    # In place: the input is a part of the output, as FSDP gathers.
    flat = torch.zeros(size * 4)
    flat[rank * 4 : rank * 4 + 4] = rank + 1
    dist.all_gather_into_tensor(flat, flat[rank * 4 : rank * 4 + 4])
    assert flat.tolist() == [float(each + 1) for each in range(size) for _ in range(4)]

    for never in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with unsealed():
            dist.all_reduce(never)
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(3))


def objects_and_barriers(rank: int) -> None:
    size = dist.get_world_size()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert [each["rank"] for each in objects] == list(range(size))
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(rank, gathered, dst=1)
    assert rank != 1 or gathered == list(range(size))
    scattered = [None]
    dist.scatter_object_list(scattered, [f"for {each}" for each in range(size)] if rank == 0 else None)
    assert scattered == [f"for {rank}"]
    told = [rank, "of", rank]
    dist.broadcast_object_list(told, src=2)
    assert told == [2, "of", 2]
    if rank == 0:
        dist.send_object_list([{"a": 1}], dst=1)
    elif rank == 1:
        got: list[Any] = [None]
        dist.recv_object_list(got, src=0)
        assert got == [{"a": 1}]

    dist.barrier()
    dist.barrier(async_op=True).wait()
    if rank == 2:
        time.sleep(0.3)
    came = [time.monotonic()]  # one clock for all processes
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    left = time.monotonic()
    dist.broadcast_object_list(came, src=2)
    assert left >= came[0], "nobody leaves a barrier before the last has come"
    assert dist.get_backend() == "sealed"
    assert c10d._resolve_process_group(dist.group.WORLD.group_name) is dist.group.WORLD


def messages(rank: int) -> None:
    size = dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size

    # More than any buffer of the connections holds, everybody at once, receives last.
    big = torch.full((3 << 20,), float(rank))
    got = torch.zeros(3 << 20)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, big, after), dist.P2POp(dist.irecv, got, before)])
    for work in works:
        work.wait()
    assert (got == before).all()

    # Tags in another order than sent; an unreceived message blocks no later one.
    sent = [dist.isend(torch.tensor([tag, rank]), after, tag=tag) for tag in (7, 3, 5)]
    for tag in (5, 7, 3):
        received = torch.zeros(2, dtype=torch.int64)
        dist.recv(received, before, tag=tag)
        assert received.tolist() == [tag, before]
    for work in sent:
        work.wait()
    dist.barrier()

    # From anybody.
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            received = torch.zeros(1)
            source = dist.recv(received)
            assert received.item() == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)

    complex_, strided = torch.tensor([1j * rank]), torch.zeros(4, 2)[:, 0]
    work = dist.isend(complex_, after, tag=1)
    dist.recv(into := torch.zeros(1, dtype=torch.complex64), before, tag=1)
    assert into.item() == 1j * before
    work.wait()
    work = dist.isend(strided + rank, after, tag=2)
    dist.recv(strided, before, tag=2)
    assert (strided == before).all()
    work.wait()
    dist.barrier()


def overlap(rank: int) -> None:
    """Asynchronous works finish by themselves, in whichever order they are looked at."""
    size = dist.get_world_size()
    tensors = [torch.full((1 << 18,), float(rank + index)) for index in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    wait_for(lambda: all(work.is_completed() for work in works))
    for index in reversed(range(6)):
        assert works[index].is_success()
        works[index].wait()
        (value,) = futures[index].wait()
        assert value is tensors[index] or torch.equal(value, tensors[index])
        assert tensors[index][0] == sum(each + index for each in range(size))


def several_at_once(rank: int) -> None:
    size = dist.get_world_size()
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), float(rank)), torch.full((1,), rank)]
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    total = sum(range(size))
    assert all((tensor == total).all() for tensor in tensors)
    for asynchronous in (False, True):
        tensors = [torch.full((3,), float(rank + each)) for each in range(4)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if asynchronous:
            manager.wait()
        assert [tensor[0].item() for tensor in tensors] == [total + size * each for each in range(4)]
        outputs = [torch.zeros(size * 2) for _ in range(3)]
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=asynchronous) as manager:
            for index, output in enumerate(outputs):
                dist.all_gather_into_tensor(output, torch.full((2,), float(rank * 10 + index)))
        if asynchronous:
            manager.wait()
        assert outputs[2].view(size, 2)[:, 0].tolist() == [each * 10.0 + 2 for each in range(size)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            parts = [torch.zeros(2) for _ in range(3)]
            for part in parts:
                dist.reduce_scatter_tensor(part, torch.arange(size * 2.0))
        if asynchronous:
            manager.wait()
        assert all(part.tolist() == [size * rank * 2.0, size * (rank * 2.0 + 1)] for part in parts)


def functional_collectives(rank: int) -> None:
    size, world = dist.get_world_size(), dist.group.WORLD
    total = float(sum(range(size)))
    mine = torch.full((size, 2), float(rank))
    assert (functional.all_reduce(mine, "sum", world) == total).all()
    assert (functional.all_reduce(mine, "avg", world) == total / size).all()
    assert functional.all_gather_tensor(mine, 0, world)[:, 0].tolist() == [r for r in range(size) for _ in range(size)]
    assert (functional.reduce_scatter_tensor(mine, "sum", 0, world) == total).all()
    assert functional.all_to_all_single(mine, None, None, world)[:, 0].tolist() == list(range(size))
    assert (functional.broadcast(mine, 1, world) == 1).all()
    for each in functional.all_reduce_coalesced([mine, mine], "max", world):
        assert (each == size - 1).all()
    name = world.group_name
    out = torch.zeros(size * size, 2)
    ops = torch.ops._c10d_functional
    # These two are called by C++ without asking Python.
    gathered = ops.wait_tensor(ops.all_gather_into_tensor_out(mine, size, name, out=out))
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(size)]
    out = torch.zeros(1, 2)
    assert (ops.wait_tensor(ops.reduce_scatter_tensor_out(mine, "sum", size, name, out=out)) == total).all()
    if hasattr(ops, "batch_p2p_ops"):
        peers = [(rank + 1) % size, (rank - 1) % size]
        results = ops.batch_p2p_ops(["isend", "irecv"], peers, [0, 0], [mine, torch.zeros(size, 2)], name)
        for each in results:
            ops.wait_tensor(each)
        assert (results[1] == peers[1]).all()
    # What only autograd's functions call.
    import torch.distributed.nn.functional as differentiable

    leaf = torch.full((2,), float(rank + 1), requires_grad=True)
    differentiable.all_reduce(leaf).sum().backward()
    assert leaf.grad.tolist() == [float(size)] * 2


def groups(rank: int) -> None:
    size = dist.get_world_size()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
    for members, group in zip(([0, 1], [1, 2], [2, 0]), pairs, strict=True):
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
            dist.broadcast(tensor, src=members[1], group=group)
            objects: list[Any] = [None, None]
            dist.all_gather_object(objects, rank, group=group)
            assert objects == sorted(members)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(tensor := torch.tensor([float(rank)]), group=alone)
    assert tensor.item() == rank
    half, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    dist.all_reduce(tensor := torch.tensor([float(rank)]), group=half)
    assert tensor.item() == (2 if rank != 1 else 1)

    split = dist.group.WORLD.split_group([0, 2] if rank != 1 else [1])
    split.allreduce([tensor := torch.tensor([float(rank)])]).wait()
    assert tensor.item() == (2 if rank != 1 else 1)
    split.shutdown()

    dist.destroy_process_group(half)
    # The same names again, and other members under the same name.
    for round_ in range(2):
        group = dist.new_group(list(range(round_, size)))
        if rank >= round_:
            dist.barrier(group)
            dist.destroy_process_group(group)
    for backend in ("gloo", "cpu:gloo,cuda:sealed"):
        with unsealed():
            dist.new_group([0, 1], backend=backend)


@pytest.mark.parametrize(
    "story",
    [
        everything_that_moves,
        everything_that_is_summed,
        tensors_of_every_shape,
        objects_and_barriers,
        messages,
        overlap,
        several_at_once,
        functional_collectives,
        groups,
    ],
)
def test_three_ranks(story: Callable[[int], None]) -> None:
    in_ranks(story, 3)


def all_of_it_alone(rank: int) -> None:
    for work in (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.AVG),
        lambda: dist.broadcast(torch.ones(3), 0),
        lambda: dist.reduce(torch.ones(3), 0),
        lambda: dist.all_gather([torch.zeros(3)], torch.ones(3)),
        lambda: dist.gather(torch.ones(3), [torch.zeros(3)]),
        lambda: dist.scatter(torch.zeros(3), [torch.ones(3)]),
        lambda: dist.reduce_scatter(torch.zeros(3), [torch.ones(3)]),
        lambda: dist.all_to_all([torch.zeros(3)], [torch.ones(3)]),
        lambda: dist.all_to_all_single(torch.zeros(3), torch.ones(3)),
        lambda: dist.all_gather_object([None], "alone"),
        dist.barrier,
    ):
        work()
    dist.all_gather(gathered := [torch.zeros(3)], torch.ones(3))
    assert gathered[0].all()
    dist.reduce_scatter_tensor(reduced := torch.zeros(3), torch.ones(3))
    assert reduced.all()


def test_a_world_of_one() -> None:
    in_ranks(all_of_it_alone, 1)


@pytest.mark.long
def test_a_tensor_beyond_two_gib() -> None:
    in_ranks(beyond_two_gib, 2, timeout_s=300, limit_s=600)


def beyond_two_gib(rank: int) -> None:
    tensor = torch.full(((2 << 30) + 4099,), rank + 1, dtype=torch.uint8)
    dist.all_reduce(tensor)
    assert (tensor == 3).all()
    dist.broadcast(tensor, 1)
