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
    from glasshouse.package.chunks import SealedAsset

__all__ = ["Hooks", "TimedChannel", "TimedInputs"]


class Hooks:
    """How long one thread, the one that trains, has waited in its channel and its inputs.

    Attributes:
        ns: so far.
        shown: what a profiler sees of each wait; None where there is no profiler.
    """

    def __init__(self) -> None:
        self.ns = 0
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


class TimedChannel:
    """A channel whose sending and delivering is timed."""

    def __init__(self, channel: Channel, hooks: Hooks) -> None:
        self._channel, self._hooks = channel, hooks

    @property
    def stopping(self) -> bool:
        return self._channel.stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._channel.stopping = value

    def send(self, message: Message) -> None:
        with self._hooks:
            self._channel.send(message)

    def output(self, header: Message, source: BinaryIO) -> str:
        with self._hooks:
            return self._channel.output(header, source)


class TimedInputs:
    """Inputs whose reading, and so decrypting, is timed."""

    def __init__(self, inputs: Inputs, hooks: Hooks) -> None:
        self._inputs, self._hooks = inputs, hooks

    @property
    def names(self) -> tuple[str, ...]:
        return self._inputs.names

    def size(self, name: str) -> int:
        return self._inputs.size(name)

    def open(self, name: str) -> BinaryIO:
        with self._hooks:
            return cast(BinaryIO, io.BufferedReader(_Timed(self._inputs.open(name), self._hooks), 1 << 16))

    def read_into(self, name: str, destination: Buffer, offset: int) -> int:
        with self._hooks:
            return self._inputs.read_into(name, destination, offset)

    def sealed(self, name: str) -> SealedAsset | None:
        return self._inputs.sealed(name)


class _Timed(io.RawIOBase):
    """A stream that is read under `Hooks`; lines and small reads are cut out of larger ones above it."""

    def __init__(self, stream: BinaryIO, hooks: Hooks) -> None:
        super().__init__()
        self._stream, self._hooks = stream, hooks

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, destination: Buffer) -> int:  # type: ignore[override]
        with self._hooks:
            return int(self._stream.readinto(destination))  # type: ignore[attr-defined]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self._stream.close()
        super().close()
