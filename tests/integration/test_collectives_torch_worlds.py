"""Worlds of torch.distributed over `sealed`, in real processes: how they begin, begin again, fork, fail and end."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from glasshouse.errors import Code, CollectiveError
from tools.sealed_ranks import SECRET, in_ranks


def again_and_again(rank: int, begin: Callable[[str], None]) -> int:
    """A group's name is the same after destroy_process_group; its keys are not, and gloo may come between."""
    for backend in ("sealed", "cpu:sealed,cuda:sealed", "gloo", "SEALED"):
        begin(backend)
        dist.all_reduce(tensor := torch.ones(2))
        assert tensor.tolist() == [2.0, 2.0]
        dist.barrier()
        dist.destroy_process_group()
    return 0


def test_a_world_is_made_again_and_again() -> None:
    in_ranks(again_and_again, 2, backend=None)


def fork_of_a_rank(rank: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except CollectiveError as error:
            os._exit(7 if error.code is Code.COLLECTIVE_ABORTED else 1)
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.all_reduce(torch.ones(1))
    return status


def test_a_process_forked_from_a_rank_is_no_member() -> None:
    assert in_ranks(fork_of_a_rank, 2) == [7, 7]


def debugging(rank: int, begin: Callable[[str], None]) -> str:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps torch's own backends into gloo's collectives."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    begin("sealed")
    dist.all_reduce(torch.ones(2))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    name = type(dist.group.WORLD).__name__
    dist.destroy_process_group()
    return name


def test_debugging_makes_no_gloo_wrapper() -> None:
    assert in_ranks(debugging, 2, backend=None) == ["SealedGroup"] * 2


def nothing(rank: int) -> None:
    """The world alone."""


def test_ranks_with_different_secrets_do_not_meet() -> None:
    answers = in_ranks(nothing, 2, secrets=[SECRET, SECRET[::-1]], timeout_s=15, may_fail=True)
    assert all("CollectiveError" in answer for answer in answers)


def different_shapes(rank: int) -> str:
    try:
        dist.all_reduce(torch.ones(5 + rank))
    except CollectiveError as error:
        return f"{error.code}: {error.message}"
    return "no error"


def test_ranks_that_bring_different_shapes_are_told_so() -> None:
    for answer in in_ranks(different_shapes, 2, timeout_s=15, may_fail=True):
        assert "collective-mismatch" in answer
        assert "5" in answer
        assert "6" in answer


def late(rank: int) -> str:
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=2))
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(5), group=group)
        else:
            time.sleep(4)
    except CollectiveError as error:
        return error.code
    return "no error"


def test_a_rank_that_does_not_come_is_a_timeout() -> None:
    first, _ = in_ranks(late, 2, may_fail=True)
    assert first == Code.COLLECTIVE_TIMEOUT


def one_that_ends(rank: int, how: str) -> str:
    try:
        dist.barrier()
        if rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            # What the interpreter does when a script has raised.
            atexit._run_exitfuncs()
            os._exit(1)
        # If others are faster, this one hears of the end in the barrier, and the next call does not begin.
        dist.all_reduce(torch.ones(1 << 20), async_op=True).wait()
    except CollectiveError as error:
        return f"{error.code}: {error.message}"
    return "no error"


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_rank_that_ends_in_the_middle_ends_the_group(how: str) -> None:
    first, second, third = in_ranks(one_that_ends, 3, how, timeout_s=30, may_fail=True)
    assert second == "died without an answer"
    for told in (first, third):
        assert told.startswith("rank-lost"), told
        assert "rank 1" in told


def remembers(rank: int) -> None:
    """Works that nobody looks at, and callbacks that are still to run, do not keep a rank from ending."""
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda done: done.value())


def test_a_group_ends_with_works_that_nobody_waits_for() -> None:
    in_ranks(remembers, 2)
