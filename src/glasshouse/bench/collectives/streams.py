"""What stands in for a group's keys in measurements only: a cipher that is none, and one that is counted.

Laws: an engine gets these from a caller who holds it (`Engine(streams=...)`); nothing that torch, a script or the
environment can say leads here. Counting takes time, so it is never on while something is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from glasshouse.collectives.frames import TAG_BYTES, Bytes, counted, set_counter
from glasshouse.collectives.keys import Lane
from glasshouse.collectives.memory import SealsFrames
from glasshouse.collectives.operations.party import Opens, Streams
from glasshouse.collectives.reduce import Arithmetic
from glasshouse.errors import Code, InternalError
from glasshouse.wire.aead import Suite

__all__ = ["Counted", "Plain", "Tally", "adding_counted"]


class _PlainSealer:
    """Copies a payload to where its ciphertext would be, with the same header."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def seal_into(self, header: bytearray | memoryview, plaintext: Bytes, out: bytearray | memoryview) -> None:
        size = len(plaintext)
        set_counter(header, size, self._next)
        self._next += 1
        out[:size] = plaintext


class _PlainOpener:
    """Copies a payload to where its plaintext would be."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def complete(self, header: bytearray | memoryview, size: int) -> None:
        set_counter(header, size, self._next)

    def open_into(self, header: Bytes, sealed: Bytes, out: bytearray | memoryview) -> None:
        size, counter = counted(header)
        if counter != self._next or len(sealed) != size + TAG_BYTES:
            raise InternalError(Code.INTERNAL, "a frame without AEAD out of its order")
        self._next += 1
        out[:] = sealed[:size]


class Plain:
    """Streams without AEAD: the same frames and copies, and neither secrecy nor authenticity."""

    def __init__(self) -> None:
        self._sealers: dict[tuple[Lane, int, Suite], _PlainSealer] = {}
        self._openers: dict[tuple[Lane, int, Suite, bool], _PlainOpener] = {}

    def sealer(self, lane: Lane, destination: int, suite: Suite = Suite.AES_256_GCM) -> SealsFrames:
        return self._sealers.setdefault((lane, destination, suite), _PlainSealer())

    def opener(self, lane: Lane, source: int, suite: Suite = Suite.AES_256_GCM, *, broadcast: bool = False) -> Opens:
        return self._openers.setdefault((lane, source, suite, broadcast), _PlainOpener())


@dataclass(slots=True)
class Tally:
    """What was counted so far on one rank, in calls, bytes and seconds."""

    seal_calls: int = 0
    open_calls: int = 0
    seal_bytes: int = 0
    open_bytes: int = 0
    seal_s: float = 0.0
    open_s: float = 0.0


class Counted:
    """Other streams, with every call counted.

    Args:
        inner: what seals and opens.
        tally: what grows.
    """

    def __init__(self, inner: Streams, tally: Tally) -> None:
        self._inner, self._tally = inner, tally
        self._sealers: dict[tuple[Lane, int, Suite], _CountedSealer] = {}
        self._openers: dict[tuple[Lane, int, Suite, bool], _CountedOpener] = {}

    def sealer(self, lane: Lane, destination: int, suite: Suite = Suite.AES_256_GCM) -> SealsFrames:
        if (lane, destination, suite) not in self._sealers:
            self._sealers[lane, destination, suite] = _CountedSealer(
                self._inner.sealer(lane, destination, suite), self._tally
            )
        return self._sealers[lane, destination, suite]

    def opener(self, lane: Lane, source: int, suite: Suite = Suite.AES_256_GCM, *, broadcast: bool = False) -> Opens:
        key = (lane, source, suite, broadcast)
        if key not in self._openers:
            self._openers[key] = _CountedOpener(
                self._inner.opener(lane, source, suite, broadcast=broadcast), self._tally
            )
        return self._openers[key]


class _CountedSealer:
    __slots__ = ("_inner", "_tally")

    def __init__(self, inner: SealsFrames, tally: Tally) -> None:
        self._inner, self._tally = inner, tally

    def seal_into(self, header: bytearray | memoryview, plaintext: Bytes, out: bytearray | memoryview) -> None:
        begin = time.thread_time()
        self._inner.seal_into(header, plaintext, out)
        self._tally.seal_s += time.thread_time() - begin
        self._tally.seal_calls += 1
        self._tally.seal_bytes += len(plaintext)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _CountedOpener:
    __slots__ = ("_inner", "_tally")

    def __init__(self, inner: Opens, tally: Tally) -> None:
        self._inner, self._tally = inner, tally

    def complete(self, header: bytearray | memoryview, size: int) -> None:
        self._inner.complete(header, size)

    def open_into(self, header: Bytes, sealed: Bytes, out: bytearray | memoryview) -> None:
        begin = time.thread_time()
        self._inner.open_into(header, sealed, out)
        self._tally.open_s += time.thread_time() - begin
        self._tally.open_calls += 1
        self._tally.open_bytes += len(out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextlib.contextmanager
def adding_counted(seconds: list[float]) -> Iterator[None]:
    """Append how long each addition of two chunks takes; for this process, and only within."""
    combine = Arithmetic.combine

    def timed(self: Arithmetic, left: Any, right: Any, out: Any) -> Any:
        begin = time.thread_time()
        found = combine(self, left, right, out)
        seconds.append(time.thread_time() - begin)
        return found

    Arithmetic.combine = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Arithmetic.combine = combine  # type: ignore[method-assign]
