"""A run's sealed log, decrypted for its owner: what the training wrote to standard output and error."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

from glasshouse.errors import Code, PackageError
from glasshouse.evidence.events import EventType
from glasshouse.jobs.files import open_regular
from glasshouse.jobs.follow import Tail
from glasshouse.jobs.rundir import RunFolder
from glasshouse.package.outputs import open_output
from glasshouse.wire.hpke import RecipientKey

__all__ = ["Segment", "segments"]

_KIND = "log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of the log.

    Attributes:
        sequence: its number.
        name: what it is called inside; says which stream it is of.
        data: what was written.
    """

    sequence: int
    name: str
    data: bytes


def segments(folder: RunFolder, *, sealing: RecipientKey, manifest_sha256: bytes) -> Iterator[Segment]:
    """Yield the segments that the event log names, in order.

    Args:
        folder: the run's; it may still be going on.
        sealing: the owner's sealing key, or a backup recipient's.
        manifest_sha256: of the run's package.

    Raises:
        PackageError: `output-unnamed` for a segment that is not the one that the event log names,
            `output-tampered` for one that does not open or is not there.
        VerificationError: `log-invalid`.
    """
    tail = Tail(folder.events)
    try:
        events = [event for event in tail.read() if event.type is EventType.SEGMENT]
    finally:
        tail.close()
    for event in events:
        number = int(str(event.body["sequence"]))
        path = folder.out / "log" / f"{number:04d}.sealed"
        try:
            stream = open_regular(path)
        except OSError:
            raise PackageError(Code.OUTPUT_TAMPERED, f"log segment {number} is named but not there") from None
        with stream:
            yield _segment(stream, number, str(event.body["sealed_sha256"]), folder.run_id, sealing, manifest_sha256)


def _segment(
    stream: BufferedReader, number: int, sealed_sha256: str, run_id: str, sealing: RecipientKey, manifest_sha256: bytes
) -> Segment:
    if hashlib.file_digest(stream, "sha256").hexdigest() != sealed_sha256:
        raise PackageError(Code.OUTPUT_UNNAMED, f"log segment {number} is not the one that the event log names")
    stream.seek(0)
    opened = open_output(stream, sealing, run_id=run_id, manifest_sha256=manifest_sha256)
    if opened.kind != _KIND or opened.sequence != number:
        raise PackageError(Code.OUTPUT_TAMPERED, f"log segment {number} is something else")
    plain = io.BytesIO()
    opened.copy_to(plain)
    if opened.sealed_sha256 != bytes.fromhex(sealed_sha256):
        raise PackageError(Code.OUTPUT_UNNAMED, f"log segment {number} was exchanged while it was read")
    return Segment(sequence=number, name=opened.name, data=plain.getvalue())
