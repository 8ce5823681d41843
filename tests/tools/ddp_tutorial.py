"""A first script with DistributedDataParallel, as tutorials have it: set up, train a toy, keep a checkpoint, spawn."""

import hashlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817


def setup(rank: int, world_size: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup() -> None:
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def show(what: str, rank: int, model: nn.Module) -> None:
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
    sys.stdout.write(f"{what} rank {rank}: {digest.hexdigest()}\n")
    sys.stdout.flush()


def demo_basic(rank: int, world_size: int) -> None:
    setup(rank, world_size)
    torch.manual_seed(rank)
    ddp_model = DDP(ToyModel())
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    for _ in range(3):
        optimizer.zero_grad()
        nn.MSELoss()(ddp_model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
    show("basic", rank, ddp_model)
    cleanup()


def demo_checkpoint(rank: int, world_size: int) -> None:
    setup(rank, world_size)
    torch.manual_seed(10 + rank)
    ddp_model = DDP(ToyModel())
    path = os.path.join(tempfile.gettempdir(), "model.checkpoint")  # noqa: PTH118 - as tutorials have it
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    # Nobody reads what rank 0 has not written.
    dist.barrier()
    ddp_model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    nn.MSELoss()(ddp_model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()
    dist.barrier()
    if rank == 0:
        os.remove(path)  # noqa: PTH107
    show("checkpoint", rank, ddp_model)
    cleanup()


def run_demo(demo_fn: object, world_size: int) -> None:
    mp.spawn(demo_fn, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    for demo in sys.argv[2:]:
        run_demo({"basic": demo_basic, "checkpoint": demo_checkpoint}[demo], 2)
