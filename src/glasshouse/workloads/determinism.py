"""Seeds, threads and algorithms of PyTorch."""

from __future__ import annotations

import os

import torch

__all__ = ["fix", "seed_only"]


def seed_only(seed: int, *, threads: int | None) -> None:
    """Seed every generator and, when given, fix the number of CPU threads."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)


def fix(seed: int, *, threads: int | None) -> None:
    """Make results bit-equal from run to run on the same machine and versions.

    Args:
        seed: of every generator.
        threads: of the CPU: sums are taken in another order with another count; 1 when not given.
    """
    # Read when cuBLAS makes its first handle; without it the deterministic algorithms refuse to run.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    seed_only(seed, threads=threads or 1)
