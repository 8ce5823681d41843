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

from glasshouse.collectives import dial, operations
from glasshouse.collectives.engine import Engine
from glasshouse.collectives.frames import Algorithm
from glasshouse.collectives.keys import Lane
from glasshouse.collectives.memory import frame_bytes
from glasshouse.collectives.near import Arena, NearLink, Offer
from glasshouse.collectives.reduce import Reduction, ReductionKind
from simulators.engine_ranks import operate

__all__ = ["ELEMENTS", "FAR", "SUM", "descriptors", "links_of", "near_pair", "offer", "sent", "summed"]

SUM = Reduction(kind=ReductionKind.SUM)
ELEMENTS = 1_500_000
FAR = dial.Direct(near=False)


def summed(engine: Engine, algorithm: Algorithm | None = None) -> float:
    tensor = torch.full((ELEMENTS,), engine.rank + 1.0)
    operate(engine, operations.all_reduce([tensor], SUM, algorithm))
    assert (tensor == tensor[0]).all()
    return float(tensor[0])


def links_of(engine: Engine) -> list[Any]:
    return [*engine._progress._links.values()]


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def near_pair() -> Iterator[tuple[NearLink, NearLink]]:
    """The two ends of one connection, with nobody who drives them."""
    with contextlib.ExitStack() as closed:
        ends = socket.socketpair()
        arenas = [Arena(1) for _ in ends]
        offers = [offer(end, arena, connected=end is ends[1]) for end, arena in zip(ends, arenas, strict=True)]
        links = [NearLink(end, Lane.COLLECTIVE, one.answer()) for end, one in zip(ends, offers, strict=True)]
        for arena, link in zip(arenas, links, strict=True):
            arena.shut()
            closed.callback(link.close)
        yield links[0], links[1]


def offer(end: socket.socket, arena: Arena | None, *, connected: bool = False, within_s: float = 1.0) -> Offer:
    return Offer(end, 1, arena, time.monotonic() + within_s, connected=connected)


def sent(link: NearLink, size: int, fill: int = 7) -> memoryview:
    """Send a frame of `size` bytes that announces its own size, and return where it lies."""
    buffer = link.out_buffer(size)
    assert buffer is not None
    frame = buffer[:size]
    frame[:] = bytes([fill]) * size
    frame[12:16] = (size - frame_bytes(0)).to_bytes(4, "big")
    link.begin(frame)
    assert link.push()
    return frame
