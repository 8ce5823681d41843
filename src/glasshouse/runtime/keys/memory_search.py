"""Searches this process's own memory for residue patterns, without leaving one behind.

Every page that the process could have written is copied by `process_vm_readv` (/proc/self/mem is closed to a
process that is not dumpable) into one reused buffer, searched there by libc, and wiped. Patterns stay where
they are, in secret memory: only their addresses are used. Laws: the buffer and the patterns' own region are
not searched; a page that could not be read is counted, never skipped in silence.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.syscalls import KernelError

# Fits a core's second-level cache, so that many needles cost one trip to memory.
CHUNK_BYTES = 1 << 20
# Untouched pages between touched ones that are read along, for fewer system calls.
_GAP = bytes(16)
# Time and calls, the same in every process.
_KERNELS_OWN = (b"[vvar", b"[vdso", b"[vsyscall")


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a search of memory came to."""

    found: frozenset[int]  # indices of the needles that were found
    searched_bytes: int  # how much was read
    unreadable: int  # how many regions could not be read


@dataclass(frozen=True, kw_only=True, slots=True)
class _Region:
    """A range of addresses; `sparse` when its untouched pages can be left out."""

    start: int
    end: int
    sparse: bool


def search_self(needles: Iterable[memoryview], *, own: Sequence[SecretMemory], kernel: Kernel = REAL) -> Search:
    """Search all memory of this process that is not a plain copy of a file; raises `OSError` without its map.

    Args:
        needles: writable views into secret memory.
        own: the secret memory that this process maps: the patterns' and others. It is left out; the caller asks each
            for `is_zero`.
    """
    with closing(Finder(needles, kernel=kernel)) as finder:
        left_out = [(finder.place, finder.place + len(finder.view))]
        left_out += [(secret.address, secret.address + secret.mapped_bytes) for secret in own]
        unreadable = 0
        if finder.needles:
            for region in _without(_written_regions(kernel), left_out):
                pieces = _present(region, kernel) if region.sparse else [region]
                unreadable += sum(not _search_region(finder, piece, kernel) for piece in pieces)
        return Search(found=frozenset(finder.found), searched_bytes=finder.searched_bytes, unreadable=unreadable)


class Finder:
    """Searches what is put into its buffer `view`, piece by piece; `close` wipes the buffer.

    `found` has the indices of those of the `needles` (how many there are) that were found so far.
    """

    def __init__(self, needles: Iterable[memoryview], *, kernel: Kernel = REAL) -> None:
        self._kernel = kernel
        # These hold the needles' memory in place; only addresses are handed out.
        self._anchors = [(ctypes.c_char * len(needle)).from_buffer(needle) for needle in needles]
        self._sizes = [(ctypes.addressof(anchor), len(anchor)) for anchor in self._anchors]
        self.overlap = max((len(anchor) for anchor in self._anchors), default=1) - 1
        self._map = mmap.mmap(-1, CHUNK_BYTES + self.overlap, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._held = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        self.place = ctypes.addressof(self._held)
        self.view = memoryview(self._map)
        self.needles = len(self._anchors)
        self.found: set[int] = set()
        self.searched_bytes = 0

    def search(self, count: int) -> bool:
        """Search the first `count` bytes of the buffer; returns whether anything was found so far."""
        for index, (needle, size) in enumerate(self._sizes):
            if index not in self.found and self._kernel.memmem(self.place, count, needle, size) is not None:
                self.found.add(index)
        self.searched_bytes += count
        return bool(self.found)

    def close(self) -> None:
        ctypes.memset(self.place, 0, len(self.view))
        self.view.release()
        del self._held
        self._map.close()
        self._anchors.clear()


def _search_region(finder: Finder, region: _Region, kernel: Kernel) -> bool:
    """Search one region; returns whether all of it could be read."""
    at, pid = region.start, os.getpid()
    while True:
        wanted = min(len(finder.view), region.end - at)
        try:
            count = kernel.process_vm_readv(pid, at, wanted, finder.place)
        except KernelError as error:
            if error.errno not in (errno.EFAULT, errno.ENOMEM):
                raise
            return False
        finder.search(count)
        if at + count >= region.end:
            return True
        # The next piece begins before the end of this one; after a short read, at what was not read.
        at += count - finder.overlap if count == wanted else count


def _written_regions(kernel: Kernel) -> list[_Region]:
    """Return the regions that hold anything this process could have written, private neighbours joined."""
    found: list[_Region] = []
    start = end = 0
    shared = file = False
    sizes: dict[bytes, int] = {}
    for line in kernel.read("/proc/self/smaps").splitlines():
        word = line.split(b" ", 1)[0]
        if b"-" in word:
            fields = line.split(None, 5)
            start, end = (int(bound, 16) for bound in word.split(b"-"))
            shared, file = fields[1].endswith(b"s"), fields[4] != b"0" or fields[-1].startswith(_KERNELS_OWN)
            sizes = {}
        elif word in (b"Rss:", b"Swap:", b"Anonymous:"):
            sizes[word] = int(line.split()[1])
        elif word == b"VmFlags:":
            # Untouched memory holds nothing, and the unwritten pages of a file hold the file.
            swapped = sizes.get(b"Swap:", 0)
            if swapped or sizes.get(b"Anonymous:", 0) or (sizes.get(b"Rss:", 0) and (shared or not file)):
                # `mincore` does not see pages in swap, and secret memory must not be left out for being odd.
                region = _Region(start=start, end=end, sparse=not shared and not swapped)
                if region.sparse and found and found[-1].sparse and found[-1].end == start:
                    region = replace(region, start=found.pop().start)
                found.append(region)
    return found


def _present(region: _Region, kernel: Kernel) -> list[_Region]:
    """Return the parts of a region that are in memory; an arena of malloc is mostly not."""
    try:
        pages = kernel.mincore(region.start, region.end - region.start)
    except KernelError:
        return [region]
    found: list[_Region] = []
    first = pages.find(b"\1")
    while first >= 0:
        last = pages.find(_GAP, first)
        last = len(pages) if last < 0 else last
        start = region.start + first * mmap.PAGESIZE
        found.append(replace(region, start=start, end=region.start + last * mmap.PAGESIZE))
        first = pages.find(b"\1", last)
    return found


def _without(regions: list[_Region], left_out: list[tuple[int, int]]) -> Iterable[_Region]:
    """Cut address ranges out of regions: the kernel may have joined a buffer with its neighbours."""
    for region in regions:
        pieces = [region]
        for low, high in left_out:
            pieces = [
                replace(piece, start=start, end=end)
                for piece in pieces
                for start, end in ((piece.start, min(piece.end, low)), (max(piece.start, high), piece.end))
                if start < end
            ]
        yield from pieces
