"""Ranks of one machine: the two ends of one connection, and what is told of the groups and of this process."""

from __future__ import annotations

import contextlib
import gc
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.collectives import ring
from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import Algorithm, ReductionCode, frame_bytes
from glasshouse.collectives.transport import dial
from glasshouse.collectives.transport.local_link import LocalLink, PoolExchange
from glasshouse.collectives.transport.send_pool import SendPool
from simulators.engine_ranks import operate

__all__ = ["ELEMENTS", "FAR", "SUM", "descriptors", "links_of", "near_pair", "offer", "sent", "summed"]

SUM = Reduction(kind=ReductionCode.SUM)
ELEMENTS = 1_500_000
FAR = dial.Direct(local=False)


def summed(engine: Engine, algorithm: Algorithm | None = None) -> float:
    tensor = torch.full((ELEMENTS,), engine.rank + 1.0)
    operate(engine, ring.all_reduce([tensor], SUM, algorithm))
    assert (tensor == tensor[0]).all()
    return float(tensor[0])


def links_of(engine: Engine) -> list[Any]:
    return [*engine._progress._links]


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def near_pair() -> Iterator[tuple[LocalLink, LocalLink]]:
    """The two ends of one connection, with nobody who drives them."""
    with contextlib.ExitStack() as closed:
        ends = socket.socketpair()
        arenas = [SendPool(1) for _ in ends]
        offers = [offer(end, arena, connected=end is ends[1]) for end, arena in zip(ends, arenas, strict=True)]
        links = [LocalLink(end, Lane.COLLECTIVE, one.answer()) for end, one in zip(ends, offers, strict=True)]
        for arena, link in zip(arenas, links, strict=True):
            arena.shut()
            closed.callback(link.close)
        yield links[0], links[1]


def offer(
    end: socket.socket, arena: SendPool | None, *, connected: bool = False, within_s: float = 1.0
) -> PoolExchange:
    return PoolExchange(end, 1, arena, time.monotonic() + within_s, connected=connected)


def sent(link: LocalLink, size: int, fill: int = 7) -> memoryview:
    """Send a frame of `size` bytes that announces its own size, and return where it lies."""
    buffer = link.out_buffer(size)
    assert buffer is not None
    frame = buffer[:size]
    frame[:] = bytes([fill]) * size
    frame[12:16] = (size - frame_bytes(0)).to_bytes(4, "big")
    link.begin(frame)
    assert link.push()
    return frame
