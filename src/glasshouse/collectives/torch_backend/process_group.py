"""The process group of torch: every collective of its interface, sealed or refused, and how a group is made.

Laws: no method hands a tensor to anything but the engine. Methods bear the names of torch 2.11 and 2.13; those that
torch's C++ calls without asking Python come back through `guard`. Every initialisation of a group, also
one with the name of an earlier one, has an incarnation and contributions of its own.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed import distributed_c10d as c10d

from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations import plans, point_to_point
from glasshouse.collectives.protocol.group_keys import Membership
from glasshouse.collectives.secret import group_secret
from glasshouse.collectives.torch_backend import guard, reach, torch_hooks
from glasshouse.collectives.torch_backend.arguments import (
    StagedTensors,
    lists,
    options,
    portions,
    reducing,
    reduction,
    rooted,
    tensors_of,
)
from glasshouse.collectives.torch_backend.group_base import GroupBase
from glasshouse.collectives.torch_backend.sealed_work import SealedWork
from glasshouse.collectives.transport.mesh import Mesh
from glasshouse.errors import Code, CollectiveError, UsageError
from glasshouse.wire.crypto import zero

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchelastic has started this group's processes again
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
_lock = threading.Lock()


@torch_hooks.eager
class SealedGroup(GroupBase):
    """A process group whose collectives are sealed."""

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any) -> SealedWork:
        tensors, opts = tensors_of(tensors), rooted(c10d.BroadcastOptions, opts, timeout, given, self.size())
        staged = StagedTensors()
        parts = staged.sources(tensors) if opts.rootRank == self.rank() else staged.targets(tensors)
        return self._run([plans.broadcast(parts, opts.rootRank)], tensors, staged, opts)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any) -> SealedWork:
        opts = reducing(c10d.AllreduceOptions, opts, timeout, given)
        tensors, how = tensors_of(tensors), reduction(opts.reduceOp)
        staged = StagedTensors(of=how)
        by_type: dict[Any, list[Any]] = {}
        for tensor in tensors:
            part = staged.target(tensor, read=True)
            by_type.setdefault(part.dtype, []).append(part)
        exchanges = [plans.all_reduce(some, how) for some in by_type.values()]
        return self._run(exchanges, tensors, staged, opts)

    allreduce_coalesced = allreduce

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, **given: Any
    ) -> SealedWork:
        if op is not None:
            given["op"] = op
        opts = rooted(c10d.ReduceOptions, opts, timeout, given, self.size())
        (tensor,), how = tensors_of(tensors), reduction(opts.reduceOp)
        staged = StagedTensors(of=how)
        mine = opts.rootRank == self.rank()
        part = staged.target(tensor, read=True) if mine else staged.source(tensor)
        return self._run([plans.reduce(part, how, opts.rootRank)], [tensor], staged, opts)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> SealedWork:
        opts = options(c10d.AllgatherOptions, opts, timeout)
        outputs, (source,) = lists(output_tensors), tensors_of(input_tensors)
        (filled,) = outputs
        return self._gather_all([source], [filled], outputs, opts)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> SealedWork:
        # One list for each rank, with that rank's tensor for each input.
        sources, outputs = list(input_list), [list(filled) for filled in self._one_each(output_lists)]
        if any(len(filled) != len(sources) for filled in outputs):
            raise ValueError(f"{len(sources)} tensors are gathered into lists of another length")
        filled = [list(of_one_input) for of_one_input in zip(*outputs, strict=True)]
        return self._gather_all(sources, filled, outputs, options(c10d.AllgatherOptions, opts))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> SealedWork:  # noqa: A002 - torch's name
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SealedWork:
        staged = StagedTensors()
        filled = [self._cut(staged.target(tensor)) for tensor in outputs]
        return self._gathered(inputs, filled, list(outputs), staged, options(c10d.AllgatherOptions, opts))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any
    ) -> SealedWork:
        opts = rooted(c10d.GatherOptions, opts, timeout, given, self.size())
        (source,) = tensors_of(input_tensors)
        staged = StagedTensors()
        part = staged.source(source)
        outputs: list[Any] = []
        filled = None
        if opts.rootRank == self.rank():
            (outputs,) = lists(output_tensors)
            filled = staged.targets(self._one_each(outputs))
        return self._run([plans.gather(part, filled, opts.rootRank)], [outputs], staged, opts)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any
    ) -> SealedWork:
        opts = rooted(c10d.ScatterOptions, opts, timeout, given, self.size())
        (output,) = tensors_of(output_tensors)
        staged = StagedTensors()
        sources = None
        if opts.rootRank == self.rank():
            (inputs,) = lists(input_tensors)
            sources = staged.sources(self._one_each(inputs))
        return self._run([plans.scatter(staged.target(output), sources, opts.rootRank)], [output], staged, opts)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any
    ) -> SealedWork:
        opts = reducing(c10d.ReduceScatterOptions, opts, timeout, given)
        (output,), (inputs,) = tensors_of(output_tensors), lists(input_tensors)
        how = reduction(opts.reduceOp)
        staged = StagedTensors(of=how)
        sources = staged.sources(self._one_each(inputs))
        return self._run([plans.reduce_scatter(sources, staged.target(output), how)], [output], staged, opts)

    def reduce_scatter_single(self, outputTensor: Any, inputTensor: Any, opts: Any = None) -> SealedWork:  # noqa: N803
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SealedWork:
        opts = reducing(c10d.ReduceScatterOptions, opts, None, {})
        how = reduction(opts.reduceOp)
        staged = StagedTensors(of=how)
        parts = [
            plans.reduce_scatter(self._cut(staged.source(given)), staged.target(output), how)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._run(parts, list(outputs), staged, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SealedWork:
        staged = StagedTensors()
        sources = staged.sources(self._one_each(input_tensors))
        filled = staged.targets(self._one_each(output_tensors))
        opts = options(c10d.AllToAllOptions, opts)
        return self._run([plans.all_to_all(sources, filled)], list(output_tensors), staged, opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> SealedWork:
        staged = StagedTensors()
        sources = portions(staged.source(input), input_split_sizes, self.size())
        filled = portions(staged.target(output), output_split_sizes, self.size())
        opts = options(c10d.AllToAllOptions, opts, timeout)
        return self._run([plans.all_to_all(sources, filled)], [output], staged, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> SealedWork:
        return self._run([plans.barrier()], [], StagedTensors(), options(c10d.BarrierOptions, opts, timeout))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; the error names one that did not come. `wait_all_ranks` asks for no more than that."""
        del wait_all_ranks
        given = options(c10d.BarrierOptions, None, timeout)
        given.asyncOp = False
        self.barrier(given)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> SealedWork:  # noqa: N803 - torch's names, here and below
        staged = StagedTensors()
        return self._run([point_to_point.send(staged.sources(tensors_of(tensors)), dstRank, tag)], [], staged, None)

    def recv(self, tensors: Any, srcRank: int | None, tag: int = 0) -> SealedWork:  # noqa: N803
        staged, filled = StagedTensors(), tensors_of(tensors)
        return self._run([point_to_point.receive(staged.targets(filled), srcRank, tag)], filled, staged, None)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SealedWork:
        return self.recv(tensors, None, tag)

    def _gather_all(self, inputs: Iterable[Any], filled: Any, outputs: list[Any], opts: Any) -> SealedWork:
        staged = StagedTensors()
        return self._gathered(
            inputs, [staged.targets(self._one_each(tensors)) for tensors in filled], outputs, staged, opts
        )

    def _gathered(
        self, inputs: Iterable[Any], filled: list[Any], outputs: list[Any], staged: StagedTensors, opts: Any
    ) -> SealedWork:
        sources = staged.sources(inputs)
        if len(sources) != len(filled):
            raise ValueError(f"{len(sources)} tensors are gathered into {len(filled)}")
        return self._run([plans.all_gather(sources, filled)], outputs, staged, opts)

    def _cut(self, tensor: Any) -> list[Any]:
        return portions(tensor.view(-1), (), self.size())

    def _one_each(self, tensors: Any) -> list[Any]:
        each: list[Any] = list(tensors)
        if len(each) != self.size():
            raise ValueError(f"{len(each)} tensors for {self.size()} ranks")
        return each


def create(options: Any, backend_options: Any = None) -> SealedGroup:
    """Make the group that torch's `_DistributedBackendOptions` describe.

    Raises:
        CollectiveError: no secret, other ranks that differ or do not come, or something unsealed in this process.
        UsageError: options that the backend does not have.
    """
    if backend_options is not None:
        raise UsageError(Code.USAGE, "the sealed backend takes no pg_options")
    guard.check_unsealed()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return _join(options.store, str(options.group_id), ranks, options.group_rank, options.timeout.total_seconds())


def _join(store: Any, name: str, ranks: tuple[int, ...], rank: int, timeout_s: float) -> SealedGroup:
    membership = Membership(group=name, ranks=ranks, rank=rank, incarnation=_incarnation(name, ranks))
    # Names come again after destroy_process_group, for the same ranks or for others, and the store may still be there.
    own = PrefixStore(f"sealed/{membership.digest().hex()}/{membership.incarnation}/", store)
    secret = group_secret()
    try:
        mesh = Mesh.connect(own, membership, secret, timeout_s=timeout_s, dialler=reach.dialler())
    finally:
        zero(secret)
    engine = Engine(mesh, timeout_s=timeout_s)

    def split(members: list[int], child: str, child_timeout_s: float) -> SealedGroup:
        chosen = tuple(ranks[member] for member in members)
        under = PrefixStore(f"{child}/", store)
        return _join(under, child, chosen, members.index(rank), child_timeout_s or timeout_s)

    group = SealedGroup(engine, store, name=name, timeout_s=timeout_s, split=split)
    guard.add_group(group)
    return group


def _incarnation(name: str, ranks: tuple[int, ...]) -> int:
    """Return a number that this group of these ranks never had before, in this process or in those before it.

    Counted by name and ranks: its members have made it equally often, which need not be so for other ranks.
    """
    restarts = os.environ.get(_RESTARTS, "0")
    if not restarts.isascii() or not restarts.isdigit() or int(restarts) >= 2**32:
        raise CollectiveError(Code.GROUP_MISMATCH, f"{_RESTARTS} is not a count of restarts")
    with _lock:
        earlier = _made[name, ranks]
        _made[name, ranks] += 1
    return int(restarts) << 32 | earlier


@atexit.register
def _leave() -> None:
    """Leave the groups of a script that ends without destroy_process_group; nothing is waited for."""
    for group in guard.groups():
        with suppress(CollectiveError, OSError):
            group.leave()
