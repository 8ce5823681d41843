"""One collective as one rank carries it out: what it says of it, and its flows to and from each peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.flows import ChunkRun, Inflow, Outflow, SharedOutflow, Sink
from glasshouse.collectives.operations.regions import Region, Span
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import (
    ALL,
    Algorithm,
    Collective,
    Element,
    Header,
    Kind,
    ReductionCode,
    digest,
    set_route,
)
from glasshouse.wire.aead import Suite

__all__ = ["Agreed", "Exchange", "Operation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What every rank must say of an operation in the same words.

    Args:
        collective, algorithm, element, reduction: the codes on the wire.
        elements: of the whole operation, for people.
        details: whatever else must be equal: shapes, root.
    """

    collective: Collective
    element: Element = Element.NONE
    elements: int = 0
    algorithm: Algorithm = Algorithm.NONE
    reduction: ReductionCode = ReductionCode.NONE
    details: tuple[int | str, ...] = ()

    def header(self, sequence: int, suite: Suite) -> bytearray:
        """Return the packed header of this operation's frames, but for route, chunk, length and counter."""
        return Header(
            kind=Kind.DATA,
            source=0,
            destination=0,
            sequence=sequence,
            suite=suite,
            collective=self.collective,
            algorithm=self.algorithm,
            element=self.element,
            reduction=self.reduction,
            elements=self.elements,
            digest=digest(*self.details),
        ).encode()

    def described(self) -> str:
        """Return what an error calls the operation."""
        return Header(
            kind=Kind.DATA,
            source=0,
            destination=0,
            collective=self.collective,
            element=self.element,
            reduction=self.reduction,
            elements=self.elements,
        ).described()


class Exchange:
    """One collective as one rank carries it out.

    Args:
        communicator: the group.
        sequence: the operation's number.
        agreed: what all ranks say of it.
        regions: what takes part in it, all in the same place.
        outputs: those of them that are zeroed if it fails.
    """

    def __init__(
        self,
        communicator: Communicator,
        sequence: int,
        agreed: Agreed,
        regions: Sequence[Region],
        outputs: Sequence[Region],
    ) -> None:
        self.agreed = agreed
        self.sequence = sequence
        self.outgoing: dict[int, list[ChunkRun[Outflow]]] = {}
        self.incoming: dict[int, list[ChunkRun[Inflow]]] = {}
        self.queue = regions[0].queue if regions else None
        self._suite = regions[0].suite if regions else Suite.AES_256_GCM
        self.left = 0
        """How many connections' parts are unfinished."""
        self._communicator = communicator
        self._outputs = outputs
        self._template = agreed.header(sequence, self._suite)

    def send(
        self,
        peer: int,
        span: Span,
        *,
        phase: int = 0,
        gate: Callable[[int], bool] | None = None,
        elements: int | None = None,
    ) -> Outflow:
        """Send a span to one peer; `elements` says how many where that is not the whole operation's number."""
        flow = self.to_one(peer, span, phase=phase, gate=gate, elements=elements)
        if span.count:
            self.outgoing.setdefault(peer, []).append((flow, 0, span.count))
        return flow

    def send_all(self, span: Span, *, phase: int = 0, gate: Callable[[int], bool] | None = None) -> Outflow:
        """Send a span to every peer, sealed once; return the flow, for those who wait until a chunk is sealed."""
        flow = self.to_all(span, phase=phase, gate=gate)
        if span.count:
            for peer in self._communicator.peers:
                self.outgoing.setdefault(peer, []).append((flow, 0, span.count))
        return flow

    def receive(
        self,
        source: int,
        span: Span,
        sink: Sink,
        *,
        phase: int = 0,
        shared: bool = False,
        elements: int | None = None,
    ) -> None:
        """Take a span from one peer into `sink`; `shared` if the peer sends it to all."""
        if span.count:
            flow = self.from_one(source, span, sink, phase=phase, shared=shared, elements=elements)
            self.incoming.setdefault(source, []).append((flow, 0, span.count))

    def to_one(
        self,
        peer: int,
        span: Span,
        *,
        phase: int = 0,
        gate: Callable[[int], bool] | None = None,
        elements: int | None = None,
    ) -> Outflow:
        """Return a flow to one peer that is yet to be put in its place."""
        communicator = self._communicator
        sealer = communicator.streams.sealer(Lane.COLLECTIVE, peer, self._suite)
        header = self._header(communicator.rank, peer, phase)
        return Outflow(span, header, self.agreed.elements if elements is None else elements, sealer, gate)

    def to_all(self, span: Span, *, phase: int = 0, gate: Callable[[int], bool] | None = None) -> Outflow:
        """Return a flow to every peer that is yet to be put in its place for each."""
        communicator = self._communicator
        return SharedOutflow(
            span,
            self._header(communicator.rank, ALL, phase),
            self.agreed.elements,
            communicator.streams.sealer(Lane.COLLECTIVE, ALL, self._suite),
            gate,
            buffers=communicator.pools(span.region).shared,
            peers=len(communicator.peers),
        )

    def from_one(
        self,
        source: int,
        span: Span,
        sink: Sink,
        *,
        phase: int = 0,
        shared: bool = False,
        elements: int | None = None,
    ) -> Inflow:
        """Return a flow from one peer that is yet to be put in its place."""
        communicator = self._communicator
        header = self._header(source, ALL if shared else communicator.rank, phase)
        opener = communicator.streams.opener(Lane.COLLECTIVE, source, self._suite, broadcast=shared)
        return Inflow(source, span, header, self.agreed.elements if elements is None else elements, opener, sink)

    def go(self, peer: int, outgoing: list[ChunkRun[Outflow]], incoming: list[ChunkRun[Inflow]]) -> None:
        """Put flows with a peer in their place; there may be none."""
        if outgoing:
            self.outgoing[peer] = outgoing
        if incoming:
            self.incoming[peer] = incoming

    def described(self) -> str:
        """Return what an error calls it."""
        return f"{self.agreed.described()} (operation {self.sequence})"

    def zero(self) -> None:
        """Overwrite the outputs, complete or not."""
        for region in self._outputs:
            region.zero()

    def _header(self, source: int, destination: int, phase: int) -> bytearray:
        header = self._template.copy()
        set_route(header, phase=phase, source=source, destination=destination)
        return header


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective that can be submitted to an engine.

    Args:
        tensors: what it works on, or some of that.
        plan: how it is carried out by a communicator under a sequence number.
    """

    tensors: Sequence[Any]
    plan: Callable[[Communicator, int], Exchange]
