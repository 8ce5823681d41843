"""Connections between ranks of one machine: sealed frames lie in memory of the sender, and only their place is sent.

Laws: a receiver copies a frame before it looks at it, so what is opened lies in memory that no other process writes; a
sender reuses memory only after every receiver has acknowledged its copy; nothing that came from a peer can make a call
wait. Source: spec, section 3.3.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from glasshouse.collectives.protocol.group_keys import Lane, Membership
from glasshouse.collectives.protocol.headers import MAX_PAYLOAD_BYTES, frame_bytes
from glasshouse.collectives.transport.dial import check_own_limits
from glasshouse.collectives.transport.endpoint import late, lost
from glasshouse.collectives.transport.peer_link import PeerLink
from glasshouse.collectives.transport.send_pool import PAGE_BYTES, PeerPool, SendPool, send_pool_for
from glasshouse.errors import Code, CollectiveError

_MOST_DESCRIPTORS = 2  # an acknowledgement socket and a send pool
_RETRY_S = 0.01
_LONG_S = 3600.0


@dataclass(eq=False)
class LocalPeer:
    """A peer on this machine."""

    peer: int
    send_pool: SendPool | None  # the own memory, None where the system has none
    window: PeerPool | None  # the peer's, likewise
    acks: socket.socket  # connected with the peer; carries one byte, the lane, for each frame that was copied
    gone: bool = False  # whether its acknowledgements have ended: what it has not copied is never given back
    returned: dict[int, Callable[[], bool]] = field(default_factory=dict)
    """By lane, takes back the memory of a frame; False where none is lent."""

    def __post_init__(self) -> None:
        self.fileno = self.acks.fileno()

    def acknowledge(self, lane: Lane) -> None:
        """Acknowledge the copy of one frame of a lane; if this fails, only the peer loses memory."""
        with contextlib.suppress(OSError):
            self.acks.send(bytes([lane]), socket.MSG_DONTWAIT)

    def collect(self) -> bool:
        """Take back the memory of the frames that the peer has acknowledged; return whether there were any.

        Raises:
            CollectiveError: `collective-tampered`, the peer was not sent so many.
        """
        found = False
        while not self.gone:
            try:
                lanes = self.acks.recv(256, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                lanes = b""
            self.gone = not lanes
            found = found or not self.gone
            for lane in lanes:
                if lane not in self.returned or not self.returned[lane]():
                    raise not_a_rank(self.peer)
        return found

    def close(self) -> None:
        """Close the socket and unmap the peer's memory; closing twice is allowed."""
        self.acks.close()
        if self.window is not None:
            self.window.close()


class PoolExchange:
    """Sends a peer the own send pool, and receives the peer's, on a socket past the handshake that nothing else reads.

    The rank that `connected` makes the acknowledgement socket. It waits `until` a time (monotonic, s).

    Raises:
        OSError: the peer is gone, or this process has no more room for descriptors.
    """

    def __init__(
        self, connection: socket.socket, peer: int, send_pool: SendPool | None, until: float, *, connected: bool
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._peer = peer
        self._send_pool = send_pool
        self._until = until
        self._acks: socket.socket | None = None
        theirs: socket.socket | None = None
        try:
            if connected:
                self._acks, theirs = socket.socketpair()
            given = [] if theirs is None else [theirs.fileno()]
            self._send([*given, *([] if send_pool is None else [send_pool.fileno])])
        except BaseException:
            self.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()

    def answer(self) -> LocalPeer:
        """Return the peer, with the descriptors that it sent.

        Raises:
            TimeoutError: the peer has sent nothing in time.
            OSError, ValueError: the peer is gone, or has sent what no rank sends; or this process has no more room
                for descriptors or memory (`dial.check_own_limits`).
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(min(max(0.0, self._until - time.monotonic()), _LONG_S) * 1000):
            raise TimeoutError
        data, taken, flags, _ = socket.recv_fds(self._connection, 1, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        try:
            cut = bool(flags & socket.MSG_CTRUNC)
            if cut and len(taken) < _MOST_DESCRIPTORS:
                raise OSError(errno.EMFILE, "there was no room for the peer's descriptors")
            given = self._acks is None
            if cut or data != bytes([len(taken)]) or not given <= len(taken) <= given + 1:
                raise ValueError("not what a rank sends")
            self._acks = acks = self._acks or socket.socket(fileno=taken[0])
            if given:
                del taken[0]  # the socket's own now
            if acks.family != socket.AF_UNIX:
                # To close another kind may take as long as its giver likes.
                raise ValueError("not an acknowledgement socket")
            window = PeerPool(taken[0]) if taken else None
            self._acks = None
            return LocalPeer(self._peer, self._send_pool, window, acks)
        finally:
            for descriptor in taken:
                os.close(descriptor)

    def close(self) -> None:
        """Close the socket of an exchange that was not answered."""
        if self._acks is not None:
            self._acks.close()

    def _send(self, given: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._connection, [bytes([len(given)])], given)
                return
            except OSError as error:
                # A user may have only so many descriptors under way; the others' are being taken.
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > self._until:
                    raise
                time.sleep(_RETRY_S)


def share_pools(
    membership: Membership, connections: Mapping[int, socket.socket], until: float, undone: contextlib.ExitStack
) -> tuple[SendPool | None, dict[int, LocalPeer]]:
    """Exchange send pools with the ranks of this machine, each on a Unix stream socket past the handshake.

    `undone` closes what they sent, unless the caller takes it over.

    Raises:
        CollectiveError: `rank-lost`, one of them is gone; `collective-timeout`, it has sent nothing.
    """
    if not connections:
        return None, {}
    local_peers: dict[int, LocalPeer] = {}
    send_pool = send_pool_for(len(connections))
    with contextlib.ExitStack() as asked:
        if send_pool is not None:
            asked.callback(send_pool.shut)
        peer = next(iter(connections))
        try:
            exchanges = []
            for peer, connection in connections.items():
                exchange = PoolExchange(connection, peer, send_pool, until, connected=peer < membership.rank)
                exchanges.append(asked.enter_context(contextlib.closing(exchange)))
            for peer, exchange in zip(connections, exchanges, strict=True):
                local_peers[peer] = undone.enter_context(contextlib.closing(exchange.answer()))
        except TimeoutError:
            raise late(membership, [peer]) from None
        except (OSError, ValueError) as error:
            check_own_limits(error)
            raise lost(membership, peer) from None
    return send_pool, local_peers


def not_a_rank(peer: int) -> CollectiveError:
    """Return the error for what no rank sends on the connections with one of this machine."""
    message = f"on the connection with rank {peer} came what no rank of this machine sends"
    return CollectiveError(Code.COLLECTIVE_TAMPERED, message, rank=peer)


UNIT_BYTES = 8  # sent over the connection for each frame: its place, and its size
INLINE = 0xFFFFFFFF  # the place of a frame that follows on the connection
LEAST_PLACED_BYTES = frame_bytes(8 << 10)  # below that a frame costs less on the connection


class LocalLink(PeerLink):
    """A connection with a rank of this machine: a Unix stream socket past the handshake, which the link owns."""

    def __init__(self, connection: socket.socket, lane: Lane, local_peer: LocalPeer) -> None:
        super().__init__(connection, local_peer.peer, lane)
        self.local_peer = local_peer
        local_peer.returned[lane] = self._returned
        send_pool = local_peer.send_pool
        self._free = [] if send_pool is None else send_pool.slots(lane)
        self.short = False  # whether there was no slot when one was wanted last
        self._slot: memoryview | None = None  # where the frame on its way was sealed, if that is a slot of this link
        self._placed = False  # whether of the frame on its way only the place goes out
        self._lent: deque[Callable[[], None]] = deque()
        """For each frame whose place went out and that the peer has not copied: the owner of its memory."""
        self._unit = memoryview(bytearray(UNIT_BYTES))
        self._got = 0

    @property
    def lends(self) -> bool:
        """Whether the peer has been sent frames that it has not copied."""
        return bool(self._lent)

    def out_buffer(self, size: int) -> memoryview | None:
        send_pool = self.local_peer.send_pool
        if send_pool is None or not LEAST_PLACED_BYTES <= size <= send_pool.slot_bytes:
            return super().out_buffer(size)
        if not self._free:
            self.local_peer.collect()
        self.short = not self._free
        if self.short:
            return None
        self._slot = self._free.pop()
        return self._slot

    def begin(self, frame: memoryview, gone: Callable[[], None] | None = None) -> None:
        send_pool = self.local_peer.send_pool
        place = send_pool.place(frame) if send_pool is not None and len(frame) >= LEAST_PLACED_BYTES else None
        unit = memoryview(unit_of(INLINE if place is None else place, len(frame)))
        self._placed = place is not None
        self._pending = [unit] if self._placed else [unit, frame]
        self._gone = gone

    def pull(self, wanted: int) -> bool:
        if self.wanted:
            return super().pull(wanted)
        self._got += self._read(self._unit[self._got :])
        if self._got < UNIT_BYTES:
            return False
        self._got = 0
        window = self.local_peer.window
        place, size = parse_unit(self._unit, 0 if window is None else window.nbytes, self.peer)
        if len(self._in) < size:
            self._grow(size)
        self.wanted = size
        if place == INLINE or window is None:
            return super().pull(wanted)
        window.copy_into(self._in[:size], place)
        self.local_peer.acknowledge(self.lane)
        self.have = size
        self.received += size
        self._announced()
        return True

    def _returned(self) -> bool:
        """Take back the memory of the oldest frame that is lent, which the peer has copied; False if none is lent."""
        if not self._lent:
            return False
        self._lent.popleft()()
        return True

    def _went(self) -> None:
        slot, self._slot = self._slot, None
        if not self._placed:
            super()._went()
        elif slot is not None:
            self._lent.append(lambda: self._free.append(slot))
            super()._went()
        else:
            self._lent.append(self._gone or (lambda: None))
            self._gone = None

    def _announced(self) -> int:
        size = super()._announced()
        if size != self.wanted:
            raise not_a_rank(self.peer)
        return size

    def _release(self) -> None:
        super()._release()
        self.local_peer.close()


def unit_of(place: int, size: int) -> bytes:
    """Return the unit for a frame of `size` bytes at `place`, in pages, or `INLINE`."""
    return place.to_bytes(4, "big") + size.to_bytes(4, "big")


def parse_unit(unit: memoryview | bytes, pool_bytes: int, peer: int) -> tuple[int, int]:
    """Return place and size of a received unit; `pool_bytes` is 0 if the sender has no send pool.

    Raises:
        CollectiveError: `collective-tampered`, a size that no frame has, or a place outside the send pool.
    """
    place, size = int.from_bytes(unit[:4], "big"), int.from_bytes(unit[4:], "big")
    within = place == INLINE or place * PAGE_BYTES + size <= pool_bytes
    if not within or not frame_bytes(0) <= size <= frame_bytes(MAX_PAYLOAD_BYTES):
        raise not_a_rank(peer)
    return place, size
