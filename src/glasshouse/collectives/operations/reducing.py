"""Reductions: all-reduce, reduce and reduce-scatter, summed in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasshouse.collectives.choose import LAG, all_reduce_algorithm
from glasshouse.collectives.frames import Algorithm, Collective
from glasshouse.collectives.memory import Region
from glasshouse.collectives.operations.exchange import Agreed, Exchange, Operation
from glasshouse.collectives.operations.flows import Copy, woven
from glasshouse.collectives.operations.fold import Fold
from glasshouse.collectives.operations.party import Party
from glasshouse.collectives.operations.ring import plan_ring
from glasshouse.collectives.reduce import ELEMENTS, Arithmetic, Reduction

__all__ = ["all_reduce", "reduce", "reduce_scatter"]


def all_reduce(tensors: Sequence[Any], reduction: Reduction, algorithm: Algorithm | None = None) -> Operation:
    """Combine tensors of all ranks, in place; several are one exchange.

    Args:
        tensors: contiguous, of one type, the same shapes on every rank.
        reduction: how.
        algorithm: for measurements; by default the fastest for size and world size.
    """
    dtype = _one_type(tensors)

    def plan(party: Party, sequence: int) -> Exchange:
        region = party.region(tensors)
        arithmetic = Arithmetic(reduction, dtype, party.size)
        if reduction.factor is not None:
            for tensor in tensors:
                tensor.detach().copy_(reduction.premultiplied(tensor))
        chosen = all_reduce_algorithm(region.nbytes, party.size) if algorithm is None else algorithm
        agreed = Agreed(
            collective=Collective.ALL_REDUCE,
            algorithm=chosen,
            element=ELEMENTS[dtype],
            reduction=reduction.code,
            elements=sum(tensor.numel() for tensor in tensors),
            details=tuple(str(tuple(tensor.shape)) for tensor in tensors),
        )
        exchange = Exchange(party, sequence, agreed, [region], [region])
        if party.size == 1:
            _alone(region, region, arithmetic)
        elif chosen is Algorithm.ONE_SHOT:
            _one_shot(exchange, party, region, arithmetic)
        elif chosen is Algorithm.DIRECT:
            _direct(exchange, party, region, arithmetic)
        else:
            plan_ring(exchange, party, region, arithmetic, serial=chosen is Algorithm.SERIAL)
        return exchange

    return Operation(tensors, plan)


def reduce(tensor: Any, reduction: Reduction, root: int) -> Operation:
    """Combine a tensor of all ranks into the root's; the others keep theirs.

    Args:
        tensor: contiguous, the same shape on every rank.
        reduction: how.
        root: index of the rank that gets the result.
    """

    def plan(party: Party, sequence: int) -> Exchange:
        arithmetic = Arithmetic(reduction, tensor.dtype, party.size)
        own = reduction.premultiplied(tensor)
        if party.rank == root and own is not tensor:
            own = tensor.detach().copy_(own)
        region = party.region([own])
        agreed = Agreed(
            collective=Collective.REDUCE,
            algorithm=Algorithm.DIRECT,
            element=ELEMENTS[tensor.dtype],
            reduction=reduction.code,
            elements=tensor.numel(),
            details=(root, str(tuple(tensor.shape))),
        )
        span = party.whole(region)
        exchange = Exchange(party, sequence, agreed, [region], [region] if party.rank == root else [])
        if party.size == 1:
            _alone(region, region, arithmetic)
        elif party.rank != root:
            exchange.send(root, span)
        else:
            fold = Fold(party, range(party.size), span, span, arithmetic)
            for peer in party.peers:
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

    def plan(party: Party, sequence: int) -> Exchange:
        _one_each(inputs, party.size)
        arithmetic = Arithmetic(reduction, dtype, party.size)
        parts = [party.region([reduction.premultiplied(tensor)]) for tensor in inputs]
        out = party.region([output])
        _same_size(parts[party.rank], out)
        agreed = Agreed(
            collective=Collective.REDUCE_SCATTER,
            algorithm=Algorithm.DIRECT,
            element=ELEMENTS[dtype],
            reduction=reduction.code,
            elements=sum(tensor.numel() for tensor in inputs),
            details=tuple(tensor.numel() for tensor in inputs),
        )
        exchange = Exchange(party, sequence, agreed, [out], [out])
        if party.size == 1:
            _alone(parts[0], out, arithmetic)
            return exchange
        for peer in party.peers:
            exchange.send(peer, party.whole(parts[peer]))
        own = party.whole(parts[party.rank])
        fold = Fold(party, range(party.size), own, party.whole(out), arithmetic)
        for peer in party.peers:
            exchange.receive(peer, own, fold)
        return exchange

    return Operation([output], plan)


def _one_shot(exchange: Exchange, party: Party, region: Region, arithmetic: Arithmetic) -> None:
    """Everybody sends everything to everybody, and sums it all: one phase."""
    span = party.whole(region)
    flow = exchange.send_all(span)
    fold = Fold(party, range(party.size), span, span, arithmetic, may=lambda chunk: chunk < flow.sealed)
    for peer in party.peers:
        exchange.receive(peer, span, fold, shared=True)


def _direct(exchange: Exchange, party: Party, region: Region, arithmetic: Arithmetic) -> None:
    """Each rank sums one shard of all, and sends the sum, sealed once, to all."""
    shards = party.shards(region)
    own = shards[party.rank]
    fold = Fold(party, range(party.size), own, own, arithmetic)
    total = exchange.to_all(own, phase=1, gate=fold.has)
    for peer in party.peers:
        theirs = shards[peer]
        part = exchange.to_one(peer, theirs)
        brought = exchange.from_one(peer, own, fold)
        result = exchange.from_one(peer, theirs, Copy(theirs), phase=1, shared=True)
        exchange.go(peer, woven(part, total, LAG), woven(brought, result, LAG))


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
