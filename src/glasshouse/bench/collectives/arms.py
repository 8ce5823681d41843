"""Every way's process group, made once on each rank and beside each other, which only a benchmark may do.

A sealed world forbids groups of another backend, and has no group without AEAD. Here groups are put together from
their parts: mesh, engine and group are constructed directly, beside gloo's, with an algorithm of our choice.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from glasshouse.bench.collectives.streams import Counted, Plain, Tally, adding_counted
from glasshouse.bench.collectives.values import Way
from glasshouse.collectives import operations
from glasshouse.collectives.arguments import Asides, reducing, reduction, tensors_of
from glasshouse.collectives.dial import Direct
from glasshouse.collectives.engine import Engine
from glasshouse.collectives.frames import Algorithm
from glasshouse.collectives.group import SealedGroup
from glasshouse.collectives.keys import Membership
from glasshouse.collectives.mesh import Mesh
from glasshouse.collectives.work import SealedWork

__all__ = ["Arms"]

TIMEOUT_S = 120.0
_ALGORITHMS = {Way.SERIAL: Algorithm.SERIAL, Way.RING: Algorithm.RING, Way.DIRECT: Algorithm.DIRECT}


@dataclass(slots=True)
class _Arm:
    """One sealed group, and what is counted of it."""

    _: KW_ONLY
    group: SealedGroup
    engine: Engine
    mesh: Mesh
    tally: Tally | None
    sums: int = 0


class _Group(SealedGroup):
    """A sealed group whose all-reduces use one algorithm.

    Args:
        engine: connected to every other rank.
        store: the rendezvous store.
        name: the group's.
        algorithm: None for the backend's own choice.
    """

    def __init__(self, engine: Engine, store: dist.Store, *, name: str, algorithm: Algorithm | None) -> None:
        super().__init__(engine, store, name=name, timeout_s=TIMEOUT_S)
        self._algorithm = algorithm

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **given: Any) -> SealedWork:
        """Do as the base does, with the algorithm named."""
        if self._algorithm is None:
            return super().allreduce(tensors, opts, *more, **given)
        options = reducing(c10d.AllreduceOptions, opts, None, given)
        how = reduction(options.reduceOp)
        asides = Asides(of=how)
        parts = [asides.target(tensor, read=True) for tensor in tensors_of(tensors)]
        operation = operations.all_reduce(parts, how, self._algorithm)
        return self._run(operation, tensors_of(tensors), asides, options)


class Arms:
    """The groups of one rank: gloo's is the default group of torch.

    Args:
        store: where the ranks find each other.
        rank, size: our place.
        ways: what is made.
        secret: of the sealed groups, drawn for this benchmark.
    """

    def __init__(self, *, store: dist.Store, rank: int, size: int, ways: tuple[Way, ...], secret: bytes) -> None:
        self._store, self._rank, self._size, self._secret = store, rank, size, secret
        self._made = 0
        sealed = [way for way in ways if way not in (Way.RAW, Way.ALONE)]
        self._arms = {way: self._make(way, counted=False) for way in sealed}
        self._counted: dict[Way, _Arm] = {}

    def group(self, way: Way) -> dist.ProcessGroup:
        """Return the group of a way; that of gloo where nothing is sealed."""
        return self._arms[way].group if way in self._arms else dist.group.WORLD

    def barrier(self) -> None:
        """Wait for every rank, by gloo."""
        dist.barrier()

    def counted(self, way: Way) -> dist.ProcessGroup | None:
        """Return a group of its own for counting; None where nothing counts."""
        if way not in self._arms:
            return None
        if way not in self._counted:
            self._counted[way] = self._make(way, counted=True)
        return self._counted[way].group

    def count(self, way: Way, repeat: Callable[[], None]) -> dict[str, float]:
        """Do something with the counted group of a way, and return what it took on this rank.

        Args:
            way: one that `counted` has a group for.
            repeat: uses that group, and ends when its results are there.
        """
        arm = self._counted[way]
        tally, added = arm.tally or Tally(), list[float]()
        before = (tally.seal_calls, tally.open_calls, tally.seal_bytes, tally.open_bytes, tally.seal_s, tally.open_s)
        received, number = _received(arm.mesh), arm.group._get_sequence_number_for_group()
        # Nobody begins before all have looked at their connections, or looks again before all are done.
        self.barrier()
        used, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        with adding_counted(added):
            repeat()
        wall, now = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF)
        self.barrier()
        after = (tally.seal_calls, tally.open_calls, tally.seal_bytes, tally.open_bytes, tally.seal_s, tally.open_s)
        names = ("seal_calls", "open_calls", "seal_bytes", "open_bytes", "seal_s", "open_s")
        found = {name: float(new - old) for name, new, old in zip(names, after, before, strict=True)}
        system, user = now.ru_stime - used.ru_stime, now.ru_utime - used.ru_utime
        busy = found["seal_s"] + found["open_s"] + sum(added)
        return {
            **found,
            "all_reduces": float(arm.group._get_sequence_number_for_group() - number),
            "received_bytes": float(_received(arm.mesh) - received),
            "add_s": sum(added),
            "system_s": system,
            "other_s": max(0.0, user - busy),
            "wait_s": max(0.0, wall - user - system),
        }

    def another(self, name: str) -> Callable[[], None]:
        """Make one more group, and return what ends it.

        Args:
            name: `raw` for gloo, `sealed` for ours.
        """
        self._made += 1
        if name == "raw":
            group = dist.new_group(backend="gloo")
            return lambda: dist.destroy_process_group(group)
        return self._join(f"start {self._made}").close

    def _make(self, way: Way, *, counted: bool) -> _Arm:
        self._made += 1
        name = f"{way.value} {self._made}"
        # What gloo does on one machine it does over TCP, and so do all ways but the one that a user gets here.
        mesh = self._mesh(name, near=way is Way.SEALED)
        tally = Tally() if counted else None
        streams: Any = Plain() if way is Way.PLAIN else mesh.traffic
        if tally is not None:
            streams = Counted(streams, tally)
        engine = Engine(mesh, timeout_s=TIMEOUT_S, streams=streams)
        group = _Group(engine, self._store, name=name, algorithm=_ALGORITHMS.get(way))
        _introduce(group, name, self._size)
        return _Arm(group=group, engine=engine, mesh=mesh, tally=tally)

    def _join(self, name: str) -> Engine:
        return Engine(self._mesh(name, near=True), timeout_s=TIMEOUT_S)

    def _mesh(self, name: str, *, near: bool) -> Mesh:
        membership = Membership(group=name, ranks=tuple(range(self._size)), rank=self._rank, incarnation=0)
        store = dist.PrefixStore(f"bench/{name}/", self._store)
        return Mesh.connect(store, membership, self._secret, timeout_s=TIMEOUT_S, dialler=Direct(near=near))


def _introduce(group: SealedGroup, name: str, size: int) -> None:
    """Tell torch which ranks a group has: DDP asks, and a group that `new_group` made would be known."""
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    dist.distributed_c10d._world.pg_names[group] = name


def _received(mesh: Mesh) -> int:
    """Return the bytes that this rank has received on its collective connections."""
    return sum(link.received for link in mesh.collective)
