"""Connections between ranks of one machine: sealed frames lie in memory of the sender, and only their place is sent.

Laws: a receiver copies a frame before it looks at it, so what is opened lies in memory that nobody else writes; a
sender gives memory out again only when every receiver has said that it copied; the memory holds nothing but sealed
frames, and nobody but its owner can write to it or make it smaller.
Source: spec/sealed-collectives.md, section 3.3.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from glasshouse.collectives.choose import CHUNK_BYTES
from glasshouse.collectives.frames import MAX_PAYLOAD_BYTES
from glasshouse.collectives.keys import Lane
from glasshouse.collectives.link import Closed, Link
from glasshouse.collectives.memory import frame_bytes
from glasshouse.errors import Code, CollectiveError

__all__ = ["Arena", "NearLink", "Offer", "Shared", "Window", "arena_for", "parse_unit", "unit_of"]

PAGE_BYTES = 4096
"""The unit in which places are counted."""
UNIT_BYTES = 8
"""What goes over the connection for each frame: its place, and its size."""
INLINE = 0xFFFFFFFF
"""The place of a frame that follows on the connection."""
LEAST_PLACED_BYTES = frame_bytes(8 << 10)
"""Below that a frame costs less on the connection."""
SHARED_SLOTS = 8
LINK_SLOTS = {Lane.COLLECTIVE: 4, Lane.P2P: 2}
"""Frames of one connection that its peer has not copied yet."""

_SLOT_BYTES = -(-frame_bytes(CHUNK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
_MAX_ARENA_BYTES = 1 << 36
_SEAL_FUTURE_WRITE = 0x10  # fcntl.h; not in the standard library's fcntl
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE


class Arena:
    """Memory of this rank for sealed frames, which its peers on this machine can read.

    Args:
        peers: how many will draw from it, each on both lanes.

    Raises:
        OSError: this system does not have what it takes.
    """

    __slots__ = ("_at", "_base", "_map", "fileno", "slot_bytes")

    def __init__(self, peers: int) -> None:
        self.slot_bytes = _SLOT_BYTES
        size = (SHARED_SLOTS + peers * sum(LINK_SLOTS.values())) * _SLOT_BYTES
        self.fileno = os.memfd_create("glasshouse-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fileno, size)
            self._map = memoryview(mmap.mmap(self.fileno, size))
            fcntl.fcntl(self.fileno, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, ValueError):
            self.shut()
            raise
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._at = 0

    def shut(self) -> None:
        """Close the descriptor when every peer has been sent it: the memory stays."""
        fileno, self.fileno = self.fileno, -1
        if fileno >= 0:
            os.close(fileno)

    def slot(self) -> memoryview:
        """Return memory for one frame that was not returned before."""
        low, self._at = self._at, self._at + _SLOT_BYTES
        if self._at > len(self._map):
            raise ValueError("more slots than the arena was made for")
        return self._map[low : self._at]

    def shared(self, size: int) -> memoryview:
        """Return a slot for frames of `size` bytes that every peer is sent; there are `SHARED_SLOTS`."""
        if size > _SLOT_BYTES:
            raise ValueError("no slot is that large")
        return self.slot()[:size]

    def place(self, frame: memoryview) -> int | None:
        """Return where a frame lies, in pages; None if that is elsewhere."""
        at = ctypes.addressof(ctypes.c_char.from_buffer(frame)) - self._base
        return at // PAGE_BYTES if 0 <= at < len(self._map) else None


def arena_for(peers: int) -> Arena | None:
    """Return memory for connections with so many ranks of this machine, None where the system has none."""
    try:
        return Arena(peers)
    except OSError:
        return None


class Window:
    """A peer's arena, to read.

    Args:
        fileno: of the peer's memory; stays the caller's.

    Raises:
        OSError, ValueError: it is not the memory of an arena, or could be made smaller while it is read.
    """

    __slots__ = ("_map", "_mapped", "nbytes")

    def __init__(self, fileno: int) -> None:
        self.nbytes = os.fstat(fileno).st_size
        # A file that shrinks under a mapping ends the process that reads there.
        if not 0 < self.nbytes <= _MAX_ARENA_BYTES or fcntl.fcntl(fileno, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("not the memory of an arena")
        self._mapped = mmap.mmap(fileno, self.nbytes, prot=mmap.PROT_READ)
        self._map = memoryview(self._mapped)

    def copy_into(self, out: memoryview, place: int) -> None:
        """Fill `out` with what lies at `place`."""
        low = place * PAGE_BYTES
        out[:] = self._map[low : low + len(out)]

    def close(self) -> None:
        """Map it no longer; closing twice is allowed."""
        self._map.release()
        self._mapped.close()


class Shared(NamedTuple):
    """What two ranks of one machine have given each other; no arena or window where a system could give none.

    The peer rings `bell` for each frame that it copied, this rank `theirs`.
    """

    arena: Arena | None
    window: Window | None
    bell: int
    theirs: int

    def close(self) -> None:
        """Let go of it, where no link became of it."""
        os.close(self.bell)
        os.close(self.theirs)
        if self.window is not None:
            self.window.close()


class Offer:
    """Gives a peer the own arena, and takes the peer's.

    Args:
        connection: a Unix stream socket past the handshake, of which nothing else is read in between.
        arena: the own memory.

    Raises:
        OSError: the peer is gone.
    """

    __slots__ = ("_arena", "_bell", "_connection")

    def __init__(self, connection: socket.socket, arena: Arena | None) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._arena = arena
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        given = [self._bell] if arena is None else [self._bell, arena.fileno]
        try:
            socket.send_fds(connection, [bytes([len(given)])], given)
        except BaseException:
            self.close()
            raise

    def answer(self, timeout_s: float) -> Shared:
        """Return what the two have given each other; the bells are the caller's then.

        Raises:
            TimeoutError: the peer has sent nothing in time.
            OSError, ValueError: it is gone, or has sent what no rank sends.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            raise TimeoutError
        said, taken, _, _ = socket.recv_fds(self._connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
        try:
            if said != bytes([len(taken)]) or not taken:
                raise ValueError("not what a rank sends")
            window = Window(taken[1]) if len(taken) > 1 else None
            os.set_blocking(taken[0], False)
            bell, self._bell = self._bell, -1
            return Shared(self._arena, window, bell, taken.pop(0))
        finally:
            for descriptor in taken:
                os.close(descriptor)

    def close(self) -> None:
        """Let go of what was not answered."""
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)


class NearLink(Link):
    """A connection with a rank of this machine.

    Args:
        connection: a connected Unix stream socket past the handshake; the link owns it and both bells.
        peer: the rank at the other end.
        lane: what the connection is for.
        shared: what the two have given each other.
    """

    __slots__ = ("_arena", "_free", "_got", "_lent", "_placed", "_slot", "_theirs", "_unit", "_window", "bell")

    def __init__(self, connection: socket.socket, peer: int, lane: Lane, shared: Shared) -> None:
        super().__init__(connection, peer, lane)
        self._arena, self._window, self.bell, self._theirs = shared
        self._free = [] if self._arena is None else [self._arena.slot() for _ in range(LINK_SLOTS[lane])]
        self._slot: memoryview | None = None
        """What the frame on its way was sealed in, if that is a slot of this link."""
        self._placed = False
        """Whether of the frame on its way only the place goes out."""
        self._lent: deque[tuple[memoryview | None, Callable[[], None] | None]] = deque()
        """For each frame whose place went out and that the peer has not copied: its slot, and who else waits."""
        self._unit = memoryview(bytearray(UNIT_BYTES))
        self._got = 0

    def out_buffer(self, size: int) -> memoryview | None:
        if self._arena is None or not LEAST_PLACED_BYTES <= size <= self._arena.slot_bytes:
            return super().out_buffer(size)
        if not self._free:
            return None
        self._slot = self._free.pop()
        return self._slot

    def begin(self, frame: memoryview, gone: Callable[[], None] | None = None) -> None:
        place = self._arena.place(frame) if self._arena is not None and len(frame) >= LEAST_PLACED_BYTES else None
        unit = memoryview(unit_of(INLINE if place is None else place, len(frame)))
        self._placed = place is not None
        self._pending = [unit] if self._placed else [unit, frame]
        self._gone = gone

    def pull(self, wanted: int) -> bool:
        if self.wanted:
            return super().pull(wanted)
        read = self._read(self._unit[self._got :])
        self._got += read
        if self._got < UNIT_BYTES:
            return False
        self._got = 0
        place, size = parse_unit(self._unit, 0 if self._window is None else self._window.nbytes, self.peer)
        if len(self._in) < size:
            self._grow(size)
        self.wanted = size
        if place == INLINE or self._window is None:
            return super().pull(wanted)
        self._window.copy_into(self._in[:size], place)
        try:
            os.eventfd_write(self._theirs, 1)
        except OSError:
            raise Closed from None
        self.have = size
        self.received += size
        self._announced()
        return True

    def returned(self) -> None:
        """Take back the memory of frames that the peer has copied.

        Raises:
            CollectiveError: `collective-tampered`, it has copied more than it was sent.
        """
        try:
            copied = os.eventfd_read(self.bell)
        except BlockingIOError:
            return
        if copied > len(self._lent):
            raise _tampered(self.peer)
        for _ in range(copied):
            slot, gone = self._lent.popleft()
            if slot is not None:
                self._free.append(slot)
            if gone is not None:
                gone()

    def _went(self) -> None:
        if not self._placed:
            super()._went()
            return
        self._lent.append((self._slot, self._gone))
        self._slot = self._gone = None

    def _announced(self) -> int:
        size = super()._announced()
        if size != self.wanted:
            raise _tampered(self.peer)
        return size

    def _release(self) -> None:
        super()._release()
        if self._window is not None:
            self._window.close()
        bells, self.bell, self._theirs = {self.bell, self._theirs} - {-1}, -1, -1
        for bell in bells:
            os.close(bell)


def unit_of(place: int, size: int) -> bytes:
    """Return what goes over the connection for a frame of `size` bytes at `place`, in pages, or `INLINE`."""
    return place.to_bytes(4, "big") + size.to_bytes(4, "big")


def parse_unit(unit: memoryview | bytes, arena_bytes: int, peer: int) -> tuple[int, int]:
    """Return place and size.

    Args:
        unit: as received.
        arena_bytes: the size of the sender's arena, 0 if it has none.
        peer: the sender.

    Raises:
        CollectiveError: `collective-tampered`, a size that no frame has, or a place outside the arena.
    """
    place, size = int.from_bytes(unit[:4], "big"), int.from_bytes(unit[4:], "big")
    within = place == INLINE or place * PAGE_BYTES + size <= arena_bytes
    if not within or not frame_bytes(0) <= size <= frame_bytes(MAX_PAYLOAD_BYTES):
        raise _tampered(peer)
    return place, size


def _tampered(peer: int) -> CollectiveError:
    return CollectiveError(
        Code.COLLECTIVE_TAMPERED, f"on the connection with rank {peer} came what no rank of this machine sends"
    )
