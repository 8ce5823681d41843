"""Messages between two ranks: matched by tag in any order, from a named rank or from the rank that comes first.

A message is offered, accepted when the other end has room for it, and only then sent: a message that is not received
never blocks others. Every pair of ranks has a connection for this.
Laws: messages between two ranks under one tag arrive in the order in which they were sent; an offer of another size or
type than the receiver has room for ends the group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.flows import CopySink, Inflow, Outflow
from glasshouse.collectives.operations.regions import ELEMENTS, Region, within
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import (
    HEADER_BYTES,
    Collective,
    Element,
    FrameHeader,
    FrameKind,
    digest,
    frame_bytes,
)
from glasshouse.errors import Code, CollectiveError
from glasshouse.wire.crypto import Suite

MAX_TAG = 2**32 - 1
MAX_OFFERS = 1 << 16  # offers of one rank that wait for a receiver


class P2PMessage:
    """One end of a message of contiguous tensors; `peer` is None for a receiver that takes from any rank."""

    def __init__(self, tensors: Sequence[Any], peer: int | None, tag: int, *, sending: bool) -> None:
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"a tag is from 0 to {MAX_TAG}, not {tag}")
        types = sorted({str(tensor.dtype) for tensor in tensors})
        self.tensors = tensors
        self._region: Region | None = None
        self.elements = sum(tensor.numel() for tensor in tensors)
        self.element = ELEMENTS.get(tensors[0].dtype, Element.NONE) if len(types) == 1 else Element.NONE
        self.types = digest(*types)
        self.peer = peer
        self.tag = tag
        self.sending = sending
        self.sequence = 0

    @property
    def region(self) -> Region:
        """The tensors as bytes, once it is begun."""
        if self._region is None:
            raise ValueError("a message that was not begun")
        return self._region

    @property
    def queue(self) -> Any:
        """The queue of the device that the tensors are on, None for host memory."""
        return self.region.queue

    def begin(self, communicator: Communicator) -> None:
        """Bind the message to a communicator.

        Raises:
            ValueError: there is no such rank to exchange messages with.
        """
        if self.peer not in (None, *communicator.peers) or (self.sending and self.peer is None):
            raise ValueError(
                f"rank {communicator.rank} of {communicator.size} exchanges no message with rank {self.peer}"
            )
        self._region = communicator.as_bytes(self.tensors)

    def header(self, kind: FrameKind, *, source: int, destination: int) -> bytearray:
        """Return the packed header of this message's frames of one kind."""
        return FrameHeader(
            kind=kind,
            source=source,
            destination=destination,
            sequence=self.sequence,
            suite=self.region.suite if kind is FrameKind.DATA else Suite.AES_256_GCM,
            collective=Collective.SEND,
            element=self.element,
            elements=self.elements,
            tag=self.tag,
            digest=self.types,
        ).encode()

    def described(self) -> str:
        """Return its name in an error."""
        way = "send of {} to {}" if self.sending else "receive of {} from {}"
        end = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{way.format(f'{self.elements} {self.element.name.lower()}', end)} with tag {self.tag}"

    def zero(self) -> None:
        """Overwrite what is received, complete or not."""
        if not self.sending and self._region is not None:
            self._region.zero()


def send(tensors: Sequence[Any], peer: int, tag: int = 0) -> P2PMessage:
    """Send contiguous tensors to rank `peer`, as one message."""
    return P2PMessage(tensors, peer, tag, sending=True)


def receive(tensors: Sequence[Any], peer: int | None, tag: int = 0) -> P2PMessage:
    """Receive a message into contiguous tensors: from rank `peer`, or with None from the rank that sends first."""
    return P2PMessage(tensors, peer, tag, sending=False)


@dataclass(slots=True)
class _Peer:
    """The messages with one peer."""

    sent: int = 0  # how many were offered to it: the number of the next
    offered: dict[int, P2PMessage] = field(default_factory=dict)  # by number, those that it has not accepted
    offers: list[tuple[int, FrameHeader]] = field(default_factory=list)
    """Those of the peer that wait for a receiver, with the place of each among the offers of all."""
    control: deque[tuple[bytearray, P2PMessage | None]] = field(default_factory=deque)
    """Headers of offers and acceptances to send, with the message that is complete then."""
    outgoing: deque[tuple[P2PMessage, Outflow]] = field(default_factory=deque)
    incoming: deque[tuple[P2PMessage, Inflow, CopySink]] = field(default_factory=deque)
    ending: P2PMessage | None = None  # the message that is complete when the frame on its way has gone out


class Mailbox:
    """The messages of one rank, without I/O; `done` is called with each that is complete, and the peer's rank."""

    def __init__(self, communicator: Communicator, done: Callable[[P2PMessage, int], None]) -> None:
        self._communicator = communicator
        self._done = done
        self._peers = {peer: _Peer() for peer in communicator.peers}
        self._arrivals = 0
        self._wanted: list[P2PMessage] = []

    def post(self, message: P2PMessage) -> None:
        """Begin with a message of this rank."""
        if not message.sending:
            self._wanted.append(message)
            self._match(message)
            return
        if message.peer is None:
            raise ValueError("a message is sent to one rank")
        peer = self._peers[message.peer]
        message.sequence, peer.sent = peer.sent, peer.sent + 1
        peer.offered[message.sequence] = message
        offer = message.header(FrameKind.OFFER, source=self._communicator.rank, destination=message.peer)
        peer.control.append((offer, None))

    def waits_for(self, rank: int) -> bool:
        """Return whether a message of this rank is unfinished that a peer is needed for."""
        peer = self._peers[rank]
        return bool(peer.offered or peer.outgoing or peer.incoming or peer.ending) or any(
            message.peer in (None, rank) for message in self._wanted
        )

    def busy(self, rank: int) -> bool:
        """Return whether there is a frame for a peer."""
        return bool(self._peers[rank].control or self._peers[rank].outgoing)

    def frame(self, rank: int, buffer: Callable[[int], memoryview | None]) -> memoryview | None:
        """Return the next sealed frame for a peer, made in what `buffer` gives for its size, or None."""
        peer = self._peers[rank]
        if peer.control:
            if (own := buffer(frame_bytes(0))) is None:
                return None
            header, peer.ending = peer.control.popleft()
            control = own[: frame_bytes(0)]
            self._communicator.streams.sealer(Lane.P2P, rank).seal_into(header, b"", control[HEADER_BYTES:])
            control[:HEADER_BYTES] = header
            return control
        if not peer.outgoing:
            return None
        message, flow = peer.outgoing[0]
        with within(message.queue):
            frame = flow.frame(flow.sealed, buffer)
        if frame is not None and flow.sealed == flow.span.count:
            peer.outgoing.popleft()
            peer.ending = message
        return frame

    def sent(self, rank: int) -> None:
        """Note that the last frame for a peer has gone out whole."""
        peer = self._peers[rank]
        if peer.ending is not None:
            message, peer.ending = peer.ending, None
            self._done(message, rank)

    def take(self, rank: int, frame: memoryview) -> None:
        """Open and use a frame from a peer that is an offer, an acceptance, or data.

        Raises:
            CollectiveError: `collective-tampered`; `collective-mismatch` for a message of another size or type.
        """
        peer = self._peers[rank]
        if peer.incoming and frame[1] == FrameKind.DATA:
            message, flow, sink = peer.incoming[0]
            if frame[:HEADER_BYTES] == flow.expected(sink.taken):
                with within(message.queue):
                    sink.take(rank, sink.taken, flow.opener, frame)
                if sink.taken == flow.span.count:
                    peer.incoming.popleft()
                    self._done(message, rank)
                return
        payload = bytearray(len(frame) - frame_bytes(0))
        opener = self._communicator.streams.opener(Lane.P2P, rank)
        opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], payload)
        header = FrameHeader.parse(frame)
        if header.kind is FrameKind.OFFER and not payload:
            self._take_offer(rank, header)
        elif header.kind is FrameKind.ACCEPT and not payload and header.sequence in peer.offered:
            message = peer.offered.pop(header.sequence)
            span = self._communicator.whole(message.region)
            if span.count:
                packed = message.header(FrameKind.DATA, source=self._communicator.rank, destination=rank)
                sealer = self._communicator.streams.sealer(Lane.P2P, rank, message.region.suite)
                peer.outgoing.append((message, Outflow(span, packed, sealer)))
            else:
                self._done(message, rank)
        else:
            raise _mismatch(rank, f"sends a {header.kind.name.lower()} that nothing led to")

    def _take_offer(self, rank: int, offer: FrameHeader) -> None:
        offers = self._peers[rank].offers
        if len(offers) >= MAX_OFFERS:
            raise _mismatch(rank, f"has offered {MAX_OFFERS} messages that are not received")
        self._arrivals += 1
        offers.append((self._arrivals, offer))
        for message in self._wanted:
            if message.peer in (None, rank) and message.tag == offer.tag:
                self._match(message)
                return

    def _match(self, message: P2PMessage) -> None:
        """Accept the offer that came first of those that a receiver waits for, if there is one."""
        ranks = self._communicator.peers if message.peer is None else (message.peer,)
        fitting = [(each, rank) for rank in ranks for each in self._peers[rank].offers if each[1].tag == message.tag]
        if not fitting:
            return
        first, rank = min(fitting, key=lambda found: found[0][0])
        offer, peer, own = first[1], self._peers[rank], self._communicator.rank
        peer.offers.remove(first)
        self._wanted.remove(message)
        if (offer.digest, offer.elements) != (message.types, message.elements):
            raise _mismatch(
                rank,
                f"sends {offer.elements} {offer.element.name.lower()} with tag {offer.tag} where"
                f" rank {own} has room for {message.elements} {message.element.name.lower()}",
            )
        message.sequence = offer.sequence
        span = self._communicator.whole(message.region)
        if span.count:
            sink = CopySink(span)
            header = message.header(FrameKind.DATA, source=rank, destination=own)
            opener = self._communicator.streams.opener(Lane.P2P, rank, message.region.suite)
            peer.incoming.append((message, Inflow(rank, span, header, opener, sink), sink))
        # An empty message is complete when its acceptance has gone out.
        accept = message.header(FrameKind.ACCEPT, source=own, destination=rank)
        peer.control.append((accept, None if span.count else message))


def _mismatch(rank: int, what: str) -> CollectiveError:
    return CollectiveError(Code.COLLECTIVE_MISMATCH, f"rank {rank} {what}", rank=rank)
