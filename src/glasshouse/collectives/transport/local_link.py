"""Connections between ranks of one machine: sealed frames lie in memory of the sender, and only their place is sent.

Laws: a receiver copies a frame before it looks at it, so what is opened lies in memory that no other process writes; a
sender reuses memory only after every receiver has acknowledged its copy. Source: spec, section 3.3.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import MAX_PAYLOAD_BYTES, frame_bytes
from glasshouse.collectives.transport.local_peer import LocalPeer, not_a_rank
from glasshouse.collectives.transport.peer_link import PeerLink
from glasshouse.collectives.transport.send_pool import PAGE_BYTES

__all__ = ["LocalLink", "parse_unit", "unit_of"]

UNIT_BYTES = 8
"""Sent over the connection for each frame: its place, and its size."""
INLINE = 0xFFFFFFFF
"""The place of a frame that follows on the connection."""
LEAST_PLACED_BYTES = frame_bytes(8 << 10)
"""Below that a frame costs less on the connection."""


class LocalLink(PeerLink):
    """A connection with a rank of this machine.

    Args:
        connection: a connected Unix stream socket past the handshake; the link owns it.
        lane: its purpose.
        local_peer: the resources that the two ranks share.
    """

    __slots__ = ("_free", "_got", "_lent", "_placed", "_slot", "_unit", "local_peer", "short")

    def __init__(self, connection: socket.socket, lane: Lane, local_peer: LocalPeer) -> None:
        super().__init__(connection, local_peer.peer, lane)
        self.local_peer = local_peer
        local_peer.returned[lane] = self._returned
        send_pool = local_peer.send_pool
        self._free = [] if send_pool is None else send_pool.slots(lane)
        self.short = False
        """Whether there was no slot when one was wanted last."""
        self._slot: memoryview | None = None
        """Where the frame on its way was sealed, if that is a slot of this link."""
        self._placed = False
        """Whether of the frame on its way only the place goes out."""
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
    """Return place and size.

    Args:
        unit: as received.
        pool_bytes: the size of the sender's send pool, 0 if it has none.
        peer: the sender.

    Raises:
        CollectiveError: `collective-tampered`, a size that no frame has, or a place outside the send pool.
    """
    place, size = int.from_bytes(unit[:4], "big"), int.from_bytes(unit[4:], "big")
    within = place == INLINE or place * PAGE_BYTES + size <= pool_bytes
    if not within or not frame_bytes(0) <= size <= frame_bytes(MAX_PAYLOAD_BYTES):
        raise not_a_rank(peer)
    return place, size
