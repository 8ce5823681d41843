"""The process group that torch works with: every collective of its interface, sealed or refused.

Laws: no method hands a tensor to anything but the engine; what is not offered raises `collective-unsealed`; the
group has no backend beneath it, and none can be registered, so that nothing of torch's own can go around it.
Methods bear the names of torch 2.11 and 2.13; those that torch's C++ calls without asking Python come back through
`dispatch`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from glasshouse.collectives import operations
from glasshouse.collectives.torch_backend import guard
from glasshouse.collectives.torch_backend.arguments import (
    StagedTensors,
    chunks,
    lists,
    options,
    portions,
    reducing,
    reduction,
    refusal,
    rooted,
    tensors_of,
    timeout_s,
)
from glasshouse.collectives.torch_backend.eager import eager
from glasshouse.collectives.torch_backend.reach import NAME
from glasshouse.collectives.torch_backend.sealed_work import Completion, Finished, Joined, SealedWork
from glasshouse.errors import Code, CollectiveError

__all__ = ["GroupEngine", "SealedGroup"]

_LOOK_AT_LEAST = 16
"""Asynchronous collectives in mind before those that are done are sorted out."""


class GroupEngine(Protocol):
    """What a group needs of an engine."""

    rank: int
    size: int

    def submit(self, operation: Any, *, timeout_s: float | None = None, background: bool) -> Completion: ...

    def close(self) -> None: ...

    def abort(self, error: CollectiveError) -> None: ...


@eager
class SealedGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch is not typed
    """A process group over an engine.

    Args:
        engine: connected to every other rank.
        store: the rendezvous store of the group, for those who ask for it.
        name: the group's, as torch gives it.
        timeout_s: of every operation that brings none of its own.
        split: makes the group of some of these ranks: called with their ranks here, name, and timeout.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False

    def __init__(
        self,
        engine: GroupEngine,
        store: Any = None,
        *,
        name: str = "",
        timeout_s: float | None = None,
        split: Any = None,
    ) -> None:
        super().__init__(engine.rank, engine.size)
        self._engine = engine
        self._store = store
        self._name = name
        self._desc = "undefined"
        self._timeout_s = timeout_s
        self._split = split
        self._pid = os.getpid()
        self._submitted = 0
        self._coalesced: list[Completion] | None = None
        self._unfinished: list[Completion] = []
        self._look_at = _LOOK_AT_LEAST

    # -- who it is ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ looks it up by this name, and those below
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    _get_backend_name = getBackendName
    name = getBackendName

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    @property
    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        return False

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: Any) -> SealedGroup:
        """Return what torch asks for a backend's abilities: the group itself, which has none of the special ones."""
        del device
        return self

    def _backend_id(self, backend_type: Any) -> int:
        del backend_type
        return id(self)

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the numbers that the frames bear begin at zero with the group."""

    def _get_sequence_number_for_group(self) -> int:
        return self._submitted

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout_s(timeout) or self._timeout_s

    _set_default_timeout = set_timeout

    # -- what it refuses ---------------------------------------------------------------------------------------------

    def _register_backend(self, *_: Any, **__: Any) -> None:
        raise refusal("a sealed group takes no other backend beneath it")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        raise refusal(
            "the sealed backend does not merge groups", hint="make the group with torch.distributed.new_group"
        )

    mergeRemoteGroup = merge_remote_group  # noqa: N815 - as torch's C++ calls it

    def _register_on_completion_hook(self, *_: Any, **__: Any) -> None:
        raise refusal("the sealed backend has no completion hooks")

    def _wait_for_pending_works(self) -> None:
        raise refusal("the sealed backend has no completion hooks")

    def _enable_collectives_timing(self) -> None:
        raise refusal("the sealed backend does not time collectives one by one")

    # -- its life ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish the collectives that are under way, and leave.

        Messages that were not taken are not waited for.
        """
        for completion in self._unfinished:
            with suppress(CollectiveError):
                completion.wait()
        self.leave()

    def leave(self) -> None:
        """Say goodbye to the other ranks and close the connections; what is under way fails."""
        guard.remove_group(self)
        self._engine.close()

    def abort(self) -> None:
        """End the group on every rank; what is under way fails."""
        guard.remove_group(self)
        self._engine.abort(CollectiveError(Code.COLLECTIVE_ABORTED, f"rank {self.rank()} aborted the group"))

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SealedGroup | None:
        """Return a new sealed group of some of these ranks, or None where this rank is not one of them.

        Every rank in `ranks` must call this with the same ranks and name.
        """
        del opts, device_types
        if self._split is None:
            raise refusal("this sealed group cannot be split")
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._name}:split:{','.join(map(str, ranks))}"
        child: SealedGroup = self._split(list(ranks), name, timeout_s(timeout) or self._timeout_s)
        child.setGroupDesc(group_desc or f"{self._desc}:split")
        return child

    splitGroup = split_group  # noqa: N815 - as torch's C++ calls it

    # -- one tensor to and from all ----------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any) -> SealedWork:
        tensors, opts = tensors_of(tensors), rooted(c10d.BroadcastOptions, opts, timeout, given, self.size())
        staged = StagedTensors()
        mine = opts.rootRank == self.rank()
        parts = [staged.source(tensor) if mine else staged.target(tensor) for tensor in tensors]
        return self._run(operations.broadcast(parts, opts.rootRank), tensors, staged, opts)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any) -> SealedWork:
        opts = reducing(c10d.AllreduceOptions, opts, timeout, given)
        tensors, how = tensors_of(tensors), reduction(opts.reduceOp)
        staged = StagedTensors(of=how)
        parts = [staged.target(tensor, read=True) for tensor in tensors]
        by_type: dict[Any, list[Any]] = {}
        for part in parts:
            by_type.setdefault(part.dtype, []).append(part)
        exchanges = [operations.all_reduce(some, how) for some in by_type.values()]
        return self._run_all(exchanges, tensors, staged, opts)

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
        operation = operations.reduce(part, how, opts.rootRank)
        return self._run(operation, [tensor], staged, opts)

    # -- gathering ---------------------------------------------------------------------------------------------------

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> SealedWork:
        opts = options(c10d.AllgatherOptions, opts, timeout)
        outputs, (source,) = lists(output_tensors), tensors_of(input_tensors)
        (filled,) = outputs
        return self._gather_all([source], [filled], outputs, opts)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> SealedWork:
        # One list for each rank, of what that rank has for each input.
        sources, outputs = list(input_list), [list(filled) for filled in self._one_each(output_lists)]
        if any(len(filled) != len(sources) for filled in outputs):
            raise ValueError(f"{len(sources)} tensors are gathered into lists of another length")
        filled = [list(of_one_input) for of_one_input in zip(*outputs, strict=True)]
        return self._gather_all(sources, filled, outputs, options(c10d.AllgatherOptions, opts))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> SealedWork:  # noqa: A002 - torch's name
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SealedWork:
        opts = options(c10d.AllgatherOptions, opts)
        staged = StagedTensors()
        sources = [staged.source(tensor) for tensor in inputs]
        filled = [chunks(staged.target(tensor), self.size()) for tensor in outputs]
        return self._gathered(sources, filled, list(outputs), staged, opts)

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
            filled = [staged.target(tensor) for tensor in self._one_each(outputs)]
        return self._run(operations.gather(part, filled, opts.rootRank), [outputs], staged, opts)

    # -- scattering --------------------------------------------------------------------------------------------------

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any
    ) -> SealedWork:
        opts = rooted(c10d.ScatterOptions, opts, timeout, given, self.size())
        (output,) = tensors_of(output_tensors)
        staged = StagedTensors()
        sources = None
        if opts.rootRank == self.rank():
            (inputs,) = lists(input_tensors)
            sources = [staged.source(tensor) for tensor in self._one_each(inputs)]
        return self._run(operations.scatter(staged.target(output), sources, opts.rootRank), [output], staged, opts)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None, **given: Any
    ) -> SealedWork:
        opts = reducing(c10d.ReduceScatterOptions, opts, timeout, given)
        (output,) = tensors_of(output_tensors)
        (inputs,), how = lists(input_tensors), reduction(opts.reduceOp)
        staged = StagedTensors(of=how)
        sources = [staged.source(tensor) for tensor in self._one_each(inputs)]
        operation = operations.reduce_scatter(sources, staged.target(output), how)
        return self._run(operation, [output], staged, opts)

    def reduce_scatter_single(self, outputTensor: Any, inputTensor: Any, opts: Any = None) -> SealedWork:  # noqa: N803
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SealedWork:
        opts = reducing(c10d.ReduceScatterOptions, opts, None, {})
        how = reduction(opts.reduceOp)
        staged = StagedTensors(of=how)
        parts = [
            operations.reduce_scatter(chunks(staged.source(given), self.size()), staged.target(output), how)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._run_all(parts, list(outputs), staged, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- everybody to everybody --------------------------------------------------------------------------------------

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SealedWork:
        opts = options(c10d.AllToAllOptions, opts)
        staged = StagedTensors()
        sources = [staged.source(tensor) for tensor in self._one_each(input_tensors)]
        filled = [staged.target(tensor) for tensor in self._one_each(output_tensors)]
        return self._run(operations.all_to_all(sources, filled), list(output_tensors), staged, opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> SealedWork:
        opts = options(c10d.AllToAllOptions, opts, timeout)
        staged = StagedTensors()
        sources = portions(staged.source(input), input_split_sizes, self.size())
        filled = portions(staged.target(output), output_split_sizes, self.size())
        return self._run(operations.all_to_all(sources, filled), [output], staged, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> SealedWork:
        opts = options(c10d.BarrierOptions, opts, timeout)
        return self._run(operations.barrier(), [], StagedTensors(), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; the error names one that did not come. `wait_all_ranks` asks for no more than that."""
        del wait_all_ranks
        given = options(c10d.BarrierOptions, None, timeout)
        given.asyncOp = False
        self.barrier(given)

    # -- one to one --------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> SealedWork:  # noqa: N803 - torch's names, here and below
        staged = StagedTensors()
        sources = [staged.source(tensor) for tensor in tensors_of(tensors)]
        return self._run(operations.send(sources, dstRank, tag), [], staged, None)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> SealedWork:  # noqa: N803
        return self._receive(tensors_of(tensors), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SealedWork:
        return self._receive(tensors_of(tensors), None, tag)

    def _receive(self, tensors: list[Any], source: int | None, tag: int) -> SealedWork:
        staged = StagedTensors()
        filled = [staged.target(tensor) for tensor in tensors]
        return self._run(operations.receive(filled, source, tag), tensors, staged, None)

    # -- several at once ---------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        del device
        if self._coalesced is not None:
            raise ValueError("coalescing has begun already")
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> SealedWork:
        """Return the work of all that was begun since `_start_coalescing`."""
        del device
        begun, self._coalesced = self._coalesced, None
        if begun is None:
            raise ValueError("coalescing has not begun")
        return SealedWork(Joined(begun), [])

    # -- how they all run --------------------------------------------------------------------------------------------

    def _run(self, operation: Any, outputs: list[Any], staged: StagedTensors, opts: Any) -> SealedWork:
        return self._run_all([operation], outputs, staged, opts)

    def _run_all(self, parts: Sequence[Any], outputs: list[Any], staged: StagedTensors, opts: Any) -> SealedWork:
        """Give operations to the engine; where the caller is to wait for them, wait."""
        if os.getpid() != self._pid:
            raise CollectiveError(Code.COLLECTIVE_ABORTED, "a process forked from a rank is not a member of its groups")
        asynchronous = opts is None or bool(opts.asyncOp)
        timeout = timeout_s(getattr(opts, "timeout", None)) or self._timeout_s
        begun = [
            self._engine.submit(operation, timeout_s=timeout, background=asynchronous or len(parts) > 1)
            for operation in parts
        ]
        self._submitted += len(begun)
        completion = begun[0] if len(begun) == 1 else Joined(begun) if begun else Finished()
        work = SealedWork(completion, outputs, staged.settle if staged.made else None)
        if self._coalesced is not None:
            self._coalesced.append(completion)
        if not asynchronous:
            work.wait()
            return work
        if opts is not None:
            self._remember(completion)
        if c10d._allow_inflight_collective_as_graph_input():
            for tensor in outputs:
                if isinstance(tensor, torch.Tensor):
                    c10d._register_work(tensor, work)
        return work

    def _remember(self, completion: Completion) -> None:
        """Keep a collective in mind until it is done, in time that does not grow with their number."""
        self._unfinished.append(completion)
        if len(self._unfinished) >= self._look_at:
            self._unfinished = [each for each in self._unfinished if not each.done()]
            self._look_at = max(_LOOK_AT_LEAST, 2 * len(self._unfinished))

    def _gather_all(self, inputs: Any, filled: Any, outputs: list[Any], opts: Any) -> SealedWork:
        staged = StagedTensors()
        sources = [staged.source(tensor) for tensor in inputs]
        targets = [[staged.target(tensor) for tensor in self._one_each(tensors)] for tensors in filled]
        return self._gathered(sources, targets, outputs, staged, opts)

    def _gathered(self, sources: Any, filled: Any, outputs: list[Any], staged: StagedTensors, opts: Any) -> SealedWork:
        if len(sources) != len(filled):
            raise ValueError(f"{len(sources)} tensors are gathered into {len(filled)}")
        return self._run(operations.all_gather(sources, filled), outputs, staged, opts)

    def _one_each(self, tensors: Any) -> list[Any]:
        each: list[Any] = list(tensors)
        if len(each) != self.size():
            raise ValueError(f"{len(each)} tensors for {self.size()} ranks")
        return each
