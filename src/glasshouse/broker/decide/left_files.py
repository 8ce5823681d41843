"""Files that a run left, on the gate's disk: what each must hold to be what was countersigned for the run."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.events import MAX_EVENT_BYTES
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, CountersignedHead, Head
from glasshouse.evidence.receipt import Receipt
from glasshouse.evidence.stored import ANY_NAME
from glasshouse.wire.crypto import sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.merkle import leaf_hash, root_of


def is_stored(path: Path) -> bool:
    """Return whether a store can have made this file, whole or in part."""
    name = path.name.removesuffix(".part").replace("-", "/")
    return ANY_NAME.fullmatch(name) is not None and stat.S_ISREG(path.lstat().st_mode)


def receipt_in(path: Path, expected_sha256: bytes | None = None) -> Receipt | None:
    """Return the receipt in a stored bundle; None for one that is none, or has another digest."""
    try:
        envelope = Bundle.parse(path.read_bytes()).receipt
        found = Receipt.parse(envelope.payload)
    except (OSError, FormatError):
        return None
    return found if expected_sha256 in (None, sha256(envelope.encode())) else None


def named_outputs(receipt: Receipt) -> dict[str, tuple[int, bytes]]:
    """Return size and digest of each output that a receipt names, by its file's name."""
    return {output.file_name: (output.sealed_bytes, output.sealed_sha256) for output in receipt.outputs}


def is_log(path: Path, head: Head) -> bool:
    """Return whether a file is the log that a head covers: all of it, line by line."""

    def leaves(log: BinaryIO) -> Iterator[bytes]:
        while line := log.readline(MAX_EVENT_BYTES + 2):
            if not line.endswith(b"\n"):
                raise FormatError(Code.LOG_INVALID, "no line of a log")
            yield leaf_hash(line[:-1])

    try:
        with path.open("rb") as log:
            return root_of(leaves(log)) == (head.size, head.root)
    except (OSError, FormatError):
        return False


def are_heads(path: Path, last: Envelope, *, run_id: str, broker_public: bytes, evidence_public: bytes) -> bool:
    """Return whether each line is a head that was countersigned for the run, in their order, to the last one."""
    size, end = 0, None
    try:
        with path.open("rb") as heads:
            while line := heads.readline(MAX_COUNTERSIGNED_HEAD_BYTES + 2):
                one = CountersignedHead.parse(
                    line.removesuffix(b"\n"), broker_public=broker_public, evidence_public=evidence_public
                )
                # A disk that was full can lack lines; none comes twice, or of another run with this key.
                if not line.endswith(b"\n") or one.previous_size < size or one.head.run_id != run_id:
                    return False
                size, end = one.head.size, one.envelope
    except (OSError, FormatError):
        return False
    return end == last
