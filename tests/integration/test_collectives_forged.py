"""Somebody between two ranks forges a byte: whoever waits, through whatever of torch, is told and gets nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from glasshouse.errors import Code, CollectiveError
from simulators.lying_store import Between, LyingStore
from tools.sealed_ranks import in_ranks

warnings.filterwarnings("ignore", category=FutureWarning)  # names that 2.13 calls old and 2.11 has no others for

Forge = Callable[[], None]


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def through_wait(rank: int, forge: Forge) -> None:
    tensor = torch.ones(100_000)
    forge()
    try:
        dist.all_reduce(tensor)
    finally:
        assert not tensor.any() or rank == 0, "what was not verified is not left behind"


def through_an_asynchronous_wait(rank: int, forge: Forge) -> None:
    tensor = torch.ones(100_000)
    forge()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()


def through_a_future(rank: int, forge: Forge) -> None:
    forge()
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    work.get_future().then(lambda done: done.value()[0].sum()).wait()


def through_wait_tensor(rank: int, forge: Forge) -> None:
    forge()
    functional.wait_tensor(torch.ops._c10d_functional.all_reduce(torch.ones(100_000), "sum", "0"))


def through_an_operator_of_cpp(rank: int, forge: Forge) -> None:
    forge()
    ops = torch.ops._c10d_functional
    out = torch.zeros(200_000)
    ops.wait_tensor(ops.all_gather_into_tensor_out(torch.ones(100_000), 2, "0", out=out))


def through_ddp(rank: int, forge: Forge) -> None:
    net = DistributedDataParallel(wide())
    for _ in range(2):
        net(torch.ones(2, 64)).sum().backward()
    forge()
    net(torch.ones(2, 64)).sum().backward()


def through_a_hook_of_ddp(rank: int, forge: Forge) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net = DistributedDataParallel(wide())
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    net(torch.ones(2, 64)).sum().backward()
    forge()
    net(torch.ones(2, 64)).sum().backward()


def through_ddps_first_look(rank: int, forge: Forge) -> None:
    """It compares the shapes of the parameters and hands out rank 0's, both from C++."""
    forge()
    DistributedDataParallel(wide())


def through_fsdp2(rank: int, forge: Forge) -> None:
    from torch.distributed.fsdp import fully_shard

    net = wide()
    fully_shard(net, mesh=dist.init_device_mesh("cpu", (2,)))
    net(torch.ones(2, 64)).sum().backward()
    forge()
    net(torch.ones(2, 64)).sum().backward()


def through_an_object(rank: int, forge: Forge) -> None:
    forge()
    dist.all_gather_object([None, None], {"never": "unpickled" * 10_000})


def through_a_message(rank: int, forge: Forge) -> None:
    forge()
    if rank == 0:
        dist.send(torch.ones(100_000), 1)
    else:
        dist.recv(torch.zeros(100_000), 0)
    dist.barrier()


def forged(rank: int, story: Callable[[int, Forge], None], begin: Callable[..., None]) -> list[Any]:
    between = Between()
    begin("sealed", through=lambda store: LyingStore(store, between) if rank == 1 else store)
    dist.barrier()
    outcome: list[Any] = []

    def forge() -> None:
        if rank == 1:
            between.forge()
        dist.barrier()

    try:
        story(rank, forge)
        # The rank that sent what was forged may have been served well; the next thing that it does tells it.
        if rank == 0:
            dist.barrier()
    except RuntimeError as error:
        # What passed through C++ comes out as torch's own error with our words in it.
        outcome += [getattr(error, "code", None), str(error)]
    else:
        outcome += ["no error", ""]
    if rank == 1:
        assert between.forged.is_set(), "the test forged nothing"
    # The group is over, for whatever comes.
    try:
        dist.all_reduce(torch.ones(1))
    except CollectiveError:
        outcome.append("over")
    dist.destroy_process_group()
    # This process is also the one between.
    between.pass_the_rest()
    return outcome


@pytest.mark.parametrize(
    "story",
    [
        through_wait,
        through_an_asynchronous_wait,
        through_a_future,
        through_wait_tensor,
        through_an_operator_of_cpp,
        through_ddp,
        through_a_hook_of_ddp,
        through_ddps_first_look,
        through_fsdp2,
        through_an_object,
        through_a_message,
    ],
)
def test_nobody_who_waits_mistakes_a_forged_frame(story: Callable[[int, Forge], None]) -> None:
    for code, text, after in in_ranks(forged, 2, story, backend=None, timeout_s=20):
        assert code in {None, Code.COLLECTIVE_TAMPERED}, text
        assert "collective-tampered" in text
        assert "rank 0" in text
        assert after == "over"
