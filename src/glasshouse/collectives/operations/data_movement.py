"""Collectives that move bytes and compute nothing: any type of element, several tensors in one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasshouse.collectives.operations.arithmetic import ELEMENTS
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.exchange import Agreed, Exchange, Operation
from glasshouse.collectives.operations.flows import CopySink
from glasshouse.collectives.operations.regions import HostRegion, Region, Span
from glasshouse.collectives.protocol.headers import Algorithm, Collective, Element

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "scatter"]


def broadcast(tensors: Sequence[Any], root: int) -> Operation:
    """Give every rank the root's tensors, in place.

    Args:
        tensors: contiguous, the same shapes and types on every rank.
        root: index of the rank that has them.
    """

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        region = communicator.as_bytes(tensors)
        agreed = _agreed(Collective.BROADCAST, tensors, root, *(tensor.numel() for tensor in tensors))
        exchange = Exchange(communicator, sequence, agreed, [region], [] if communicator.rank == root else [region])
        span = communicator.whole(region)
        if communicator.rank == root:
            exchange.send_all(span)
        else:
            exchange.receive(root, span, CopySink(span), shared=True)
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
            _one_each(each, communicator.size)
        own = communicator.as_bytes(inputs)
        parts = [communicator.as_bytes([each[rank] for each in outputs]) for rank in range(communicator.size)]
        sizes = [each[rank].numel() for each in outputs for rank in range(communicator.size)]
        agreed = _agreed(Collective.ALL_GATHER, [each[0] for each in outputs], *sizes, elements=sum(sizes))
        exchange = Exchange(communicator, sequence, agreed, parts, parts)
        _copy(own, parts[communicator.rank])
        exchange.send_all(communicator.whole(own))
        for peer in communicator.peers:
            span = communicator.whole(parts[peer])
            exchange.receive(peer, span, CopySink(span), shared=True)
        return exchange

    return Operation(inputs, plan)


def gather(tensor: Any, outputs: Sequence[Any] | None, root: int) -> Operation:
    """Give the root the tensors of all.

    Args:
        tensor: contiguous, the same shape on every rank.
        outputs: at the root one tensor a rank, elsewhere None.
        root: index of the rank that gets them.
    """

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        agreed = _agreed(Collective.GATHER, [tensor], root)
        own = communicator.as_bytes([tensor])
        if communicator.rank != root:
            exchange = Exchange(communicator, sequence, agreed, [own], [])
            exchange.send(root, communicator.whole(own))
            return exchange
        places = outputs or ()
        _one_each(places, communicator.size)
        parts = [communicator.as_bytes([place]) for place in places]
        exchange = Exchange(communicator, sequence, agreed, parts, parts)
        for part in parts:
            _same_size(own, part)
        _copy(own, parts[root])
        for peer in communicator.peers:
            span = communicator.whole(parts[peer])
            exchange.receive(peer, span, CopySink(span))
        return exchange

    return Operation([tensor], plan)


def scatter(output: Any, inputs: Sequence[Any] | None, root: int) -> Operation:
    """Give each rank its tensor of the root's.

    Args:
        output: contiguous, the same shape on every rank.
        inputs: at the root one tensor a rank, elsewhere None.
        root: index of the rank that has them.
    """

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        agreed = _agreed(Collective.SCATTER, [output], root)
        own = communicator.as_bytes([output])
        exchange = Exchange(communicator, sequence, agreed, [own], [own])
        if communicator.rank != root:
            span = communicator.whole(own)
            exchange.receive(root, span, CopySink(span))
            return exchange
        sources = inputs or ()
        _one_each(sources, communicator.size)
        parts = [communicator.as_bytes([source]) for source in sources]
        for part in parts:
            _same_size(own, part)
        _copy(parts[root], own)
        for peer in communicator.peers:
            exchange.send(peer, communicator.whole(parts[peer]))
        return exchange

    return Operation([output], plan)


def all_to_all(inputs: Sequence[Any], outputs: Sequence[Any]) -> Operation:
    """Give the i-th input of each rank to rank i.

    Args:
        inputs: one contiguous tensor a rank; sizes may differ.
        outputs: where what comes from each rank goes.
    """

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        _one_each(inputs, communicator.size)
        _one_each(outputs, communicator.size)
        sources, parts = (
            [communicator.as_bytes([each]) for each in inputs],
            [communicator.as_bytes([each]) for each in outputs],
        )
        # What a pair of ranks exchanges is theirs to agree on; no other rank knows it.
        agreed = _agreed(Collective.ALL_TO_ALL, [*inputs, *outputs], elements=0)
        exchange = Exchange(communicator, sequence, agreed, parts, parts)
        _same_size(sources[communicator.rank], parts[communicator.rank])
        _copy(sources[communicator.rank], parts[communicator.rank])
        for peer in communicator.peers:
            span = communicator.whole(parts[peer])
            exchange.send(peer, communicator.whole(sources[peer]), elements=inputs[peer].numel())
            exchange.receive(peer, span, CopySink(span), elements=outputs[peer].numel())
        return exchange

    return Operation(inputs, plan)


class _Token(Span):
    """One frame without payload."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(HostRegion([]), 0, 0, 1)
        self.count = 1


def barrier() -> Operation:
    """Return on no rank before every rank has come."""

    def plan(communicator: Communicator, sequence: int) -> Exchange:
        exchange = Exchange(communicator, sequence, Agreed(collective=Collective.BARRIER), [], [])
        exchange.send_all(_Token())
        for peer in communicator.peers:
            exchange.receive(peer, _Token(), CopySink(_Token()), shared=True)
        return exchange

    return Operation((), plan)


def _agreed(collective: Collective, tensors: Sequence[Any], *details: int, elements: int | None = None) -> Agreed:
    types = {tensor.dtype for tensor in tensors}
    only = types.pop() if len(types) == 1 else None
    return Agreed(
        collective=collective,
        algorithm=Algorithm.DIRECT,
        element=ELEMENTS.get(only, Element.NONE),
        elements=sum(tensor.numel() for tensor in tensors) if elements is None else elements,
        details=(*details, *sorted({str(tensor.dtype) for tensor in tensors})),
    )


def _copy(source: Region, out: Region) -> None:
    _same_size(source, out)
    step = 1 << 20
    for low in range(0, out.nbytes, step):
        high = min(low + step, out.nbytes)
        out.write(low, high, source.read(low, high))


def _one_each(tensors: Sequence[Any], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{len(tensors)} tensors in a group of {size} ranks: one each is needed")


def _same_size(one: Region, other: Region) -> None:
    if one.nbytes != other.nbytes:
        raise ValueError(f"a tensor of {other.nbytes} bytes where one of {one.nbytes} is needed")
