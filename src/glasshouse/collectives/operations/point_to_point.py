"""Messages between two ranks: matched by tag in any order, from a named rank or from the rank that comes first.

A message is offered, accepted when the other end has room for it, and only then sent: what is not received never
stands in the way of what somebody does. Every pair of ranks has a connection for this.
Laws: messages between two ranks under one tag arrive in the order in which they were sent; an offer of another size or
type than the receiver has room for ends the group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.collectives.operations.arithmetic import ELEMENTS
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.regions import Region, Span, within
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import (
    HEADER_BYTES,
    Collective,
    Element,
    Header,
    Kind,
    digest,
    frame_bytes,
    set_chunk,
)
from glasshouse.errors import Code, CollectiveError
from glasshouse.wire.aead import Suite

__all__ = ["MAX_OFFERS", "MAX_TAG", "Mailbox", "P2PMessage", "receive", "send"]

MAX_TAG = 2**32 - 1
MAX_OFFERS = 1 << 16
"""Offers of one rank that wait for a receiver."""


class P2PMessage:
    """One end of a message.

    Args:
        tensors: contiguous; sent from or received into, several as one message.
        peer: the rank at the other end, None for a receiver that takes from any.
        tag: what the other end must say too.
        sending: which end this is.
    """

    __slots__ = ("_region", "element", "elements", "peer", "sending", "sequence", "tag", "tensors", "types")

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
        return self.region.queue

    def begin(self, communicator: Communicator) -> None:
        """Become one of a communicator's messages.

        Raises:
            ValueError: there is no such rank to exchange messages with.
        """
        if self.peer not in (None, *communicator.peers) or (self.sending and self.peer is None):
            raise ValueError(
                f"rank {communicator.rank} of {communicator.size} exchanges no message with rank {self.peer}"
            )
        self._region = communicator.as_bytes(self.tensors)

    def header(self, kind: Kind, *, source: int, destination: int) -> Header:
        """Return the header of this message's frames of one kind."""
        return Header(
            kind=kind,
            source=source,
            destination=destination,
            sequence=self.sequence,
            suite=self.region.suite if kind is Kind.DATA else Suite.AES_256_GCM,
            collective=Collective.SEND,
            element=self.element,
            elements=self.elements,
            tag=self.tag,
            digest=self.types,
        )

    def described(self) -> str:
        """Return what an error calls it."""
        what = f"{self.elements} {self.element.name.lower()}"
        way = "send" if self.sending else "receive"
        end = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{way} of {what} {'to' if self.sending else 'from'} {end} with tag {self.tag}"

    def zero(self) -> None:
        if not self.sending and self._region is not None:
            self._region.zero()


def send(tensors: Sequence[Any], peer: int, tag: int = 0) -> P2PMessage:
    """Send contiguous tensors to rank `peer`, as one message."""
    return P2PMessage(tensors, peer, tag, sending=True)


def receive(tensors: Sequence[Any], peer: int | None, tag: int = 0) -> P2PMessage:
    """Receive a message into contiguous tensors: from rank `peer`, or with None from the rank that sends first."""
    return P2PMessage(tensors, peer, tag, sending=False)


@dataclass(slots=True)
class _Transfer:
    """A message on its way."""

    message: P2PMessage
    span: Span
    header: bytearray
    chunk: int = 0


class Mailbox:
    """The messages of one rank: what is offered, wanted and on its way. Touches no connection.

    Args:
        communicator: the group.
        done: told of each message that is complete, with the rank at the other end.
    """

    def __init__(self, communicator: Communicator, done: Callable[[P2PMessage, int], None]) -> None:
        self._communicator = communicator
        self._done = done
        self._numbers = dict.fromkeys(communicator.peers, 0)
        self._offered: dict[int, dict[int, P2PMessage]] = {peer: {} for peer in communicator.peers}
        self._offers: dict[int, list[Header]] = {peer: [] for peer in communicator.peers}
        self._arrivals = 0
        self._order: dict[tuple[int, int], int] = {}
        self._wanted: list[P2PMessage] = []
        self._control: dict[int, deque[tuple[Header, P2PMessage | None]]] = {
            peer: deque() for peer in communicator.peers
        }
        self._outgoing: dict[int, deque[_Transfer]] = {peer: deque() for peer in communicator.peers}
        self._incoming: dict[int, deque[_Transfer]] = {peer: deque() for peer in communicator.peers}
        self._ending: dict[int, P2PMessage | None] = dict.fromkeys(communicator.peers)
        """The message that is complete when the frame on its way to a peer has gone out."""

    def post(self, message: P2PMessage) -> None:
        """Begin with a message of this rank."""
        if not message.sending:
            self._wanted.append(message)
            self._match(message)
            return
        peer = message.peer
        if peer is None:
            raise ValueError("a message is sent to one rank")
        message.sequence = self._numbers[peer]
        self._numbers[peer] += 1
        self._offered[peer][message.sequence] = message
        self._control[peer].append((message.header(Kind.OFFER, source=self._communicator.rank, destination=peer), None))

    def waits_for(self, peer: int) -> bool:
        """Return whether a message of this rank is unfinished that a peer is needed for."""
        return bool(
            self._offered[peer]
            or self._outgoing[peer]
            or self._incoming[peer]
            or self._ending[peer]
            or any(message.peer in (None, peer) for message in self._wanted)
        )

    def busy(self, peer: int) -> bool:
        """Return whether there is a frame for a peer."""
        return bool(self._control[peer] or self._outgoing[peer])

    def frame(self, peer: int, buffer: Callable[[int], memoryview | None]) -> memoryview | None:
        """Return the next sealed frame for a peer, made in what `buffer` gives for its size, or None."""
        sealer = self._communicator.streams.sealer(Lane.P2P, peer)
        if self._control[peer]:
            if (own := buffer(frame_bytes(0))) is None:
                return None
            frame = own[: frame_bytes(0)]
            header, self._ending[peer] = self._control[peer].popleft()
            header.pack_into(frame)
            sealer.seal_into(frame[:HEADER_BYTES], b"", frame[HEADER_BYTES:])
            return frame
        if not self._outgoing[peer]:
            return None
        transfer = self._outgoing[peer][0]
        region = transfer.span.region
        sealer = self._communicator.streams.sealer(Lane.P2P, peer, region.suite)
        low, high = transfer.span.bounds(transfer.chunk)
        if (own := buffer(frame_bytes(high - low))) is None:
            return None
        frame = own[: frame_bytes(high - low)]
        frame[:HEADER_BYTES] = transfer.header
        set_chunk(frame, elements=transfer.message.elements, chunk=transfer.chunk)
        with within(region.queue):
            region.seal(low, high, sealer, frame)
        transfer.chunk += 1
        if transfer.chunk == transfer.span.count:
            self._outgoing[peer].popleft()
            self._ending[peer] = transfer.message
        return frame

    def sent(self, peer: int) -> None:
        """Be told that the last frame for a peer has gone out whole."""
        if (message := self._ending[peer]) is not None:
            self._ending[peer] = None
            self._done(message, peer)

    def take(self, peer: int, frame: memoryview) -> None:
        """Open and use a frame from a peer that is an offer, an acceptance, or data.

        Raises:
            CollectiveError: `collective-tampered`; `collective-mismatch` for a message of another size or type.
        """
        incoming = self._incoming[peer]
        if incoming and frame[1] == Kind.DATA:
            transfer = incoming[0]
            region = transfer.span.region
            opener = self._communicator.streams.opener(Lane.P2P, peer, region.suite)
            low, high = transfer.span.bounds(transfer.chunk)
            set_chunk(transfer.header, elements=transfer.message.elements, chunk=transfer.chunk)
            opener.complete(transfer.header, high - low)
            if frame[:HEADER_BYTES] == transfer.header:
                with within(region.queue):
                    region.open(low, high, opener, frame)
                transfer.chunk += 1
                if transfer.chunk == transfer.span.count:
                    incoming.popleft()
                    self._done(transfer.message, peer)
                return
        payload = bytearray(len(frame) - frame_bytes(0))
        opener = self._communicator.streams.opener(Lane.P2P, peer)
        opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], payload)
        header = Header.parse(frame)
        if header.kind is Kind.OFFER and not payload:
            self._hear(peer, header)
        elif header.kind is Kind.ACCEPT and not payload and header.sequence in self._offered[peer]:
            self._go(peer, self._offered[peer].pop(header.sequence))
        else:
            raise CollectiveError(
                Code.COLLECTIVE_MISMATCH,
                f"rank {peer} sends a {header.kind.name.lower()} that nothing led to",
                rank=peer,
            )

    def _hear(self, peer: int, offer: Header) -> None:
        if len(self._offers[peer]) >= MAX_OFFERS:
            raise CollectiveError(
                Code.COLLECTIVE_MISMATCH,
                f"rank {peer} has offered {MAX_OFFERS} messages that are not received",
                rank=peer,
            )
        self._arrivals += 1
        self._offers[peer].append(offer)
        self._order[peer, offer.sequence] = self._arrivals
        for message in self._wanted:
            if message.peer in (None, peer) and message.tag == offer.tag:
                self._match(message)
                return

    def _match(self, message: P2PMessage) -> None:
        """Accept the offer that came first of those that a receiver waits for, if there is one."""
        peers = self._communicator.peers if message.peer is None else (message.peer,)
        fitting = [(peer, offer) for peer in peers for offer in self._offers[peer] if offer.tag == message.tag]
        if not fitting:
            return
        peer, offer = min(fitting, key=lambda each: self._order[each[0], each[1].sequence])
        self._offers[peer].remove(offer)
        del self._order[peer, offer.sequence]
        self._wanted.remove(message)
        if (offer.digest, offer.elements) != (message.types, message.elements):
            raise CollectiveError(
                Code.COLLECTIVE_MISMATCH,
                f"rank {peer} sends {offer.elements} {offer.element.name.lower()} with tag {offer.tag} where"
                f" rank {self._communicator.rank} has room for {message.elements} {message.element.name.lower()}",
                rank=peer,
            )
        message.sequence = offer.sequence
        accept = message.header(Kind.ACCEPT, source=self._communicator.rank, destination=peer)
        transfer = self._transfer(message, source=peer, destination=self._communicator.rank)
        if transfer.span.count:
            self._incoming[peer].append(transfer)
        # An empty message is complete when the other end has been told so.
        self._control[peer].append((accept, None if transfer.span.count else message))

    def _go(self, peer: int, message: P2PMessage) -> None:
        transfer = self._transfer(message, source=self._communicator.rank, destination=peer)
        if transfer.span.count:
            self._outgoing[peer].append(transfer)
        else:
            self._done(message, peer)

    def _transfer(self, message: P2PMessage, *, source: int, destination: int) -> _Transfer:
        return _Transfer(
            message,
            self._communicator.whole(message.region),
            message.header(Kind.DATA, source=source, destination=destination).encode(),
        )
