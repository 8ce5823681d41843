"""Reductions: all-reduce, reduce and reduce-scatter, summed in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from glasshouse.collectives.operations.algorithms import LAG, all_reduce_algorithm
from glasshouse.collectives.operations.arithmetic import ELEMENTS, Arithmetic, Reduction
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.exchange import Agreed, Exchange, Operation
from glasshouse.collectives.operations.flows import CopySink, interleaved
from glasshouse.collectives.operations.fold import Fold
from glasshouse.collectives.operations.regions import Region
from glasshouse.collectives.protocol.headers import Algorithm, Collective

__all__ = ["Schedule", "all_reduce", "reduce", "reduce_scatter"]


Schedule: TypeAlias = Callable[[Exchange, Communicator, Region, Arithmetic], None]
"""Adds the flows of an all-reduce over several ranks to an exchange."""


def all_reduce(
    tensors: Sequence[Any],
    reduction: Reduction,
    algorithm: Algorithm | None = None,
    schedule: Schedule | None = None,
) -> Operation:
    """Combine tensors of all ranks, in place; several are one exchange.

    Args:
        tensors: contiguous, of one type, the same shapes on every rank.
        reduction: how.
        algorithm: for measurements; by default the fastest for size and world size.
        schedule: for measurements: how an algorithm is carried out that no group chooses.
    """
    dtype = _one_type(tensors)

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        region = communicator.region(tensors)
        arithmetic = Arithmetic(reduction, dtype, communicator.size)
        if reduction.factor is not None:
            for tensor in tensors:
                tensor.detach().copy_(reduction.premultiplied(tensor))
        chosen = all_reduce_algorithm(region.nbytes, communicator.size) if algorithm is None else algorithm
        agreed = Agreed(
            collective=Collective.ALL_REDUCE,
            algorithm=chosen,
            element=ELEMENTS[dtype],
            reduction=reduction.code,
            elements=sum(tensor.numel() for tensor in tensors),
            details=tuple(str(tuple(tensor.shape)) for tensor in tensors),
        )
        exchange = Exchange(communicator, sequence, agreed, [region], [region])
        if communicator.size == 1:
            _alone(region, region, arithmetic)
        else:
            (schedule or _SCHEDULES[chosen])(exchange, communicator, region, arithmetic)
        return exchange

    return Operation(tensors, plan)


def reduce(tensor: Any, reduction: Reduction, root: int) -> Operation:
    """Combine a tensor of all ranks into the root's; the others keep theirs.

    Args:
        tensor: contiguous, the same shape on every rank.
        reduction: how.
        root: index of the rank that gets the result.
    """

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        arithmetic = Arithmetic(reduction, tensor.dtype, communicator.size)
        own = reduction.premultiplied(tensor)
        if communicator.rank == root and own is not tensor:
            own = tensor.detach().copy_(own)
        region = communicator.region([own])
        agreed = Agreed(
            collective=Collective.REDUCE,
            algorithm=Algorithm.DIRECT,
            element=ELEMENTS[tensor.dtype],
            reduction=reduction.code,
            elements=tensor.numel(),
            details=(root, str(tuple(tensor.shape))),
        )
        span = communicator.whole(region)
        exchange = Exchange(communicator, sequence, agreed, [region], [region] if communicator.rank == root else [])
        if communicator.size == 1:
            _alone(region, region, arithmetic)
        elif communicator.rank != root:
            exchange.send(root, span)
        else:
            fold = Fold(communicator, range(communicator.size), span, span, arithmetic)
            for peer in communicator.peers:
                exchange.receive(peer, span, fold)
        return exchange

    return Operation([tensor], plan)


def reduce_scatter(inputs: Sequence[Any], output: Any, reduction: Reduction) -> Operation:
    """Combine the i-th input of all ranks into the output of rank i.

    Args:
        inputs: one contiguous tensor a rank; the i-th has the shape of rank i's output.
        output: contiguous; may be this rank's input itself.
        reduction: how.
    """
    dtype = _one_type([*inputs, output])

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        _one_each(inputs, communicator.size)
        arithmetic = Arithmetic(reduction, dtype, communicator.size)
        parts = [communicator.region([reduction.premultiplied(tensor)]) for tensor in inputs]
        out = communicator.region([output])
        _same_size(parts[communicator.rank], out)
        agreed = Agreed(
            collective=Collective.REDUCE_SCATTER,
            algorithm=Algorithm.DIRECT,
            element=ELEMENTS[dtype],
            reduction=reduction.code,
            elements=sum(tensor.numel() for tensor in inputs),
            details=tuple(tensor.numel() for tensor in inputs),
        )
        exchange = Exchange(communicator, sequence, agreed, [out], [out])
        if communicator.size == 1:
            _alone(parts[0], out, arithmetic)
            return exchange
        for peer in communicator.peers:
            exchange.send(peer, communicator.whole(parts[peer]))
        own = communicator.whole(parts[communicator.rank])
        fold = Fold(communicator, range(communicator.size), own, communicator.whole(out), arithmetic)
        for peer in communicator.peers:
            exchange.receive(peer, own, fold)
        return exchange

    return Operation([output], plan)


def _one_shot(exchange: Exchange, communicator: Communicator, region: Region, arithmetic: Arithmetic) -> None:
    """Everybody sends everything to everybody, and sums it all: one phase."""
    span = communicator.whole(region)
    flow = exchange.send_all(span)
    fold = Fold(communicator, range(communicator.size), span, span, arithmetic, may=lambda chunk: chunk < flow.sealed)
    for peer in communicator.peers:
        exchange.receive(peer, span, fold, shared=True)


def _direct(exchange: Exchange, communicator: Communicator, region: Region, arithmetic: Arithmetic) -> None:
    """Each rank sums one shard of all, and sends the sum, sealed once, to all."""
    shards = communicator.shards(region)
    own = shards[communicator.rank]
    fold = Fold(communicator, range(communicator.size), own, own, arithmetic)
    total = exchange.to_all(own, phase=1, gate=fold.has)
    for peer in communicator.peers:
        theirs = shards[peer]
        part = exchange.to_one(peer, theirs)
        brought = exchange.from_one(peer, own, fold)
        result = exchange.from_one(peer, theirs, CopySink(theirs), phase=1, shared=True)
        exchange.go(peer, interleaved(part, total, LAG), interleaved(brought, result, LAG))


_SCHEDULES: dict[Algorithm, Schedule] = {Algorithm.ONE_SHOT: _one_shot, Algorithm.DIRECT: _direct}


def _alone(source: Region, out: Region, arithmetic: Arithmetic) -> None:
    """Do what a reduction over one rank is: a copy, scaled where the reduction scales."""
    step = 1 << 20
    for low in range(0, out.nbytes, step):
        high = min(low + step, out.nbytes)
        values = source.read(low, high)
        out.write(low, high, arithmetic.scale(values, values.clone()) if arithmetic.scaled else values)


def _one_type(tensors: Sequence[Any]) -> Any:
    types = {tensor.dtype for tensor in tensors}
    if len(types) != 1:
        raise ValueError("the tensors of one reduction are of one type")
    return types.pop()


def _one_each(tensors: Sequence[Any], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{len(tensors)} tensors in a group of {size} ranks: one each is needed")


def _same_size(one: Region, other: Region) -> None:
    if one.nbytes != other.nbytes:
        raise ValueError(f"an output of {other.nbytes} bytes where {one.nbytes} arrive")
