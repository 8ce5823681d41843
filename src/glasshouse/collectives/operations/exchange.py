"""One collective as one rank carries it out: its header, its flows to and from each peer, and the sum of what came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.collectives.operations.arithmetic import Arithmetic
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
from glasshouse.collectives.protocol.traffic import FrameOpener
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


class Fold(Sink):
    """Combines one span of every rank, in rank order, into `out`: the own one's memory, or memory apart from it.

    A contribution is opened only when its turn has come, into memory that the caches hold, so nothing waits in
    plaintext; the own one is read before the result is written over it.
    """

    def __init__(
        self, communicator: Communicator, own: Span, out: Span, arithmetic: Arithmetic, may: Gate = None
    ) -> None:
        self._opened = communicator.opened
        self._pools = communicator.pools(own.region)
        self._due: Sequence[int] = communicator.peers
        self._mine_at = communicator.rank  # how many contributions come before the own one
        self._own = own
        self._out = out
        self._arithmetic = arithmetic
        self._plain = not arithmetic.scaled and not arithmetic.wide
        self._may = may
        self._place = 0
        self._chunk = 0
        self._low = self._high = 0
        self._mine: Any = None  # the chunk's own contribution where it lies, None where tensors meet in it
        self._result: Any = None  # the chunk's place in the result, likewise
        self._mine_is_read = False
        self._sum: Any = None
        self._buffer = memoryview(bytearray())
        self.finished = 0  # how many chunks of the result are complete

    def has(self, chunk: int) -> bool:
        """Return whether that chunk of the result is complete."""
        return chunk < self.finished

    def ready(self, source: int, chunk: int) -> bool:
        if chunk != self._chunk or self._due[self._place] != source:
            return False
        # A fold that begins later never holds what an earlier one needs to begin: all begin with the same rank.
        return self._place > 0 or (self._pools.scratch.available and (self._may is None or self._may(chunk)))

    def take(self, source: int, chunk: int, opener: FrameOpener, frame: memoryview) -> None:
        place = self._place
        if place == 0:
            self._begin()
        if place == self._mine_at:
            self._add_own()
        size = self._high - self._low
        if self._sum is None and self._plain:
            self._sum = self._own.region.opened(size, opener, frame, self._buffer)
        else:
            self._add(self._own.region.opened(size, opener, frame, self._opened(size)))
        self._place = place = place + 1
        if place == len(self._due):
            if place == self._mine_at:
                self._add_own()
            self._finish()

    def _begin(self) -> None:
        own, out = self._own, self._out
        buffer = self._pools.scratch.take()
        if buffer is None:
            raise RuntimeError("a chunk begins when there is memory for it")
        self._buffer = buffer
        self._low, self._high = own.bounds(self._chunk)
        self._mine = own.region.direct(self._low, self._high)
        self._result = self._mine if out is own else out.region.direct(*out.bounds(self._chunk))

    def _add_own(self) -> None:
        values = self._own.region.read(self._low, self._high) if self._mine is None else self._mine
        self._mine_is_read = True
        if self._sum is None and self._plain and self._mine is not None:
            self._sum = values
        else:
            self._add(values)

    def _add(self, values: Any) -> None:
        arithmetic = self._arithmetic
        if arithmetic.scaled:
            values = arithmetic.scale(values, self._partial(behind=self._sum is not None))
        if self._sum is not None:
            # The partial result goes to its place as soon as nothing is read from there any more.
            there = self._mine_is_read and self._result is not None and not arithmetic.wide
            self._sum = arithmetic.combine(self._sum, values, self._result if there else self._partial())
        else:
            self._sum = values if arithmetic.scaled else self._partial().copy_(values)

    def _finish(self) -> None:
        self._arithmetic.finish(self._sum)
        if self._sum is not self._result:
            self._out.region.write(*self._out.bounds(self._chunk), self._sum)
        self._pools.scratch.give_back(self._buffer)
        self._sum = self._mine = self._result = None
        self._mine_is_read = False
        self._place = 0
        self._chunk = self.finished = self._chunk + 1

    def _partial(self, *, behind: bool = False) -> Any:
        """Return a tensor for a partial result, or for a scaled contribution `behind` it."""
        buffer = self._buffer[2 * self._pools.chunk_bytes :] if behind else self._buffer
        return self._own.region.blank(self._high - self._low, self._arithmetic.accumulator, buffer)
