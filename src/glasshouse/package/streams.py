"""Exact reads and writes on binary streams, without a copy and with one answer for each failure."""

from __future__ import annotations

import io
import os
from _thread import allocate_lock  # `threading` costs the agent 7 ms uncompiled
from typing import BinaryIO

from glasshouse.errors import Code, PackageError


class Positioned:
    """Reads at offsets of a seekable stream, into the caller's buffer.

    A plain file is read with `preadv`, which shares no position: several threads, and processes
    that inherited the descriptor, may read at once. Any other stream is sought under a lock; use one
    `Positioned` for each such stream.

    The bytes are copied out before anything looks at them. A memory map would save the copy, but a
    host that changes the file between the cipher's two looks at it (authenticate, decrypt) could then
    make unauthenticated plaintext pass, and one that truncates it could end the process with SIGBUS.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._fd = _descriptor(stream)
        self._lock = allocate_lock()

    def read(self, offset: int, length: int) -> bytearray:
        """Return bytes from `offset` on; raises as `read_exactly`."""
        data = bytearray(length)
        self.read_exactly(offset, memoryview(data))
        return data

    def read_exactly(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on.

        Raises:
            PackageError: `package-truncated` when the stream ends before.
        """
        if self._fd is not None:
            self._read(offset, out)
            return
        with self._lock:
            self._stream.seek(offset)
            self._read(offset, out)

    def _read(self, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            if self._fd is not None:
                count = os.preadv(self._fd, [out[done:]], offset + done)
            else:
                count = self._stream.readinto(out[done:])  # type: ignore[attr-defined]  # typeshed: BinaryIO lacks it
            if not count:
                raise PackageError(Code.PACKAGE_TRUNCATED, "the file ends before its content does")
            done += count


def _descriptor(stream: BinaryIO) -> int | None:
    """Return the descriptor of a plain file; a wrapper's `fileno` may be that of other bytes (gzip)."""
    raw = stream.raw if isinstance(stream, io.BufferedReader) else stream
    if type(raw) is io.FileIO and hasattr(os, "preadv"):
        return raw.fileno()
    return None


def size_of(stream: BinaryIO) -> int:
    """Return a seekable stream's length."""
    return stream.seek(0, os.SEEK_END)


def write_all(out: BinaryIO, data: memoryview) -> None:
    """Write everything; an unbuffered file may take less at a time."""
    done = 0
    while done < len(data):
        count = out.write(data[done:])
        if not count:
            raise OSError("a stream that takes no more bytes")
        done += count


def as_bytes(destination: object) -> memoryview:
    """Return a writable view of single bytes over a caller's buffer, whatever its items are.

    Args:
        destination: bytearray, memoryview, numpy array or whatever else exports its memory.

    Raises:
        ValueError: it is read-only or not contiguous.
    """
    view = memoryview(destination)  # type: ignore[arg-type]  # PEP 688: no static name before 3.12
    if view.readonly or not view.c_contiguous:
        raise ValueError("a destination is writable and contiguous")
    if view.nbytes == 0:  # a shape with a zero in it cannot be cast
        return memoryview(bytearray())
    return view.cast("B")
