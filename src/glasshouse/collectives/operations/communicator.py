"""What operations know of the group that carries them out: ranks, keys, buffers, and where tensors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from glasshouse.collectives.operations.algorithms import DEVICE_CHUNK_BYTES, chunk_bytes
from glasshouse.collectives.operations.regions import HostRegion, Region, Span, flat
from glasshouse.collectives.protocol.frame_memory import Buffers, FrameOpener, FrameSealer, allocate
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import frame_bytes
from glasshouse.wire.aead import Suite, zero

__all__ = ["SHARED_FRAMES", "Communicator", "OrderedOpener", "Pools", "Streams"]

SHARED_FRAMES = 4
"""Frames for every peer that are sealed and not yet sent to the last."""

_SHARD_ALIGNED = 64
_SCRATCH_BUFFERS = 4


class OrderedOpener(FrameOpener, Protocol):
    """An opener that says what the next frame's header must be."""

    def complete(self, header: bytearray | memoryview, size: int) -> None: ...


class Streams(Protocol):
    """What operations need of `sealing.Traffic`."""

    def sealer(self, lane: Lane, destination: int, suite: Suite = ...) -> FrameSealer: ...

    def opener(self, lane: Lane, source: int, suite: Suite = ..., *, broadcast: bool = False) -> OrderedOpener: ...


class SharedMemory(Protocol):
    """Memory that ranks of this machine read frames from: `transport.local_link.SendPool`."""

    slot_bytes: int

    def shared(self, size: int) -> memoryview: ...


class Pools:
    """Buffers for chunks of up to `chunk_bytes`.

    `shared` are for frames that every peer is sent, `scratch` to compute in: four times a chunk, for a partial result
    and a scaled contribution that may both be twice as wide as the elements.
    """

    __slots__ = ("chunk_bytes", "scratch", "shared")

    def __init__(self, chunk_bytes: int, send_pool: SharedMemory | None = None) -> None:
        self.chunk_bytes = chunk_bytes
        size = frame_bytes(chunk_bytes)
        make = None if send_pool is None or size > send_pool.slot_bytes else send_pool.shared
        self.shared = Buffers(size, SHARED_FRAMES, make)
        self.scratch = Buffers(4 * chunk_bytes, _SCRATCH_BUFFERS)


class Communicator:
    """What an operation knows of the group that carries it out.

    Args:
        rank: the own index.
        size: the number of ranks.
        streams: the keys.
        chunk_bytes: the largest chunk of tensors in host memory.
        queues: for tests: what works on tensors of a device type, instead of one made for the device.
        send_pool: what ranks of this machine read frames from.
    """

    __slots__ = ("_opened", "_pools", "_queues", "_send_pool", "chunk_bytes", "peers", "rank", "size", "streams")

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        streams: Streams,
        chunk_bytes: int,
        queues: Mapping[str, Any] | None = None,
        send_pool: SharedMemory | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.peers = tuple(peer for peer in range(size) if peer != rank)
        self.streams = streams
        self.chunk_bytes = chunk_bytes
        self._send_pool = send_pool
        self._opened = memoryview(bytearray())
        self._pools: dict[int, Pools] = {}
        self._queues: dict[Any, Any] = dict(queues or {})

    def queue(self, tensors: Sequence[Any]) -> Any:
        """Return where work on tensors is done in order, None for tensors in host memory."""
        if not tensors:
            return None
        device = tensors[0].device
        if (known := self._queues.get(device.type) or self._queues.get(device)) is not None:
            return known
        if device.type == "cpu":
            return None
        from glasshouse.collectives.operations.device_region import Queue  # only where there is a device

        queue = self._queues[device] = Queue(device)
        return queue

    def region(self, tensors: Sequence[Any]) -> Region:
        """Return tensors of one type, all on one device, as a run of bytes."""
        queue = self.queue(tensors)
        if queue is None:
            return HostRegion(tensors)
        from glasshouse.collectives.operations.device_region import DeviceRegion

        region: Region = DeviceRegion(tensors, queue)
        return region

    def as_bytes(self, tensors: Sequence[Any]) -> Region:
        """Return tensors of any types as a run of bytes."""
        return self.region([flat(tensor).view(torch.uint8) for tensor in tensors])

    def whole(self, region: Region) -> Span:
        """Return all of a region."""
        return Span(region, 0, region.nbytes, self.chunk(region, region.nbytes))

    def shards(self, region: Region, chunk: int | None = None) -> list[Span]:
        """Return a region cut into one span a rank, in chunks of `chunk` bytes where that is given."""
        each = -(-region.nbytes // (self.size * _SHARD_ALIGNED)) * _SHARD_ALIGNED
        if chunk is None:
            chunk = self.chunk(region, each)
        cuts = [min(rank * each, region.nbytes) for rank in range(self.size + 1)]
        return [Span(region, low, high, chunk) for low, high in pairwise(cuts)]

    def chunk(self, region: Region, size: int) -> int:
        """Return how many bytes of a span of `size` go into a frame: the same on every rank."""
        return chunk_bytes(size, self._largest(region))

    def pools(self, region: Region) -> Pools:
        """Return the buffers for a region's chunks."""
        largest = self._largest(region)
        if (known := self._pools.get(largest)) is None:
            # Tensors in host memory have the least chunk, so their pool alone draws from the send_pool.
            known = self._pools[largest] = Pools(largest, None if region.queue is not None else self._send_pool)
        return known

    @property
    def short(self) -> bool:
        """Whether a frame for every peer waits for memory to be sealed in."""
        return any(pools.shared.short for pools in self._pools.values())

    def opened(self, size: int) -> memoryview:
        """Return memory for a contribution between being opened and being combined, before anything else happens."""
        if len(self._opened) < size:
            self._opened = allocate(max(size, self.chunk_bytes))
        return self._opened

    def wipe(self) -> None:
        """Zero the buffers that sums and others' contributions lay in; frames are sealed, and may be read yet."""
        zero(self._opened)
        for pools in self._pools.values():
            pools.scratch.wipe()

    def close(self) -> None:
        """Let go of what belongs to devices."""
        for queue in self._queues.values():
            queue.close()

    def _largest(self, region: Region) -> int:
        return self.chunk_bytes if region.queue is None else max(self.chunk_bytes, DEVICE_CHUNK_BYTES)
