"""How each collective is carried out: those that move bytes of any type, and reductions, summed in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from glasshouse.collectives.operations.arithmetic import Arithmetic, Reduction
from glasshouse.collectives.operations.communicator import Communicator, one_each
from glasshouse.collectives.operations.exchange import Exchange, Fold, Operation, agreed
from glasshouse.collectives.operations.flows import CopySink, interleaved
from glasshouse.collectives.operations.regions import HostRegion, Region, Span, copy
from glasshouse.collectives.protocol.headers import Algorithm, Collective, FrameHeader

_LAG = 2  # how many chunks of contributions go ahead of the first chunk of the result
_ONE_SHOT_BYTES = 128 << 10
_ONE_SHOT_OF_TWO_BYTES = 1 << 20


def broadcast(tensors: Sequence[Any], root: int) -> Operation:
    """Give every rank the root's tensors, in place; contiguous, of the same shapes and types on every rank."""

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        region = communicator.as_bytes(tensors)
        header = _agreed(Collective.BROADCAST, tensors, root, *(tensor.numel() for tensor in tensors))
        exchange = Exchange(communicator, sequence, header, [region], [] if communicator.rank == root else [region])
        if communicator.rank == root:
            exchange.send_all(communicator.whole(region))
        else:
            _receive(exchange, communicator, root, region, shared=True)
        return exchange

    return Operation(tensors, plan)


def all_gather(inputs: Sequence[Any], outputs: Sequence[Sequence[Any]]) -> Operation:
    """Give every rank the inputs of all; `outputs` are, for each input, one tensor a rank, of sizes that may differ."""

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        for each in outputs:
            one_each(each, communicator.size)
        own = communicator.as_bytes(inputs)
        parts = [communicator.as_bytes([each[rank] for each in outputs]) for rank in range(communicator.size)]
        sizes = [each[rank].numel() for each in outputs for rank in range(communicator.size)]
        header = _agreed(Collective.ALL_GATHER, [each[0] for each in outputs], *sizes, elements=sum(sizes))
        exchange = Exchange(communicator, sequence, header, parts, parts)
        copy(own, parts[communicator.rank])
        exchange.send_all(communicator.whole(own))
        for peer in communicator.peers:
            _receive(exchange, communicator, peer, parts[peer], shared=True)
        return exchange

    return Operation(inputs, plan)


def gather(tensor: Any, outputs: Sequence[Any] | None, root: int) -> Operation:
    """Give the root the tensors of all, of one shape; `outputs` are one tensor a rank there, and None elsewhere."""

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        header = _agreed(Collective.GATHER, [tensor], root)
        own = communicator.as_bytes([tensor])
        if communicator.rank != root:
            exchange = Exchange(communicator, sequence, header, [own], [])
            exchange.send(root, communicator.whole(own))
            return exchange
        parts = _as_parts(communicator, outputs or (), own)
        exchange = Exchange(communicator, sequence, header, parts, parts)
        copy(own, parts[root])
        for peer in communicator.peers:
            _receive(exchange, communicator, peer, parts[peer])
        return exchange

    return Operation([tensor], plan)


def scatter(output: Any, inputs: Sequence[Any] | None, root: int) -> Operation:
    """Give each rank its tensor of the root's, of one shape; `inputs` are one a rank there, and None elsewhere."""

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        header = _agreed(Collective.SCATTER, [output], root)
        own = communicator.as_bytes([output])
        exchange = Exchange(communicator, sequence, header, [own], [own])
        if communicator.rank != root:
            _receive(exchange, communicator, root, own)
            return exchange
        parts = _as_parts(communicator, inputs or (), own)
        copy(parts[root], own)
        for peer in communicator.peers:
            exchange.send(peer, communicator.whole(parts[peer]))
        return exchange

    return Operation([output], plan)


def all_to_all(inputs: Sequence[Any], outputs: Sequence[Any]) -> Operation:
    """Give the i-th input of each rank to rank i: one contiguous tensor a rank on both sides; sizes may differ."""

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        sources, parts = _as_parts(communicator, inputs), _as_parts(communicator, outputs)
        # The sizes are agreed on by each pair of ranks: no other rank has them.
        header = _agreed(Collective.ALL_TO_ALL, [*inputs, *outputs], elements=0)
        exchange = Exchange(communicator, sequence, header, parts, parts)
        copy(sources[communicator.rank], parts[communicator.rank])
        for peer in communicator.peers:
            exchange.send(peer, communicator.whole(sources[peer]), elements=inputs[peer].numel())
            _receive(exchange, communicator, peer, parts[peer], elements=outputs[peer].numel())
        return exchange

    return Operation(inputs, plan)


class _Token(Span):
    """One frame without payload."""

    def __init__(self) -> None:
        super().__init__(HostRegion([]), 0, 0, 1)
        self.count = 1


def barrier() -> Operation:
    """Return on no rank before every rank has come."""

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        exchange = Exchange(communicator, sequence, agreed(Collective.BARRIER, [], algorithm=Algorithm.NONE), [], [])
        exchange.send_all(_Token())
        for peer in communicator.peers:
            exchange.receive(peer, _Token(), CopySink(_Token()), shared=True)
        return exchange

    return Operation((), plan)


def all_reduce_algorithm(nbytes: int, ranks: int) -> Algorithm:
    """Return the algorithm for an all-reduce of so many bytes, the same on every rank."""
    # Between two ranks both exchange as many bytes: one-shot has one phase less, direct adds only half.
    one_shot = _ONE_SHOT_OF_TWO_BYTES if ranks == 2 else _ONE_SHOT_BYTES
    return Algorithm.ONE_SHOT if nbytes <= one_shot else Algorithm.DIRECT


def all_reduce(tensors: Sequence[Any], reduction: Reduction, algorithm: Algorithm | None = None) -> Operation:
    """Combine contiguous tensors of one type, of the same shapes on all ranks, in place; several are one exchange.

    The algorithm is one of `SCHEDULES`; by default the fastest for size and world size.
    """
    dtype = _one_type(tensors)

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        region = communicator.region(tensors)
        arithmetic = Arithmetic(reduction, dtype, communicator.size)
        if reduction.factor is not None:
            for tensor in tensors:
                tensor.detach().copy_(reduction.premultiplied(tensor))
        chosen = algorithm or all_reduce_algorithm(region.nbytes, communicator.size)
        shapes = [str(tuple(tensor.shape)) for tensor in tensors]
        header = agreed(Collective.ALL_REDUCE, tensors, *shapes, algorithm=chosen, reduction=reduction.kind)
        exchange = Exchange(communicator, sequence, header, [region], [region])
        if communicator.size == 1:
            _alone(region, region, arithmetic)
        else:
            SCHEDULES[chosen](exchange, communicator, region, arithmetic)
        return exchange

    return Operation(tensors, plan)


def reduce(tensor: Any, reduction: Reduction, root: int) -> Operation:
    """Combine a contiguous tensor, of one shape on all ranks, into the root's; the others keep theirs."""

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        arithmetic = Arithmetic(reduction, tensor.dtype, communicator.size)
        own = reduction.premultiplied(tensor)
        if communicator.rank == root and own is not tensor:
            own = tensor.detach().copy_(own)
        region = communicator.region([own])
        header = agreed(Collective.REDUCE, [tensor], root, str(tuple(tensor.shape)), reduction=reduction.kind)
        exchange = Exchange(communicator, sequence, header, [region], [region] if communicator.rank == root else [])
        span = communicator.whole(region)
        if communicator.size == 1:
            _alone(region, region, arithmetic)
        elif communicator.rank != root:
            exchange.send(root, span)
        else:
            fold = Fold(communicator, span, span, arithmetic)
            for peer in communicator.peers:
                exchange.receive(peer, span, fold)
        return exchange

    return Operation([tensor], plan)


def reduce_scatter(inputs: Sequence[Any], output: Any, reduction: Reduction) -> Operation:
    """Combine the i-th input of all ranks into the output of rank i, which may be that rank's i-th input itself."""
    dtype = _one_type([*inputs, output])

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        one_each(inputs, communicator.size)
        arithmetic = Arithmetic(reduction, dtype, communicator.size)
        parts = [communicator.region([reduction.premultiplied(tensor)]) for tensor in inputs]
        own, out = parts[communicator.rank], communicator.region([output])
        if own.nbytes != out.nbytes:
            raise ValueError(f"an output of {out.nbytes} bytes where {own.nbytes} arrive")
        sizes = [tensor.numel() for tensor in inputs]
        header = agreed(Collective.REDUCE_SCATTER, inputs, *sizes, reduction=reduction.kind)
        exchange = Exchange(communicator, sequence, header, [out], [out])
        if communicator.size == 1:
            _alone(own, out, arithmetic)
            return exchange
        span = communicator.whole(own)
        fold = Fold(communicator, span, communicator.whole(out), arithmetic)
        for peer in communicator.peers:
            exchange.send(peer, communicator.whole(parts[peer]))
            exchange.receive(peer, span, fold)
        return exchange

    return Operation([output], plan)


def _one_shot(exchange: Exchange, communicator: Communicator, region: Region, arithmetic: Arithmetic) -> None:
    """Send everything to every rank, and sum it all: one phase."""
    span = communicator.whole(region)
    flow = exchange.send_all(span)
    fold = Fold(communicator, span, span, arithmetic, may=lambda chunk: chunk < flow.sealed)
    for peer in communicator.peers:
        exchange.receive(peer, span, fold, shared=True)


def _direct(exchange: Exchange, communicator: Communicator, region: Region, arithmetic: Arithmetic) -> None:
    """Sum one shard of all ranks, and send the sum, sealed once, to all."""
    shards = communicator.shards(region)
    own = shards[communicator.rank]
    fold = Fold(communicator, own, own, arithmetic)
    total = exchange.to_all(own, phase=1, gate=fold.has)
    for peer in communicator.peers:
        theirs = shards[peer]
        part = exchange.to_one(peer, theirs)
        brought = exchange.from_one(peer, own, fold)
        result = exchange.from_one(peer, theirs, CopySink(theirs), phase=1, shared=True)
        exchange.place(peer, outgoing=interleaved(part, total, _LAG), incoming=interleaved(brought, result, _LAG))


Schedule: TypeAlias = Callable[[Exchange, Communicator, Region, Arithmetic], None]  # adds an all-reduce's flows

SCHEDULES: dict[Algorithm, Schedule] = {Algorithm.ONE_SHOT: _one_shot, Algorithm.DIRECT: _direct}


def _alone(source: Region, out: Region, arithmetic: Arithmetic) -> None:
    """Reduce over one rank: a copy, scaled where the reduction scales."""
    if arithmetic.scaled:
        copy(source, out, lambda values: arithmetic.scale(values, values.clone()))
    else:
        copy(source, out)


def _one_type(tensors: Sequence[Any]) -> Any:
    types = {tensor.dtype for tensor in tensors}
    if len(types) != 1:
        raise ValueError("the tensors of one reduction are of one type")
    return types.pop()


def _agreed(collective: Collective, tensors: Sequence[Any], *details: int, elements: int | None = None) -> FrameHeader:
    types = sorted({str(tensor.dtype) for tensor in tensors})
    return agreed(collective, tensors, *details, *types, elements=elements)


def _receive(exchange: Exchange, communicator: Communicator, source: int, region: Region, **how: Any) -> None:
    span = communicator.whole(region)
    exchange.receive(source, span, CopySink(span), **how)


def _as_parts(communicator: Communicator, tensors: Sequence[Any], own: Region | None = None) -> list[Region]:
    """Return one region a rank, each of the size of `own` where that is given."""
    one_each(tensors, communicator.size)
    parts = [communicator.as_bytes([tensor]) for tensor in tensors]
    for part in parts:
        if own is not None and part.nbytes != own.nbytes:
            raise ValueError(f"a tensor of {part.nbytes} bytes where one of {own.nbytes} is needed")
    return parts
