"""One collective as one rank carries it out: its header, and its flows to and from each peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.flows import ChunkRun, Gate, Inflow, Outflow, SharedOutflow, Sink
from glasshouse.collectives.operations.regions import ELEMENTS, Region, Span
from glasshouse.collectives.protocol.group_keys import ALL, Lane
from glasshouse.collectives.protocol.headers import (
    Algorithm,
    Collective,
    Element,
    FrameHeader,
    FrameKind,
    ReductionCode,
    digest,
    set_operation,
    set_route,
)
from glasshouse.wire.crypto import Suite


def agreed(
    collective: Collective,
    tensors: Sequence[Any],
    *details: int | str,
    elements: int | None = None,
    algorithm: Algorithm = Algorithm.DIRECT,
    reduction: ReductionCode = ReductionCode.NONE,
) -> FrameHeader:
    """Return the header on which all ranks of an operation must agree, but for route, chunk, length and counter.

    Type and number of elements are those of the tensors; `details` are all else that must be equal, such as shapes.
    """
    types = {tensor.dtype for tensor in tensors}
    return FrameHeader(
        kind=FrameKind.DATA,
        source=0,
        destination=0,
        collective=collective,
        algorithm=algorithm,
        element=ELEMENTS.get(types.pop(), Element.NONE) if len(types) == 1 else Element.NONE,
        reduction=reduction,
        elements=sum(tensor.numel() for tensor in tensors) if elements is None else elements,
        digest=digest(*details),
    )


class Exchange:
    """One collective as one rank carries it out, on regions of one device; outputs are zeroed if it fails."""

    def __init__(
        self,
        communicator: Communicator,
        sequence: int,
        header: FrameHeader,
        regions: Sequence[Region],
        outputs: Sequence[Region],
    ) -> None:
        self.sequence = sequence
        self.outgoing: dict[int, list[ChunkRun[Outflow]]] = {}
        self.incoming: dict[int, list[ChunkRun[Inflow]]] = {}
        self.queue = regions[0].queue if regions else None
        self.left = 0  # how many connections' parts are unfinished
        self._communicator = communicator
        self._outputs = outputs
        self._suite = regions[0].suite if regions else Suite.AES_256_GCM
        self._agreed = header
        self._template = header.encode()
        set_operation(self._template, sequence, self._suite)

    def send(self, peer: int, span: Span, *, phase: int = 0, gate: Gate = None, elements: int | None = None) -> Outflow:
        """Send a span to one peer; `elements` is given where that is not the whole operation's number."""
        flow = self.to_one(peer, span, phase=phase, gate=gate, elements=elements)
        self.place(peer, outgoing=[(flow, 0, span.count)] if span.count else [])
        return flow

    def send_all(self, span: Span) -> Outflow:
        """Send a span to every peer, sealed once; return the flow, which counts the chunks that are sealed."""
        flow = self.to_all(span)
        for peer in self._communicator.peers if span.count else ():
            self.place(peer, outgoing=[(flow, 0, span.count)])
        return flow

    def receive(
        self, source: int, span: Span, sink: Sink, *, phase: int = 0, shared: bool = False, elements: int | None = None
    ) -> None:
        """Take a span from one peer into `sink`; `shared` if the peer sends it to all."""
        if span.count:
            flow = self.from_one(source, span, sink, phase=phase, shared=shared, elements=elements)
            self.place(source, incoming=[(flow, 0, span.count)])

    def to_one(
        self, peer: int, span: Span, *, phase: int = 0, gate: Gate = None, elements: int | None = None
    ) -> Outflow:
        """Return a flow to one peer that is yet to be placed."""
        sealer = self._communicator.streams.sealer(Lane.COLLECTIVE, peer, self._suite)
        return Outflow(span, self._header(self._communicator.rank, peer, phase, elements), sealer, gate)

    def to_all(self, span: Span, *, phase: int = 0, gate: Gate = None) -> Outflow:
        """Return a flow to every peer that is yet to be placed for each."""
        communicator = self._communicator
        sealer = communicator.streams.sealer(Lane.COLLECTIVE, ALL, self._suite)
        header, buffers = self._header(communicator.rank, ALL, phase, None), communicator.pools(span.region).shared
        return SharedOutflow(span, header, sealer, gate, buffers=buffers, peers=len(communicator.peers))

    def from_one(
        self, source: int, span: Span, sink: Sink, *, phase: int = 0, shared: bool = False, elements: int | None = None
    ) -> Inflow:
        """Return a flow from one peer that is yet to be placed."""
        header = self._header(source, ALL if shared else self._communicator.rank, phase, elements)
        opener = self._communicator.streams.opener(Lane.COLLECTIVE, source, self._suite, broadcast=shared)
        return Inflow(source, span, header, opener, sink)

    def place(
        self, peer: int, *, outgoing: Sequence[ChunkRun[Outflow]] = (), incoming: Sequence[ChunkRun[Inflow]] = ()
    ) -> None:
        """Add flows with a peer behind those that are there; there may be none."""
        if outgoing:
            self.outgoing.setdefault(peer, []).extend(outgoing)
        if incoming:
            self.incoming.setdefault(peer, []).extend(incoming)

    def described(self) -> str:
        """Return its name in an error."""
        return f"{self._agreed.described()} (operation {self.sequence})"

    def zero(self) -> None:
        """Overwrite the outputs, complete or not."""
        for region in self._outputs:
            region.zero()

    def _header(self, source: int, destination: int, phase: int, elements: int | None) -> bytearray:
        header = self._template.copy()
        number = self._agreed.elements if elements is None else elements
        set_route(header, phase=phase, source=source, destination=destination, elements=number)
        return header


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective that can be submitted to an engine."""

    tensors: Sequence[Any]  # that it works on, or some of them
    plan: Callable[[Communicator, int], Exchange]  # makes the exchange for a communicator under a sequence number
