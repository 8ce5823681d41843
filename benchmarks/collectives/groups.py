"""The process groups of every way, made beside each other on each rank, which only a benchmark may do.

A sealed world forbids groups of another backend, and has no group without AEAD. Here groups are put together from
their parts, with streams that do not encrypt or that count. Law: counting takes time, so no group that counts is timed.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from benchmarks.collectives import ring
from benchmarks.collectives.cells import Way
from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.protocol.group_keys import Lane, Membership
from glasshouse.collectives.protocol.headers import Algorithm, Bytes, counted, set_counter
from glasshouse.collectives.torch_backend.arguments import StagedTensors, reducing, reduction, tensors_of
from glasshouse.collectives.torch_backend.process_group import SealedGroup
from glasshouse.collectives.torch_backend.sealed_work import SealedWork
from glasshouse.collectives.transport.dial import Direct
from glasshouse.collectives.transport.mesh import Mesh
from glasshouse.wire.crypto import TAG_BYTES, Suite

__all__ = ["Counted", "Groups", "Plain"]

TIMEOUT_S = 120.0
_ALGORITHMS = {Way.SERIAL: Algorithm.SERIAL, Way.RING: Algorithm.RING, Way.DIRECT: Algorithm.DIRECT}


class _Copies:
    """One end of a stream that copies a payload to where its ciphertext or plaintext would be, in the frames' order."""

    def __init__(self) -> None:
        self._next = 0

    def seal_into(self, header: bytearray | memoryview, plaintext: Bytes, out: bytearray | memoryview) -> None:
        self.complete(header, len(plaintext))
        self._next += 1
        out[: len(plaintext)] = plaintext

    def complete(self, header: bytearray | memoryview, size: int) -> None:
        set_counter(header, size, self._next)

    def open_into(self, header: Bytes, sealed: Bytes, out: bytearray | memoryview) -> None:
        size, counter = counted(header)
        if counter != self._next or len(sealed) != size + TAG_BYTES:
            raise ValueError("a frame without AEAD out of its order")
        self._next += 1
        out[:] = sealed[:size]


class Plain:
    """Streams without AEAD: the same frames and copies, and neither secrecy nor authenticity."""

    def __init__(self) -> None:
        self._ends: defaultdict[tuple[object, ...], _Copies] = defaultdict(_Copies)

    def sealer(self, lane: Lane, destination: int, suite: Suite = Suite.AES_256_GCM) -> _Copies:
        return self._ends["seal", lane, destination, suite]

    def opener(self, lane: Lane, source: int, suite: Suite = Suite.AES_256_GCM, *, broadcast: bool = False) -> _Copies:
        return self._ends["open", lane, source, suite, broadcast]


class _CountedEnd:
    """One end of a stream whose calls are added to a tally."""

    def __init__(self, inner: Any, tally: dict[str, float]) -> None:
        self._inner, self._tally = inner, tally

    def seal_into(self, header: bytearray | memoryview, plaintext: Bytes, out: bytearray | memoryview) -> None:
        self._count("seal", len(plaintext), lambda: self._inner.seal_into(header, plaintext, out))

    def open_into(self, header: Bytes, sealed: Bytes, out: bytearray | memoryview) -> None:
        self._count("open", len(out), lambda: self._inner.open_into(header, sealed, out))

    def _count(self, name: str, size: int, call: Callable[[], None]) -> None:
        begin = time.thread_time()
        call()
        self._tally[f"{name}_s"] += time.thread_time() - begin
        self._tally[f"{name}_calls"] += 1
        self._tally[f"{name}_bytes"] += size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Counted:
    """Other streams, with every call added to `tally`: calls, bytes and seconds."""

    def __init__(self, inner: Any, tally: dict[str, float]) -> None:
        self._inner, self._tally = inner, tally

    def sealer(self, lane: Lane, destination: int, suite: Suite = Suite.AES_256_GCM) -> Any:
        return _CountedEnd(self._inner.sealer(lane, destination, suite), self._tally)

    def opener(self, lane: Lane, source: int, suite: Suite = Suite.AES_256_GCM, *, broadcast: bool = False) -> Any:
        return _CountedEnd(self._inner.opener(lane, source, suite, broadcast=broadcast), self._tally)


class _Group(SealedGroup):
    """A sealed group whose all-reduces use one algorithm; the backend's own choice where it is None."""

    def __init__(self, engine: Engine, store: dist.Store, *, name: str, algorithm: Algorithm | None) -> None:
        super().__init__(engine, store, name=name, timeout_s=TIMEOUT_S)
        self._algorithm = algorithm

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **given: Any) -> SealedWork:
        """Do as the base does, with the algorithm named."""
        if self._algorithm is None:
            return super().allreduce(tensors, opts, *more, **given)
        options = reducing(c10d.AllreduceOptions, opts, None, given)
        how = reduction(options.reduceOp)
        staged = StagedTensors(of=how)
        parts = [staged.target(tensor, read=True) for tensor in tensors_of(tensors)]
        return self._run([ring.all_reduce(parts, how, self._algorithm)], tensors_of(tensors), staged, options)


class Groups:
    """The groups of one rank; gloo's is the default group of torch.

    Args:
        store: where the ranks find each other.
        rank, size: this rank's place.
        secret: of the sealed groups, drawn for this benchmark.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, secret: bytes) -> None:
        self._store, self._rank, self._size, self._secret = store, rank, size, secret
        self._groups: dict[Way, dist.ProcessGroup] = {}
        self._counted: dict[Way, tuple[SealedGroup, Mesh, dict[str, float]]] = {}
        self._made = 0

    def of(self, way: Way) -> dist.ProcessGroup:
        """Return the group of a way, made at its first use on every rank; gloo's where nothing is sealed."""
        if way in (Way.RAW, Way.ALONE):
            return dist.group.WORLD
        if way not in self._groups:
            self._groups[way] = self._make(way, None)[0]
        return self._groups[way]

    def counted(self, way: Way) -> dist.ProcessGroup:
        """Return a group of its own that counts, made at its first use on every rank."""
        if way not in self._counted:
            tally = defaultdict[str, float](float)
            self._counted[way] = (*self._make(way, tally), tally)
        return self._counted[way][0]

    def count(self, way: Way, once: Callable[[], None]) -> dict[str, float]:
        """Return what one call took on this rank that uses `counted(way)` and ends when its results are there."""
        group, mesh, tally = self._counted[way]
        tally.clear()
        received, number = _received(mesh), group._get_sequence_number_for_group()
        # No rank begins before all have looked at their connections, or looks again before all are done.
        dist.barrier()
        used, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        once()
        wall, now = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF)
        dist.barrier()
        system, user = now.ru_stime - used.ru_stime, now.ru_utime - used.ru_utime
        names = ("seal_calls", "open_calls", "seal_bytes", "open_bytes", "seal_s", "open_s")
        return {name: tally[name] for name in names} | {
            "all_reduces": float(group._get_sequence_number_for_group() - number),
            "received_bytes": float(_received(mesh) - received),
            "system_s": system,
            "other_s": max(0.0, user - tally["seal_s"] - tally["open_s"]),
            "wait_s": max(0.0, wall - user - system),
        }

    def _make(self, way: Way, tally: dict[str, float] | None) -> tuple[SealedGroup, Mesh]:
        self._made += 1
        name = f"{way.value} {self._made}"
        membership = Membership(group=name, ranks=tuple(range(self._size)), rank=self._rank, incarnation=0)
        store = dist.PrefixStore(f"bench/{name}/", self._store)
        # gloo uses TCP on one machine too, and so do all ways but the one that a user gets here.
        dialler = Direct(local=way is Way.SEALED)
        mesh = Mesh.connect(store, membership, self._secret, timeout_s=TIMEOUT_S, dialler=dialler)
        streams: Any = Plain() if way is Way.PLAIN else mesh.traffic
        if tally is not None:
            streams = Counted(streams, tally)
        communicator = Communicator(mesh.membership, streams, shared=mesh.shared)
        engine = Engine(mesh, timeout_s=TIMEOUT_S, communicator=communicator)
        group = _Group(engine, self._store, name=name, algorithm=_ALGORITHMS.get(way))
        # DDP asks torch which ranks a group has; one that `new_group` made would be known.
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self._size)}
        dist.distributed_c10d._world.pg_names[group] = name
        return group, mesh


def _received(mesh: Mesh) -> int:
    """Return the bytes that this rank has received on its collective connections."""
    return sum(link.received for link in mesh.collective)
