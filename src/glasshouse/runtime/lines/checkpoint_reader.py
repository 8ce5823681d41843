"""Reads the checkpoint that a leg goes on from out of the store, and verifies it as sealed bytes.

Laws: nothing is used but what the digest in the release covers; silence is tried again, for as long as the run's lease
lets it; anything that is not the checkpoint ends the run. Source: spec/checkpoints.md sections 4 and 7.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

from glasshouse.errors import Code, FormatError, PackageError, PeerError
from glasshouse.package.streams import write_all
from glasshouse.runtime.gate.broker_client import BrokerClient
from glasshouse.runtime.loop import Loop
from glasshouse.wire.canonical import decode
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.lines.checkpoint import FRONT_BYTES, MAX_HEADER_BYTES, CheckpointHeader, PartRow, front_length
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import HEADER_RANK, MAX_DATA_BYTES, MAX_PIECE_BYTES, READ_PATH, ReadRequest
from glasshouse.wire.record import fixed, integer, octets

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 10.0
_PIECE = fixed(bytes=integer(1), data=octets(max_length=MAX_DATA_BYTES))


class CheckpointReader:
    """Asks for pieces, signed by the key that the release was given to; every method raises as `_piece`, too."""

    def __init__(self, loop: Loop, gate: BrokerClient, start: LineStart, *, run_id: str, key: SigningKey) -> None:
        self._loop, self._gate, self._start, self._run_id, self._key = loop, gate, start, run_id, key

    def header(self) -> CheckpointHeader:
        """Return the header; raises `PackageError`: `checkpoint-tampered`: it is not the one of the release."""
        whole, size = bytearray(), 1
        while len(whole) < size <= MAX_HEADER_BYTES:
            size, data = self._piece(HEADER_RANK, len(whole))
            whole += data
        if sha256(whole) != self._start.checkpoint:
            raise _tampered()
        try:
            return CheckpointHeader.parse(whole)
        except FormatError:
            raise _tampered() from None

    def front(self, rank: int, row: PartRow) -> bytes:
        """Return what stands before the chunks of a part; raises as `header`."""
        _, data = self._piece(rank, 0)
        front = data[: front_length(data[:FRONT_BYTES])]
        if sha256(front) != row.head_sha256:
            raise _tampered()
        return front

    def copy_chunks(self, rank: int, row: PartRow, front: bytes, out: BinaryIO) -> None:
        """Write the chunks of a part; raises as `header`, or `OSError` from `out`."""
        digest, done = hashlib.sha256(front), len(front)
        while done < row.bytes:
            size, data = self._piece(rank, done)
            done += len(data)
            if size != row.bytes or done > size:
                raise _tampered()
            digest.update(data)
            write_all(out, memoryview(data))
        if digest.digest() != row.sha256:
            raise _tampered()

    def _piece(self, rank: int, start: int) -> tuple[int, bytes]:
        """Return how long the whole is, and what it has from `start` on.

        Raises:
            RefusedError: the gate refused.
            PackageError: `checkpoint-tampered`: what came is no piece of it.
        """
        request = ReadRequest(line=self._start.id, rank=rank, run_id=self._run_id, start=start)
        body, wait_s = request.sign(self._key).encode(), _FIRST_RETRY_S
        while True:
            try:
                answer = self._gate.post(READ_PATH, body)
                break
            except PeerError:
                self._loop.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
        try:
            size, data = _PIECE.read(decode(answer, max_bytes=MAX_PIECE_BYTES), "answer")
        except FormatError:
            raise _tampered() from None
        if not data:
            raise _tampered()
        return size, data


def _tampered() -> PackageError:
    return PackageError(Code.CHECKPOINT_TAMPERED, "the store has another checkpoint than the one that was released")
