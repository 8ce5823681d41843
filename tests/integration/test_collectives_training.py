"""Training over `sealed`, in real processes: DDP in all its ways, FSDP, ZeRO, meshes, checkpoints."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from glasshouse.errors import CollectiveError
from tools.sealed_ranks import in_ranks

warnings.filterwarnings("ignore", category=FutureWarning)  # names that 2.13 calls old and 2.11 has no others for

STEPS = 4
ROWS = 6


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, 12, generator=source), torch.randn(ROWS, 5, generator=source)


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    rows, targets = batch(rank, step)
    return nn.functional.mse_loss(net(rows), targets)


def digest(net: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        found.update(name.removeprefix("module.").encode())
        found.update(value.detach().numpy().tobytes())
    return found.hexdigest()


def alone(ranks: int) -> nn.Sequential:
    """Train in one process as `ranks` would together: each gradient scaled as DDP does it, then added in rank order."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        sums: list[torch.Tensor] = []
        for rank in range(ranks):
            net.zero_grad()
            loss_of(net, rank, step).backward()
            shares = [parameter.grad * (1.0 / ranks) for parameter in net.parameters()]
            sums = shares if rank == 0 else [one + other for one, other in zip(sums, shares, strict=True)]
        for parameter, total in zip(net.parameters(), sums, strict=True):
            parameter.grad = total
        optimizer.step()
    return net


def close(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(left, right, atol=1e-5) for left, right in pairs)


def train(net: nn.Module, rank: int, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def plain_ddp(rank: int, bucket_mb: float | None) -> str:
    # Different seeds: DDP's own broadcast has to bring the ranks together.
    net = model(seed=0 if rank == 0 else 77)
    wrapped = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
    train(wrapped, rank)
    return digest(net)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many as a rank has: the order in which a product's terms are added depends on how many share the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("ranks", "bucket_mb"), [(2, None), (3, 0.001)])
def test_ddp_ends_with_the_digest_of_one_process_that_does_the_same(ranks: int, bucket_mb: float | None) -> None:
    digests = in_ranks(plain_ddp, ranks, bucket_mb)
    assert digests == [digest(alone(ranks))] * ranks


def ddp_in_all_its_ways(rank: int) -> None:
    reference = alone(2)
    for settings in (
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": True, "init_sync": True},
    ):
        net = DistributedDataParallel(model(), **settings)
        train(net, rank)
        assert close(net.module, reference), settings

    # no_sync: two micro-batches accumulated, one exchange.
    net = DistributedDataParallel(model())
    with net.no_sync():
        loss_of(net, rank, 0).backward()
    loss_of(net, rank, 1).backward()
    summed = [parameter.grad.clone() for parameter in net.parameters()]
    dist.all_reduce(own := summed[0].clone(), dist.ReduceOp.AVG)
    assert torch.allclose(own, summed[0]), "all ranks have the same gradients"

    # Parameters that one rank does not use.
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(12, 5), nn.Linear(12, 5)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.left(rows) if rank == 0 else self.right(rows)

    net = DistributedDataParallel(Branches(), find_unused_parameters=True)
    loss_of(net, rank, 0).backward()
    dist.all_reduce(seen := net.module.left.weight.grad.clone(), dist.ReduceOp.AVG)
    assert torch.allclose(seen, net.module.left.weight.grad)

    # Buffers follow rank 0.
    net = DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)))
    loss_of(net, rank, 0).backward()
    loss_of(net, rank, 1).backward()
    mean = net.module[1].running_mean.clone()
    dist.broadcast(mean, 0)
    net(batch(rank, 0)[0])
    sync = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(8))
    assert sync is not None

    # Uneven inputs.
    net = DistributedDataParallel(model())
    with net.join():
        for step in range(2 + rank):
            loss_of(net, rank, step).backward()

    # Mixed types, and more than one bucket.
    mixed = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 5).double())
    net = DistributedDataParallel(mixed, bucket_cap_mb=0.0001)
    (net.module[1](net.module[0](batch(rank, 0)[0]).double()).sum() + net.module[0].bias.sum() * 0).backward()


def communication_hooks(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    reference = alone(2)
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        net = DistributedDataParallel(model())
        net.register_comm_hook(None, hook)
        train(net, rank)
        assert all(
            torch.allclose(one, other, atol=0.02)
            for one, other in zip(net.module.parameters(), reference.parameters(), strict=True)
        ), hook
    net = DistributedDataParallel(model())
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train(net, rank)
    assert close(net.module, reference)
    # The C++ one takes a value that only C++ can make; that is an error, not a wrong gradient.
    net = DistributedDataParallel(model())
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(RuntimeError, match="should return TensorList"):
        train(net, rank, 1)
    # This one waits for collectives inside the callbacks of others.
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    net = DistributedDataParallel(model())
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(net, rank)
    assert all(torch.isfinite(parameter).all() for parameter in net.parameters())


def sharded(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    reference = alone(2)

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
    assert close(net.module, reference)
    optimizer.consolidate_state_dict(0)

    cpu = torch.device("cpu")
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        first = FullyShardedDataParallel(model(), device_id=cpu, sharding_strategy=strategy)
        train(first, rank)
        with FullyShardedDataParallel.summon_full_params(first):
            assert close(first.module, reference), strategy

    second = model()
    for layer in (second[0], second[2], second[4]):
        fully_shard(layer, mesh=mesh_of(2))
    fully_shard(second, mesh=mesh_of(2))
    train(second, rank)
    for parameter, expected in zip(second.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter.full_tensor(), expected, atol=1e-5)

    narrow = model()
    fully_shard(narrow, mesh=mesh_of(2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    train(narrow, rank)
    assert all(torch.isfinite(parameter.full_tensor()).all() for parameter in narrow.parameters())


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def meshes(rank: int, folder: str) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(2, 2, names=("data", "model"))
    assert mesh["data"].get_group().name() == "sealed"
    torch.manual_seed(3)
    whole = torch.randn(8, 6)
    sharded_ = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded_.full_tensor(), whole)
    assert torch.equal(sharded_.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor(), whole)
    assert torch.equal(sharded_.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(), whole)
    partial = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Partial(), Replicate()])
    assert torch.equal(partial.full_tensor()[0, 0], torch.tensor(2.0 * (rank % 2) + 2))

    # Tensor parallel inside, sharded data parallel outside.
    net = model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(5)
    even = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    expected = even(batch(0, 0)[0])
    parallelize_module(even, mesh["model"], plan)
    assert torch.allclose(even(batch(0, 0)[0]), expected, atol=1e-5)
    fully_shard(even, mesh=mesh["data"])
    nn.functional.mse_loss(even(batch(rank // 2, 0)[0]), batch(rank // 2, 0)[1]).backward()

    # A checkpoint that every rank writes its shards of.
    line = mesh_of(4)
    fully_shard(net, mesh=line)
    train(net, rank, 2)
    before = [parameter.full_tensor().clone() for parameter in net.parameters()]
    checkpoint.save(net.state_dict(), checkpoint_id=folder)
    other = fully_shard(model(seed=9), mesh=line)
    loaded = other.state_dict()
    checkpoint.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded)
    for parameter, kept in zip(other.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), kept)

    hybrid = fully_shard(model(), mesh=mesh)
    train(hybrid, rank, 2)


@pytest.mark.parametrize("story", [ddp_in_all_its_ways, communication_hooks, sharded])
def test_two_ranks_train(story: Callable[[int], None]) -> None:
    in_ranks(story, 2)


def test_meshes_and_checkpoints(tmp_path: Path) -> None:
    in_ranks(meshes, 4, str(tmp_path / "checkpoint"))


def checkpoints_meanwhile(rank: int, folder: str) -> str:
    import multiprocessing

    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model(), mesh=mesh_of(2))
    train(net, rank, 1)
    kept = [parameter.full_tensor().clone() for parameter in net.parameters()]
    saving = checkpoint.async_save(net.state_dict(), checkpoint_id=folder, process_group=dist.new_group())
    train(net, rank, 2)  # while the other thread writes
    saving.result()
    loaded = net.state_dict()
    checkpoint.load(loaded, checkpoint_id=folder)
    net.load_state_dict(loaded)
    assert all(torch.equal(new.full_tensor(), old) for new, old in zip(net.parameters(), kept, strict=True))

    # The other way starts a process that asks for gloo.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    in_a_process = AsyncCheckpointerType.PROCESS
    saving = checkpoint.async_save(net.state_dict(), checkpoint_id=f"{folder}-2", async_checkpointer_type=in_a_process)
    try:
        saving.result()
    except CollectiveError as error:
        return str(error)
    return "it went out"


def test_checkpoints_are_written_meanwhile_by_a_thread_and_by_no_process_that_is_not_sealed(tmp_path: Path) -> None:
    for said in in_ranks(checkpoints_meanwhile, 2, str(tmp_path / "checkpoint")):
        assert "those of the process that started this one are [collective-unsealed]" in said


def compiled(rank: int) -> str:
    net = DistributedDataParallel(model())
    train(torch.compile(net, backend="eager"), rank)
    return digest(net.module)


def test_compiled_modules_train() -> None:
    digests = in_ranks(compiled, 2)
    assert digests[0] == digests[1]
