"""PyTorch's own DistributedTest, run over `sealed` by ranks that live through many of its tests."""

from __future__ import annotations

import os
import traceback
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["RANKS", "names", "results"]

RANKS = 3
# By parts of their names: tests that cannot pass over this backend on this machine, and why.
NOT_FOR_US = {
    "SyncBatchNorm_process_group": "needs torchvision",
    "accumulate_gradients": "chooses its devices by the names of the backends that it knows",
    "barrier_timeout_global": "begins the group again by the environment's rendezvous",
    "batch_isend_irecv_mixed_backend_err": "makes a group of gloo, which is refused beside a sealed world",
    "batch_isend_irecv_op_err": "needs a GPU, and does not say so",
    "cuda": "needs a GPU",
    "monitored_barrier": "is gloo's alone",
    "nccl": "is NCCL's alone",
    "new_subgroups_with_group_param": "needs four ranks, and does not say so",
    "sparse_all_reduce": "reduces sparse tensors, which the backend refuses",
}


def _suite() -> Any:
    """Import the suite, which reads what it is to test from the environment at that moment."""
    os.environ |= {"BACKEND": "sealed", "WORLD_SIZE": str(RANKS), "INIT_METHOD": "env://"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, where it imports its tests
        from torch.testing._internal import common_distributed

        for feature in ("ddp", "subgroup", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add("sealed")
        from torch.testing._internal.distributed import distributed_test

    return distributed_test


def names() -> list[str]:
    """Return the names of its tests, but for those in `NOT_FOR_US`."""
    every = [name for name in dir(_suite().DistributedTest._DistTestBase) if name.startswith("test_")]
    return [name for name in every if not any(part in name for part in NOT_FOR_US)]


def results(rank: int, folder: str, chosen: list[str], *, begin: Callable[..., None]) -> dict[str, str]:
    """Run tests one after the other, each in a group of its own.

    Returns:
        for each name "passed", "skipped" with the reason, or the traceback.
    """
    suite = _suite()

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        pass

    return {name: _result(suite, Case, rank, Path(folder) / name, begin) for name in chosen}


def _result(suite: Any, case: Any, rank: int, folder: Path, begin: Callable[..., None]) -> str:
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    suite.Barrier.barrier_id = 0
    begin("sealed", through=lambda store: dist.PrefixStore(folder.name, store))
    try:
        test = case(folder.name)
        test.rank, test.file_name = rank, str(folder / "init_dir" / "file")
        getattr(test, folder.name)()
        test._barrier()
    except (unittest.SkipTest, SystemExit) as skipped:
        return f"skipped: {skipped}"
    except BaseException:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():  # some end it themselves
            dist.destroy_process_group()
    return "passed"
