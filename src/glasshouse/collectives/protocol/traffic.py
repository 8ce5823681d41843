"""Seals and opens frames, one at a time, by the keys of a group (spec/sealed-collectives.md, section 6).

Laws: the n-th frame of a stream has counter n, and a receiver takes no other: what was dropped, repeated, moved or put
in fails at once. The counter is the nonce, lives in the one sealer of its key, and never goes back. What fails to open
is zeroed, and its stream opens nothing more.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from glasshouse.collectives.protocol.group_keys import ALL, Lane, Schedule, forget_in_children, next_key
from glasshouse.collectives.protocol.headers import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    SUITES,
    VERSION,
    Bytes,
    FrameKind,
    counted,
    payload_bytes,
    set_counter,
)
from glasshouse.errors import Code, CollectiveError
from glasshouse.wire.crypto import KEY_BYTES, TAG_BYTES, Suite, zero

_KINDS = frozenset(FrameKind)
REKEY_AFTER = 1 << 24  # frames under one key: far below the 2^32 that AES-GCM bears


class Reserved(NamedTuple):
    """The parameters of one frame for a cipher of the caller's own; never used for a second frame."""

    key: bytes
    nonce: bytes
    associated_data: bytes


class _Stream:
    """One traffic key, ratcheted as frames go by."""

    def __init__(self, *, suite: Suite, key: bytearray, bound: bytes, rekey_after: int) -> None:
        if len(key) != KEY_BYTES or not 1 <= rekey_after <= REKEY_AFTER:
            raise ValueError(f"a stream takes a key of 32 bytes and bears at most {REKEY_AFTER} frames a key")
        self.suite = suite
        self._bound = bound
        self._every = self._limit = rekey_after
        self._lock = threading.Lock()
        self._forgotten = False
        self._key = key
        self._cipher: AESGCM | ChaCha20Poly1305 | None = _cipher(suite, key)
        forget_in_children(self)

    def forget(self) -> None:
        """Drop the key; nothing is sealed or opened any more.

        Takes no lock: in a forked child it may be held by a thread that is not there. Users of the key check the flag
        afterwards, which is set before the key is zeroed.
        """
        self._forgotten = True
        self._cipher = None
        zero(self._key)

    def __reduce__(self) -> str:
        raise TypeError("keys are not copied")

    def _at(self, counter: int) -> AESGCM | ChaCha20Poly1305:
        """Return the cipher for one frame."""
        if counter >= self._limit and self._cipher is not None:
            with self._lock:
                while counter >= self._limit and not self._forgotten:
                    following = bytearray(next_key(self._key, self.suite))
                    zero(self._key)
                    self._key, self._cipher = following, _cipher(self.suite, following)
                    self._limit += self._every
                if self._forgotten:
                    self.forget()  # what was derived from a key that was being zeroed
        cipher = self._cipher
        if self._forgotten or cipher is None:
            raise CollectiveError(
                Code.COLLECTIVE_ABORTED,
                "this group's keys are gone: it was closed, it failed, or this process was forked from a rank",
            )
        return cipher

    def _reserved(self, counter: int, header: Bytes) -> Reserved:
        if self.suite is not Suite.CHACHA20_POLY1305:
            raise ValueError("only keys of ChaCha20-Poly1305 are given to another cipher")
        self._at(counter)
        reserved = Reserved(bytes(self._key), counter.to_bytes(12, "big"), self._bound + header)
        self._at(counter)  # the key may have been zeroed while it was copied
        return reserved


class FrameSealer(_Stream):
    """Seals the frames of one stream, each under the next counter. Made once for its key, by `Traffic`."""

    def __init__(self, *, suite: Suite, key: bytearray, bound: bytes, rekey_after: int = REKEY_AFTER) -> None:
        super().__init__(suite=suite, key=key, bound=bound, rekey_after=rekey_after)
        self._counter = count()

    def seal_into(self, header: bytearray | memoryview, plaintext: Bytes, out: bytearray | memoryview) -> None:
        """Seal one frame's payload, of at most 2^24 bytes, and write its length and counter into its packed header.

        `out` is exactly `TAG_BYTES` longer than the plaintext, and does not overlap it.
        """
        size = len(plaintext)
        if size > MAX_PAYLOAD_BYTES or len(out) != size + TAG_BYTES or len(header) != HEADER_BYTES:
            raise ValueError("buffers that are not a frame's")
        counter = next(self._counter)
        cipher = self._at(counter)
        set_counter(header, size, counter)
        cipher.encrypt_into(counter.to_bytes(12, "big"), plaintext, self._bound + header, out)

    def reserve(self, header: bytearray | memoryview, size: int) -> Reserved:
        """Reserve the next frame for a cipher of the caller's own, and complete its header.

        Frames are sent in the order in which they were reserved and sealed.

        Raises:
            ValueError: a suite other than ChaCha20-Poly1305.
        """
        if not 0 <= size <= MAX_PAYLOAD_BYTES or len(header) != HEADER_BYTES:
            raise ValueError("not a frame")
        counter = next(self._counter)
        set_counter(header, size, counter)
        return self._reserved(counter, header)


class FrameOpener(_Stream):
    """Opens the frames of one stream, in order and each once. Made once for its key, by `Traffic`.

    `source` is the rank that sealed them.
    """

    def __init__(
        self, *, suite: Suite, key: bytearray, bound: bytes, source: int, called: str, rekey_after: int = REKEY_AFTER
    ) -> None:
        super().__init__(suite=suite, key=key, bound=bound, rekey_after=rekey_after)
        self.source = source
        self._called = called
        self._next = 0

    def complete(self, header: bytearray | memoryview, size: int) -> None:
        """Write into an expected header the length `size` and the counter that the next frame must have.

        A received header that equals it byte for byte needs no other check before `open_into`.
        """
        set_counter(header, size, self._next)

    def open_into(self, header: Bytes, sealed: Bytes, out: bytearray | memoryview) -> None:
        """Verify and open the next frame into `out`.

        Header, ciphertext and tag are as received, in memory that no other process writes.

        Raises:
            CollectiveError: `collective-tampered`; `out` is zero then, and every later call fails too.
        """
        size, counter = counted(header)
        if counter != self._next or size != len(out) or len(sealed) != size + TAG_BYTES:
            zero(out)
            raise self._refused(counter == self._next)
        cipher = self._at(counter)
        try:
            cipher.decrypt_into(counter.to_bytes(12, "big"), sealed, self._bound + header, out)
        except InvalidTag:
            zero(out)  # the library leaves unverified plaintext behind
            raise self._refused(True) from None
        self._next = counter + 1

    def admit(self, header: Bytes) -> Reserved:
        """Return the parameters to open the next frame with, and go on to the one after.

        The caller compares the tag, and calls `refuse` with its (zeroed) output when it is another.

        Raises:
            CollectiveError: `collective-tampered`, when the frame is not the next one.
            ValueError: a suite other than ChaCha20-Poly1305.
        """
        size, counter = counted(header)
        if counter != self._next or size > MAX_PAYLOAD_BYTES:
            raise self._refused(counter == self._next)
        reserved = self._reserved(counter, header)
        self._next = counter + 1
        return reserved

    def refuse(self, header: Bytes) -> CollectiveError:
        """End the stream because an admitted frame did not open; return the error to raise."""
        return self._refused(counted(header)[1] == self._next - 1)

    def _refused(self, due: bool) -> CollectiveError:
        """End the stream; return the error for a frame that was the next one, or was not."""
        self.forget()
        what = "a frame was changed on the way" if due else "frames were dropped, repeated, reordered or put in"
        message = f"what came from {self._called} is not what it sealed: {what}"
        return CollectiveError(Code.COLLECTIVE_TAMPERED, message, rank=self.source)


class Traffic:
    """Every sealer and opener of one rank in one group, each made once, from keys that are confirmed.

    `rekey_after` is the number of frames under one key, the same on all ranks.
    """

    def __init__(self, schedule: Schedule, *, rekey_after: int = REKEY_AFTER) -> None:
        self.membership = schedule.membership
        self._schedule = schedule
        self._rekey_after = rekey_after
        self._sealers: dict[tuple[Lane, int, Suite], FrameSealer] = {}
        self._openers: dict[tuple[Lane, int, bool, Suite], FrameOpener] = {}

    def sealer(self, lane: Lane, destination: int, suite: Suite = Suite.AES_256_GCM) -> FrameSealer:
        """Return the sealer for frames to one rank, or on the collective lane to `ALL` the others."""
        if (sealer := self._sealers.get((lane, destination, suite))) is None:
            key = self._schedule.traffic_key(suite, lane, self.membership.rank, destination)
            sealer = FrameSealer(suite=suite, key=key, bound=self._schedule.transcript, rekey_after=self._rekey_after)
            self._sealers[lane, destination, suite] = sealer
        return sealer

    def opener(
        self, lane: Lane, source: int, suite: Suite = Suite.AES_256_GCM, *, broadcast: bool = False
    ) -> FrameOpener:
        """Return the opener for frames from one rank: those for this rank alone, or those for all."""
        if (opener := self._openers.get((lane, source, broadcast, suite))) is None:
            opener = FrameOpener(
                suite=suite,
                key=self._schedule.traffic_key(suite, lane, source, ALL if broadcast else self.membership.rank),
                bound=self._schedule.transcript,
                source=source,
                called=self.membership.called(source),
                rekey_after=self._rekey_after,
            )
            self._openers[lane, source, broadcast, suite] = opener
        return opener

    def route(self, lane: Lane, source: int, header: Bytes) -> FrameOpener:
        """Return the opener for a received header.

        Raises:
            CollectiveError: `collective-tampered`, no frame of the connection with `source` has such a header.
        """
        payload_bytes(header)
        suite = SUITES.get(header[2])
        destination = int.from_bytes(header[10:12], "big")
        for_all = destination == ALL and lane is Lane.COLLECTIVE
        if (
            suite is None
            or header[0] != VERSION
            or header[1] not in _KINDS
            or int.from_bytes(header[8:10], "big") != source
            or not (for_all or destination == self.membership.rank)
        ):
            what = f"on the connection with {self.membership.called(source)} came what it never sends there"
            raise CollectiveError(Code.COLLECTIVE_TAMPERED, what, rank=source)
        return self.opener(lane, source, suite, broadcast=for_all)

    def forget(self) -> None:
        """Drop every key."""
        for stream in (*self._sealers.values(), *self._openers.values()):
            stream.forget()
        self._schedule.forget()


def _cipher(suite: Suite, key: bytearray) -> AESGCM | ChaCha20Poly1305:
    return AESGCM(key) if suite is Suite.AES_256_GCM else ChaCha20Poly1305(key)
