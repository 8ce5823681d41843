"""One rank's side of a group, as operations use it: ranks, keys, buffers, and where tensors are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from glasshouse.collectives.operations.regions import DeviceRegion, HostRegion, Region, Span, flat
from glasshouse.collectives.protocol.frame_memory import CHUNK_BYTES, SHARED_FRAMES, Buffers, allocate
from glasshouse.collectives.protocol.group_keys import Membership
from glasshouse.collectives.protocol.headers import frame_bytes
from glasshouse.collectives.protocol.traffic import Traffic
from glasshouse.wire.crypto import zero

DEVICE_CHUNK_BYTES = 4 << 20
"""The largest chunk of tensors on a device: a launch and its way there and back cost as much as half a MiB."""

_LEAST_CHUNK_BYTES = 256 << 10
_ALIGNED = 64
_SCRATCH_BUFFERS = 4


def chunk_bytes(nbytes: int, largest: int) -> int:
    """Return the chunk for a span of so many bytes: small enough that sealing, sending, opening and adding overlap.

    A multiple of every element's size, and the same on every rank.
    """
    return min(largest, max(_LEAST_CHUNK_BYTES, _aligned(-(-nbytes // 2))))


class _Pools:
    """Buffers for chunks of up to `chunk_bytes`."""

    def __init__(self, chunk_bytes: int, make: Callable[[int], memoryview]) -> None:
        self.chunk_bytes = chunk_bytes
        self.shared = Buffers(frame_bytes(chunk_bytes), SHARED_FRAMES, make)  # for frames that every peer is sent
        self.scratch = Buffers(4 * chunk_bytes, _SCRATCH_BUFFERS)
        """For a partial result and a scaled contribution that may both be twice as wide as the elements."""


class Communicator:
    """One rank's side of a group, with the largest chunk of tensors in host memory, the same on all ranks.

    `shared` allocates memory for a frame that every peer is sent, which ranks of this machine may read.
    """

    def __init__(
        self,
        membership: Membership,
        streams: Traffic,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        shared: Callable[[int], memoryview] = allocate,
    ) -> None:
        self.rank = membership.rank
        self.size = membership.size
        self.peers = membership.peers
        self.streams = streams
        self.chunk_bytes = chunk_bytes
        self._shared = shared
        self._opened = memoryview(bytearray())
        self._pools: dict[int, _Pools] = {}
        self._queues: dict[Any, Any] = {}

    def queue(self, tensors: Sequence[Any]) -> Any:
        """Return the queue that orders work on tensors, None for tensors in host memory."""
        if not tensors or (device := tensors[0].device).type == "cpu":
            return None
        if device not in self._queues:
            from glasshouse.collectives.kernels.cipher import Queue  # Triton, only where there is a device

            self._queues[device] = Queue(device)
        return self._queues[device]

    def region(self, tensors: Sequence[Any]) -> Region:
        """Return tensors of one type, all on one device, as a run of bytes."""
        queue = self.queue(tensors)
        return HostRegion(tensors) if queue is None else DeviceRegion(tensors, queue)

    def as_bytes(self, tensors: Sequence[Any]) -> Region:
        """Return tensors of any types as a run of bytes."""
        return self.region([flat(tensor).view(torch.uint8) for tensor in tensors])

    def whole(self, region: Region) -> Span:
        """Return all of a region."""
        return Span(region, 0, region.nbytes, chunk_bytes(region.nbytes, self._largest(region)))

    def shards(self, region: Region, chunk: int | None = None) -> list[Span]:
        """Return a region cut into one span a rank, in chunks of `chunk` bytes where that is given."""
        each = _aligned(-(-region.nbytes // self.size))
        if chunk is None:
            chunk = chunk_bytes(each, self._largest(region))
        cuts = [min(rank * each, region.nbytes) for rank in range(self.size + 1)]
        return [Span(region, low, high, chunk) for low, high in pairwise(cuts)]

    def pools(self, region: Region) -> _Pools:
        """Return the buffers for a region's chunks."""
        largest = self._largest(region)
        if (known := self._pools.get(largest)) is None:
            known = self._pools[largest] = _Pools(largest, self._shared)
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
        """Zero the buffers of sums and of others' contributions; frames are sealed, and may be read yet."""
        zero(self._opened)
        for pools in self._pools.values():
            pools.scratch.wipe()

    def close(self) -> None:
        """Release device resources."""
        for queue in self._queues.values():
            queue.close()

    def _largest(self, region: Region) -> int:
        return self.chunk_bytes if region.queue is None else max(self.chunk_bytes, DEVICE_CHUNK_BYTES)


def one_each(tensors: Sequence[Any], size: int) -> None:
    """Raise `ValueError` unless there is one tensor for each of `size` ranks."""
    if len(tensors) != size:
        raise ValueError(f"{len(tensors)} tensors in a group of {size} ranks: one each is needed")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
