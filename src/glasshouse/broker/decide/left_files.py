"""Files that a run left, on the gate's disk: what each must hold to be what was countersigned for the run."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from glasshouse.broker.store.key_file import read_private_file, write_private_file
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.events import MAX_EVENT_BYTES
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, CountersignedHead, Head
from glasshouse.evidence.receipt import Receipt
from glasshouse.evidence.stored import ANY_NAME
from glasshouse.wire.crypto import sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.merkle import leaf_hash, root_of

_MARK = "gate.public"  # in the folder: the key of the gate whose store it is
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_own(folder: Path, public: bytes) -> None:
    """Mark an empty folder with this gate's key; raise `UsageError` for one that has anything, and not this mark."""
    mark = folder / _MARK
    if not any(folder.iterdir()):
        write_private_file(mark, public.hex().encode())
    hint = "files in a store are removed: name a folder that is empty or does not exist yet"
    try:
        found = read_private_file(mark, max_bytes=128, what="mark of the store")
    except UsageError as error:
        if error.code is not Code.FILE_MISSING:
            raise
        raise UsageError(Code.USAGE, f"{folder} has files, and is no gate's store", hint=hint) from None
    if found != public.hex().encode():
        raise UsageError(Code.USAGE, f"{folder} is the store of another gate, by its {_MARK}", hint=hint)


def part_of(path: Path) -> Path:
    """Return where a file lies until it is whole."""
    return path.with_name(f"{path.name}.part")


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


def unwritable(error: OSError) -> UsageError:
    """Return the error of a store that cannot be written."""
    if error.errno in _FULL:
        return UsageError(Code.DISK_FULL, "the gate's store has no room left on its disk")
    return UsageError(Code.USAGE, f"the gate's store cannot be written: {error.strerror}")
