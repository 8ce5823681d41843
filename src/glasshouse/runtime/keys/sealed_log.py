"""What the worker prints, sealed to the owner before it touches a disk or a terminal.

Laws: the bytes wait in secret memory, where no reader of this process finds them, are sealed from there and
zeroed; a segment is closed when it is full or old enough, so that the owner can follow a run; a worker
that prints without end fills the log's share and no more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from glasshouse.package.outputs import SealedOutput
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.keys.sealing import SealedFile, Sealing
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.loop import Loop, Timer, interrupted

SEGMENT_BYTES = 256 * 1024
TOTAL_BYTES = 256 << 20

_FIRST_WAIT_S = 2.0
_LONGEST_WAIT_S = 60.0
_READS_PER_TURN = 64
_DRAIN_S = 5.0
_FULL = b"\n[the log is full: what follows was not kept]\n"


class SealedLog:
    """Collects the worker's standard output and error, whose read ends it owns from now on.

    Text waits in `memory`, which is zero after `wipe`; `sealed` is called with each closed segment.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        loop: Loop,
        *,
        out: OutDir,
        sealing: Sealing,
        sealed: Callable[[SealedOutput], None],
    ) -> None:
        self._loop, self._out, self._sealing, self._sealed = loop, out, sealing, sealed
        self.memory = SecretMemory(SEGMENT_BYTES)
        self._buffer = self.memory.view
        self._filled = self._sequence = 0
        self._left = TOTAL_BYTES
        self._wait_s = _FIRST_WAIT_S
        self._timer: Timer | None = None
        self._open = set(descriptors)
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            loop.watch(descriptor, partial(self._read, descriptor))

    def finish(self) -> None:
        """Take what is still in the streams, within some seconds, close them and seal the last segment."""
        until_s = time.monotonic() + _DRAIN_S
        for descriptor in list(self._open):
            while descriptor in self._open and time.monotonic() < until_s and self._read(descriptor):
                continue
        self.close()
        self.flush()

    def close(self) -> None:
        """Close the streams; what is buffered stays until `flush` or `wipe`."""
        for descriptor in list(self._open):
            self._end(descriptor)
        if self._timer is not None:
            self._timer.cancel()

    def flush(self) -> None:
        """Seal what is buffered as a segment, and zero it whether or not that succeeds; raises `RunError`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._filled:
            return
        filled, self._filled = self._filled, 0
        try:
            file = SealedFile(
                self._out,
                self._sealing,
                folder="log",
                sequence=self._sequence,
                name=f"log-{self._sequence:04d}",
                kind="log",
                chunk_bytes=SEGMENT_BYTES,
            )
            file.update(self._buffer[:filled])
            segment = file.finish()
        finally:
            self.memory.wipe()
        self._sequence += 1
        self._sealed(segment)

    def wipe(self) -> None:
        """Zero the buffer."""
        self._filled = 0
        self.memory.wipe()

    def _read(self, descriptor: int) -> bool:
        """Read for one turn; return whether there may be more."""
        for _ in range(_READS_PER_TURN):
            try:
                with interrupted():
                    count = os.readv(descriptor, [self._buffer[self._filled :]])
            except BlockingIOError:
                return False
            except OSError:
                count = 0
            if not count:
                self._end(descriptor)
                return False
            self._take(count)
        return True

    def _take(self, count: int) -> None:
        if not self._left:
            return  # read and dropped, for a full stream would stop the worker; the next read overwrites it
        kept = min(count, self._left)
        self._filled += kept
        self._left -= kept
        if not self._left:
            self.flush()
            self._buffer[: len(_FULL)] = _FULL
            self._filled = len(_FULL)
            self.flush()
        elif self._filled == SEGMENT_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.after(self._wait_s, self.flush)
            # Early segments come soon, for the owner who watches; later ones cost less.
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)

    def _end(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        self._loop.unwatch(descriptor)
        with interrupted():
            os.close(descriptor)
