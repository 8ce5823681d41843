"""Collectives that move bytes and compute nothing: any type of element, several tensors in one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasshouse.collectives.operations.communicator import Communicator, one_each
from glasshouse.collectives.operations.exchange import Exchange, Operation, agreed
from glasshouse.collectives.operations.flows import CopySink
from glasshouse.collectives.operations.regions import HostRegion, Region, Span, copy
from glasshouse.collectives.protocol.headers import Algorithm, Collective, FrameHeader


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
    """Give every rank the inputs of all.

    Args:
        inputs: contiguous tensors.
        outputs: for each input, where that of each rank goes, in rank order; the sizes may differ between ranks.
    """

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
