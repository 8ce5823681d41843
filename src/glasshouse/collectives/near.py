"""Connections between ranks of one machine: sealed frames lie in memory of the sender, and only their place is sent.

Laws: a receiver copies a frame before it looks at it, so what is opened lies in memory that no other writes; a
sender gives memory out again only when every receiver has said that it copied; the memory holds nothing but sealed
frames, and its owner alone can write to it. Nothing that came from the other end can make a call wait.
Source: spec/sealed-collectives.md, section 3.3.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from glasshouse.collectives.choose import CHUNK_BYTES
from glasshouse.collectives.frames import MAX_PAYLOAD_BYTES
from glasshouse.collectives.keys import Lane
from glasshouse.collectives.link import Link
from glasshouse.collectives.memory import frame_bytes
from glasshouse.errors import Code, CollectiveError

__all__ = ["Arena", "NearLink", "Neighbour", "Offer", "Window", "arena_for", "parse_unit", "unit_of"]

PAGE_BYTES = 4096
"""The unit in which places are counted."""
UNIT_BYTES = 8
"""What goes over the connection for each frame: its place, and its size."""
INLINE = 0xFFFFFFFF
"""The place of a frame that follows on the connection."""
LEAST_PLACED_BYTES = frame_bytes(8 << 10)
"""Below that a frame costs less on the connection."""
SHARED_SLOTS = 4
LINK_SLOTS = {Lane.COLLECTIVE: 2, Lane.P2P: 2}
"""Frames of one connection that its peer has not copied yet."""
MAX_ARENA_BYTES = 1 << 36

_SLOT_BYTES = -(-frame_bytes(CHUNK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
_SEAL_FUTURE_WRITE = 0x10  # fcntl.h; not in the standard library's fcntl
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
_MOST_GIVEN = 2  # a bell and an arena
_PROT_READ = 1
_mprotect = ctypes.CDLL(None).mprotect  # found now: in a forked child a lock of the loader may be held by no thread
_RETRY_S = 0.01
_LONG_S = 3600.0


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
        except BaseException:
            self.shut()
            raise
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._at = 0

    def shut(self) -> None:
        """Close the descriptor when every peer has been sent it: the memory stays."""
        fileno, self.fileno = self.fileno, -1
        if fileno >= 0:
            os.close(fileno)

    def abandon(self) -> None:
        """Let go of it in a forked child, which must not be able to write where its parent's ciphers do."""
        _mprotect(ctypes.c_void_p(self._base), ctypes.c_size_t(len(self._map)), _PROT_READ)

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
    except (OSError, ValueError):
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
        # Only memory has seals: before that is known, any call could wait for what keeps the file. And memory that
        # shrinks under a mapping ends the process that reads there.
        if fcntl.fcntl(fileno, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("not the memory of an arena")
        self.nbytes = os.fstat(fileno).st_size
        if not 0 < self.nbytes <= MAX_ARENA_BYTES:
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


class Neighbour:
    """What this rank and a peer on its machine have given each other.

    Args:
        peer: the other rank.
        arena: the own memory, None where the system has none.
        window: the peer's, likewise.
        bell: connected with the peer; each says on it when it has copied a frame.
    """

    __slots__ = ("_bell", "_links", "arena", "fileno", "gone", "peer", "window")

    def __init__(self, peer: int, arena: Arena | None, window: Window | None, bell: socket.socket) -> None:
        self.peer = peer
        self.arena = arena
        self.window = window
        self._bell = bell
        self._links: dict[int, NearLink] = {}
        self.fileno = bell.fileno()
        self.gone = False
        """Whether nothing more will be heard from it: what it has not copied is not given back."""

    def joined(self, link: NearLink) -> None:
        """Be told of a link with the peer."""
        self._links[link.lane] = link

    def ring(self, lane: Lane) -> None:
        """Say that a frame of a lane has been copied: nothing is lost to this rank if it is not heard."""
        with suppress(OSError):
            self._bell.send(bytes([lane]), socket.MSG_DONTWAIT)

    def listen(self) -> bool:
        """Take back the memory of the frames that the peer says it has copied; return whether there were any.

        Raises:
            CollectiveError: `collective-tampered`, it was not sent so many.
        """
        heard = False
        while not self.gone:
            try:
                lanes = self._bell.recv(256, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                lanes = b""
            self.gone = not lanes
            heard = heard or not self.gone
            for lane in lanes:
                link = self._links.get(lane)
                if link is None or not link.lends:
                    raise _tampered(self.peer)
                link.returned()
        return heard

    def close(self) -> None:
        """Let go of bell and window; closing twice is allowed."""
        self._bell.close()
        if self.window is not None:
            self.window.close()


class Offer:
    """Gives a peer the own arena, and takes the peer's.

    Args:
        connection: a Unix stream socket past the handshake, of which nothing else is read in between.
        peer: the rank at the other end.
        arena: the own memory.
        until: how long to wait (monotonic, s).

    Raises:
        OSError: the peer is gone, or this process has no more room for descriptors.
    """

    __slots__ = ("_arena", "_bell", "_connection", "_peer", "_until")

    def __init__(
        self, connection: socket.socket, peer: int, arena: Arena | None, until: float, *, connected: bool
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._peer = peer
        self._arena = arena
        self._until = until
        self._bell: socket.socket | None = None
        theirs: socket.socket | None = None
        try:
            if connected:
                self._bell, theirs = socket.socketpair()
            given = [] if theirs is None else [theirs.fileno()]
            self._send([*given, *([] if arena is None else [arena.fileno])])
        except BaseException:
            self.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()

    def answer(self) -> Neighbour:
        """Return what the two have given each other.

        Raises:
            TimeoutError: the peer has sent nothing in time.
            OSError, ValueError: the peer is gone, or has sent what no rank sends; or this process has no more room
                for descriptors or memory (`dial.check_own_limits`).
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(min(max(0.0, self._until - time.monotonic()), _LONG_S) * 1000):
            raise TimeoutError
        said, taken, flags, _ = socket.recv_fds(self._connection, 1, _MOST_GIVEN, socket.MSG_CMSG_CLOEXEC)
        window: Window | None = None
        try:
            cut = bool(flags & socket.MSG_CTRUNC)
            if cut and len(taken) < _MOST_GIVEN:
                raise OSError(errno.EMFILE, "there was no room for what the peer gave")
            given = self._bell is None
            if cut or said != bytes([len(taken)]) or not given <= len(taken) <= given + 1:
                raise ValueError("not what a rank sends")
            bell = self._bell or socket.socket(fileno=taken[0])
            if given:
                del taken[0]
            self._bell = bell
            if bell.family != socket.AF_UNIX:
                raise ValueError("not a bell")  # to close another kind may take as long as its giver likes
            if taken:
                window = Window(taken[0])
            self._bell = None
            return Neighbour(self._peer, self._arena, window, bell)
        finally:
            for descriptor in taken:
                os.close(descriptor)

    def close(self) -> None:
        """Let go of what was not answered."""
        if self._bell is not None:
            self._bell.close()

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

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


class NearLink(Link):
    """A connection with a rank of this machine.

    Args:
        connection: a connected Unix stream socket past the handshake; the link owns it.
        lane: what the connection is for.
        neighbour: what the two have given each other.
    """

    __slots__ = ("_free", "_got", "_lent", "_placed", "_slot", "_unit", "neighbour", "short")

    def __init__(self, connection: socket.socket, lane: Lane, neighbour: Neighbour) -> None:
        super().__init__(connection, neighbour.peer, lane)
        self.neighbour = neighbour
        neighbour.joined(self)
        arena = neighbour.arena
        self._free = [] if arena is None else [arena.slot() for _ in range(LINK_SLOTS[lane])]
        self.short = False
        """Whether there was no slot when one was wanted last."""
        self._slot: memoryview | None = None
        """What the frame on its way was sealed in, if that is a slot of this link."""
        self._placed = False
        """Whether of the frame on its way only the place goes out."""
        self._lent: deque[Callable[[], None]] = deque()
        """For each frame whose place went out and that the peer has not copied: who takes its memory back."""
        self._unit = memoryview(bytearray(UNIT_BYTES))
        self._got = 0

    @property
    def lends(self) -> bool:
        """Whether the peer has been sent frames that it has not copied."""
        return bool(self._lent)

    def out_buffer(self, size: int) -> memoryview | None:
        arena = self.neighbour.arena
        if arena is None or not LEAST_PLACED_BYTES <= size <= arena.slot_bytes:
            return super().out_buffer(size)
        if not self._free:
            self.neighbour.listen()
        self.short = not self._free
        if self.short:
            return None
        self._slot = self._free.pop()
        return self._slot

    def begin(self, frame: memoryview, gone: Callable[[], None] | None = None) -> None:
        arena = self.neighbour.arena
        place = arena.place(frame) if arena is not None and len(frame) >= LEAST_PLACED_BYTES else None
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
        window = self.neighbour.window
        place, size = parse_unit(self._unit, 0 if window is None else window.nbytes, self.peer)
        if len(self._in) < size:
            self._grow(size)
        self.wanted = size
        if place == INLINE or window is None:
            return super().pull(wanted)
        window.copy_into(self._in[:size], place)
        self.neighbour.ring(self.lane)
        self.have = size
        self.received += size
        self._announced()
        return True

    def returned(self) -> None:
        """Take back the memory of the oldest frame that is lent: the peer has copied it."""
        self._lent.popleft()()

    def _went(self) -> None:
        slot, self._slot = self._slot, None
        if not self._placed:
            super()._went()
        elif slot is not None:
            self._lent.append(lambda: self._free.append(slot))
            super()._went()
        else:
            self._lent.append(self._gone or _nobody)
            self._gone = None

    def _announced(self) -> int:
        size = super()._announced()
        if size != self.wanted:
            raise _tampered(self.peer)
        return size

    def _release(self) -> None:
        super()._release()
        self.neighbour.close()


def _nobody() -> None:
    """Nothing waits for the memory."""


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
        Code.COLLECTIVE_TAMPERED,
        f"on the connection with rank {peer} came what no rank of this machine sends",
        rank=peer,
    )
