"""Memory of a sender that its peers on the same machine read sealed frames from (spec, section 3.3).

Laws: the memory holds nothing but sealed frames; its owner alone can write to it; its size cannot change.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from glasshouse.collectives.protocol.frame_memory import CHUNK_BYTES, SHARED_FRAMES, allocate
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import frame_bytes

PAGE_BYTES = 4096  # the unit in which places are counted
LINK_SLOTS = {Lane.COLLECTIVE: 2, Lane.P2P: 2}  # frames of one connection that its peer has not copied yet
MAX_POOL_BYTES = 1 << 36

_SLOT_BYTES = -(-frame_bytes(CHUNK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
_SEAL_FUTURE_WRITE = 0x10  # fcntl.h; not in the standard library's fcntl
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
_PROT_READ = 1
_mprotect = ctypes.CDLL(None).mprotect  # found now: in a forked child the loader's lock may never be released


class SendPool:
    """Memory of this rank for sealed frames, which so many peers on this machine map read-only, for both lanes.

    Raises:
        OSError: this system has no sealable memory, or no room for it.
    """

    def __init__(self, peers: int) -> None:
        self.slot_bytes = _SLOT_BYTES
        size = (SHARED_FRAMES + peers * sum(LINK_SLOTS.values())) * _SLOT_BYTES
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
        """Close the descriptor once every peer has been sent it; the memory stays mapped."""
        fileno, self.fileno = self.fileno, -1
        if fileno >= 0:
            os.close(fileno)

    def abandon(self) -> None:
        """Make the memory read-only in a forked child, so that it cannot write where its parent's ciphers do."""
        _mprotect(ctypes.c_void_p(self._base), ctypes.c_size_t(len(self._map)), _PROT_READ)

    def slots(self, lane: Lane) -> list[memoryview]:
        """Return memory for the frames of one connection, which was not returned before."""
        return [self._slot() for _ in range(LINK_SLOTS[lane])]

    def shared(self, size: int) -> memoryview:
        """Return memory for frames of `size` bytes that every peer is sent.

        There are `SHARED_FRAMES` slots for these; the memory is elsewhere where no slot is that large.
        """
        return self._slot()[:size] if size <= _SLOT_BYTES else allocate(size)

    def place(self, frame: memoryview) -> int | None:
        """Return where a frame lies, in pages; None if that is elsewhere."""
        at = ctypes.addressof(ctypes.c_char.from_buffer(frame)) - self._base
        return at // PAGE_BYTES if 0 <= at < len(self._map) else None

    def _slot(self) -> memoryview:
        low, self._at = self._at, self._at + _SLOT_BYTES
        if self._at > len(self._map):
            raise ValueError("more slots than the send pool was made for")
        return self._map[low : self._at]


def send_pool_for(peers: int) -> SendPool | None:
    """Return memory for connections with so many ranks of this machine, None where the system has none."""
    try:
        return SendPool(peers)
    except (OSError, ValueError):
        return None


class PeerPool:
    """A peer's send pool, mapped to be read; the descriptor stays the caller's.

    Raises:
        OSError, ValueError: it is not a send pool, or could be made smaller while it is read.
    """

    def __init__(self, fileno: int) -> None:
        # Only memory has seals: before that is known, any call could wait for what keeps the file. And memory that
        # shrinks under a mapping ends the process that reads there.
        sealed = fcntl.fcntl(fileno, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        self.nbytes = os.fstat(fileno).st_size if sealed else 0
        if not 0 < self.nbytes <= MAX_POOL_BYTES:
            raise ValueError("not a send pool")
        self._mapped = mmap.mmap(fileno, self.nbytes, prot=mmap.PROT_READ)
        self._map = memoryview(self._mapped)

    def copy_into(self, out: memoryview, place: int) -> None:
        """Fill `out` from `place`."""
        low = place * PAGE_BYTES
        out[:] = self._map[low : low + len(out)]

    def close(self) -> None:
        """Unmap it; closing twice is allowed."""
        self._map.release()
        self._mapped.close()
