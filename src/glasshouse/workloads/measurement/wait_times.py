"""How long a measured worker waits in its channel and its inputs: what protection costs it, by direct accounting."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, BinaryIO, cast

from glasshouse.task.channel import Channel, Message
from glasshouse.task.inputs import Buffer, Inputs

if TYPE_CHECKING:
    from glasshouse.package.streams import SealedAsset


class WaitTimes:
    """How long one thread, the one that trains, has waited in its channel and its inputs."""

    def __init__(self) -> None:
        self.ns = 0
        # Makes what a profiler sees of each wait.
        self.shown: Callable[[], AbstractContextManager[object]] | None = None
        self._thread = threading.get_ident()
        self._wait: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == self._thread:
            self.ns -= time.perf_counter_ns()
            if self.shown is not None:
                self._wait = self.shown()
                self._wait.__enter__()

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self.ns += time.perf_counter_ns()
            if self._wait is not None:
                self._wait.__exit__(None, None, None)
                self._wait = None


class TimedChannel(Channel):
    """A channel whose sending and delivering is timed."""

    def __init__(self, channel: Channel, waits: WaitTimes) -> None:
        self._channel, self._waits = channel, waits

    @property
    def stopping(self) -> bool:  # type: ignore[override]  # is the other's
        """Whether the owner ended the job."""
        return self._channel.stopping

    def send(self, message: Message) -> None:
        with self._waits:
            self._channel.send(message)

    def output(self, header: Message, source: BinaryIO) -> str:
        with self._waits:
            return self._channel.output(header, source)


class TimedInputs(Inputs):
    """Inputs whose reading, and so decrypting, is timed."""

    def __init__(self, inputs: Inputs, waits: WaitTimes) -> None:
        self._inputs, self._waits = inputs, waits

    @property
    def names(self) -> tuple[str, ...]:
        return self._inputs.names

    def size(self, name: str) -> int:
        return self._inputs.size(name)

    def open(self, name: str) -> BinaryIO:
        with self._waits:
            return cast(BinaryIO, io.BufferedReader(_TimedStream(self._inputs.open(name), self._waits), 1 << 16))

    def read_into(self, name: str, destination: Buffer, offset: int) -> int:
        with self._waits:
            return self._inputs.read_into(name, destination, offset)

    def sealed(self, name: str) -> SealedAsset | None:
        return self._inputs.sealed(name)


class _TimedStream(io.RawIOBase):
    """A stream that is read under `WaitTimes`; lines and small reads are cut out of larger ones above it."""

    def __init__(self, stream: BinaryIO, waits: WaitTimes) -> None:
        super().__init__()
        self._stream, self._waits = stream, waits
        self.seek, self.tell = stream.seek, stream.tell  # type: ignore[method-assign]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, destination: Buffer) -> int:  # type: ignore[override]
        with self._waits:
            return int(self._stream.readinto(destination))  # type: ignore[attr-defined]

    def close(self) -> None:
        self._stream.close()
        super().close()
