"""Runs a function as every rank of a sealed world, each in a process of its own.

The processes are forked from one that has imported torch already: a world begins in well under a second.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["SECRET", "Story", "begin", "in_ranks"]

SECRET = b"what the ranks of a test share.."
Story = Callable[..., Any]

_context = multiprocessing.get_context("forkserver")
# What training imports by the way takes each process seconds.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "tools.sealed_ranks"]
)


def in_ranks(
    story: Story,
    ranks: int,
    *arguments: Any,
    limit_s: float = 120.0,
    timeout_s: float = 60.0,
    backend: str | None = "sealed",
    secrets: Sequence[bytes] | None = None,
    may_fail: bool = False,
) -> list[Any]:
    """Return what `story(rank, *arguments)` returns on every rank.

    Args:
        story: a function of a module; runs between init_process_group and destroy_process_group.
        limit_s: everything is killed after that, and the test fails.
        timeout_s: of the group.
        backend: of the default group, or None where the story makes it itself, with `begin`.
        secrets: each rank's, where they are not all `SECRET`.
        may_fail: return the text of a rank's exception in the place of its result, and no failure.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = []
    for rank in range(ranks):
        mine, theirs = _context.Pipe(duplex=False)
        secret = secrets[rank] if secrets is not None else SECRET
        setting = (rank, ranks, store.port, backend, secret, timeout_s)
        process = _context.Process(target=_be_rank, args=(theirs, setting, story, arguments), daemon=True)
        process.start()
        theirs.close()
        begun.append((process, mine))
    try:
        answers = _collect([connection for _, connection in begun], time.monotonic() + limit_s)
    finally:
        for process, connection in begun:
            process.join(5 if connection.closed else 0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            connection.close()
    bad = [f"rank {rank}:\n{text}" for rank, (done, text) in enumerate(answers) if not done]
    if bad and not may_fail:
        raise AssertionError("\n".join(bad))
    return [value for _, value in answers]


def begin(
    rank: int,
    ranks: int,
    port: int,
    timeout_s: float,
    backend: str,
    through: Callable[[dist.Store], dist.Store] = lambda store: store,
) -> None:
    """Initialise the default group.

    Args:
        through: what this rank sees of the store.
    """
    store = through(dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))


def _collect(connections: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    left = {id(connection): rank for rank, connection in enumerate(connections)}
    while left:
        ready = wait([each for each in connections if id(each) in left], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(left.values())} were not done in time; done: {answers}")
        for connection in ready:
            rank = left.pop(id(connection))
            try:
                answers[rank] = connection.recv()
            except EOFError:
                answers[rank] = (False, "died without an answer")
    return [answers[rank] for rank in sorted(answers)]


def _be_rank(answer: Connection, setting: Any, story: Story, arguments: tuple[Any, ...]) -> None:
    from glasshouse.collectives.secret import provide

    rank, ranks, port, backend, secret, timeout_s = setting
    torch.set_num_threads(1)
    provide(secret)
    try:
        if backend is None:
            result = story(rank, *arguments, begin=partial(begin, rank, ranks, port, timeout_s))
        else:
            begin(rank, ranks, port, timeout_s, backend)
            result = story(rank, *arguments)
            dist.destroy_process_group()
        answer.send((True, result))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    finally:
        answer.close()
