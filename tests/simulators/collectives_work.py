"""How much work one all-reduce is for one rank, by algorithm: the counts that real engines are held to.

With n bytes and N ranks a shard is n/N, sent in chunks. `direct` seals N−1 shards, and the sum of its own once for
all, and opens 2(N−1): (3N−2)/N n bytes of AEAD. `ring` and `serial` seal and open at each of 2(N−1) hops: 4(N−1)/N n.
All of them, and gloo's ring, send 2(N−1)/N n bytes. A one-shot exchange (small tensors, and two ranks) seals the whole
tensor once and opens N−1 of them.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from benchmarks.collectives.cells import Way
from glasshouse.collectives.operations.communicator import chunk_bytes
from glasshouse.collectives.operations.plans import all_reduce_algorithm
from glasshouse.collectives.protocol.frame_memory import CHUNK_BYTES
from glasshouse.collectives.protocol.headers import MAX_PAYLOAD_BYTES, Algorithm

__all__ = ["Work", "work"]


@dataclass(frozen=True, slots=True)
class Work:
    """One rank's part of one all-reduce.

    Args:
        messages: sent and taken; each has a cost of its own besides its bytes.
        crypto_bytes: that pass through the AEAD.
        wire_bytes: sent, without headers and tags; as many are received.
        calls: of the AEAD.
    """

    _: KW_ONLY
    messages: int
    crypto_bytes: float
    wire_bytes: float
    calls: int


def work(way: Way, *, bytes_: int, ranks: int) -> Work:
    """Return the work of one rank.

    Args:
        way: an algorithm; `Way.SEALED`, `Way.NETWORK` and `Way.PLAIN` are what the backend chooses by size and ranks.
        bytes_: of the tensor.
        ranks: of the group, at least 2.

    Raises:
        ValueError: no exchange, or fewer than two ranks.
    """
    if ranks < 2:
        raise ValueError(f"{ranks} ranks exchange nothing")
    if way is Way.ALONE:
        raise ValueError("an iteration without communication has no exchange")
    others, shard = ranks - 1, bytes_ / ranks
    sent_bytes = 2 * others * shard
    if way in (Way.RAW, Way.RING, Way.SERIAL):
        # gloo's ring has no frames; its messages and its AEAD are none.
        largest = {Way.RAW: bytes_, Way.SERIAL: MAX_PAYLOAD_BYTES}.get(way)
        chunks = _chunks(shard) if largest is None else max(1, math.ceil(shard / largest))
        calls = 0 if way is Way.RAW else 4 * others * chunks
        return Work(
            messages=4 * others * chunks,
            crypto_bytes=0.0 if way is Way.RAW else 2 * sent_bytes,
            wire_bytes=sent_bytes,
            calls=calls,
        )
    chosen = way in (Way.SEALED, Way.NETWORK, Way.PLAIN)
    if chosen and all_reduce_algorithm(bytes_, ranks) is Algorithm.ONE_SHOT:  # everybody sends all to everybody
        chunks = _chunks(bytes_)
        return Work(
            messages=2 * others * chunks,
            crypto_bytes=0.0 if way is Way.PLAIN else float(ranks * bytes_),
            wire_bytes=float(others * bytes_),
            calls=0 if way is Way.PLAIN else ranks * chunks,
        )
    chunks = _chunks(shard)
    return Work(
        messages=4 * others * chunks,
        crypto_bytes=0.0 if way is Way.PLAIN else (3 * ranks - 2) * shard,
        wire_bytes=sent_bytes,
        calls=0 if way is Way.PLAIN else (3 * ranks - 2) * chunks,
    )


def _chunks(span: float) -> int:
    return max(1, math.ceil(span / chunk_bytes(math.ceil(span), CHUNK_BYTES)))
