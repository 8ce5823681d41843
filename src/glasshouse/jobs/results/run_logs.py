"""A run's sealed log, decrypted for its owner: what the training wrote to standard output and error.

The sealing key is public: a segment counts only when the event log names it, and the event log only when the run's
receipt vouches for it. Without such a receipt the machine's host may have written the log: it is shown as not vouched
for.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from glasshouse.errors import Code, GlasshouseError, PackageError, VerificationError
from glasshouse.evidence.events import Event, EventType
from glasshouse.jobs.owner.home import is_there, open_regular
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise.follow import Tail
from glasshouse.jobs.verify.conclusion import read_receipt
from glasshouse.jobs.verify.run_files import segment_name, verify_log_in
from glasshouse.jobs.verify.verdict import Status, Verdict, verify_bundle
from glasshouse.package.outputs import open_output
from glasshouse.task.uncollected import Uncollected
from glasshouse.wire.crypto import RecipientKey

_KIND = "log"
_POLL_S = 0.25
# What a worker writes last may begin in the segment before the last; a log can be long.
_LAST_SEGMENTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of the log."""

    sequence: int  # its number
    name: str  # its sealed name, which has the stream
    data: bytes  # what was written


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """The segments that a run's event log names."""

    events: Sequence[Event]  # one for each, in order
    vouched: bool  # whether the receipt of an attested run, countersigned by the broker, vouches for this log
    why: str = ""  # why not, for people; empty when it does


def named_segments(folder: RunFolder, *, owner_signing: bytes) -> Named:
    """Return the segments that a run's event log names, verified against the run's receipt once there is one.

    Raises:
        VerificationError: `log-invalid` or `state-illegal` for a log that is not the one that the receipt's final
            head names, is no log at all or cannot be read.
        UsageError: `file-missing` for a log that cannot be read, where there is no receipt yet.
    """
    verdict, why = _receipt(folder, owner_signing)
    if verdict is None:
        with contextlib.closing(Tail(folder.events)) as tail:
            events = [event for event in tail.read() if event.type is EventType.SEGMENT]
        return Named(events=events, vouched=False, why=why)
    # Outside of any `try`: a log that a receipt contradicts is refused.
    log, _heads = verify_log_in(verdict.chain, folder.out)
    assert log is not None  # noqa: S101 - it must be there
    if verdict.status is Status.INCOMPLETE:
        why = "its receipt is incomplete: no broker vouches for the log"
    # What was verified is what is used: the file is not read a second time.
    return Named(events=log.of(EventType.SEGMENT), vouched=not why, why=why)


def _receipt(folder: RunFolder, owner_signing: bytes) -> tuple[Verdict | None, str]:
    """Return the verdict on a run's receipt, or why it has none that verifies."""
    if not is_there(folder.receipt):
        return None, "there is no receipt (yet)"
    try:
        return verify_bundle(read_receipt(folder), owner=owner_signing, run_id=folder.run_id), ""
    except GlasshouseError as error:
        return None, f"its receipt does not hold: {error}"


def segments(folder: RunFolder, events: Sequence[Event], *, sealing: RecipientKey) -> Iterator[Segment]:
    """Yield the segments that `named_segments` found, in order, opened with the owner's sealing key or a backup's.

    Raises:
        PackageError: `output-unnamed` for a segment that is not the one that the event log names,
            `output-tampered` for one that does not open or is missing.
        UsageError: a damaged record of the run.
    """
    manifest_sha256 = bytes.fromhex(folder.load().manifest_sha256)
    for event in events:
        number = int(str(event.body["sequence"]))
        path = folder.out / segment_name(event)
        try:
            stream = open_regular(path)
        except OSError:
            raise PackageError(Code.OUTPUT_TAMPERED, f"log segment {number} is named but not there") from None
        sealed = bytes.fromhex(str(event.body["sealed_sha256"]))
        with stream:
            if hashlib.file_digest(stream, "sha256").digest() != sealed:
                raise PackageError(Code.OUTPUT_UNNAMED, f"log segment {number} is not the one that the event log names")
            stream.seek(0)
            opened = open_output(stream, sealing, run_id=folder.run_id, manifest_sha256=manifest_sha256)
            if opened.kind != _KIND or opened.sequence != number:
                raise PackageError(Code.OUTPUT_TAMPERED, f"log segment {number} is something else")
            plain = io.BytesIO()
            opened.copy_to(plain)
        if opened.sealed_sha256 != sealed:
            raise PackageError(Code.OUTPUT_UNNAMED, f"log segment {number} was exchanged while it was read")
        yield Segment(sequence=number, name=opened.name, data=plain.getvalue())


def follow(folder: RunFolder, over: Callable[[], bool], *, sealing: RecipientKey) -> Iterator[tuple[Event, Segment]]:
    """Yield a machine's segments, each with the event that names it, until its run is over; raises as `segments`."""
    with contextlib.closing(Tail(folder.events)) as tail:
        while True:
            # Looked up before the log is read, so that all of a run that has ended is read.
            ended = over()
            for event in tail.read():
                if event.type is EventType.SEGMENT:
                    (one,) = segments(folder, [event], sealing=sealing)
                    yield event, one
            if ended:
                return
            time.sleep(_POLL_S)


def refuse_other(shown: Sequence[Event], named: Named) -> None:
    """Raise `VerificationError` (`log-invalid`) for a log that was followed where a receipt vouches for another."""
    if named.vouched and [event.body for event in shown] != [event.body for event in named.events]:
        raise VerificationError(Code.LOG_INVALID, "the log that was shown is not the one that the receipt vouches for")


def last_lines(folder: RunFolder, *, sealing: RecipientKey, owner_signing: bytes) -> tuple[list[str], bool]:
    """Return the last lines that an ended run's worker wrote, and whether its receipt vouches for them.

    A log that cannot be read, or that its receipt contradicts, has none.
    """
    try:
        named = named_segments(folder, owner_signing=owner_signing)
        found = segments(folder, named.events[-_LAST_SEGMENTS:], sealing=sealing)
        text = b"".join(one.data for one in found).decode(errors="replace")
    except GlasshouseError:
        return [], False
    return text.split("\n"), named.vouched


def uncollected(folder: RunFolder, *, sealing: RecipientKey, owner_signing: bytes) -> Uncollected | None:
    """Return what an ended run's scripts wrote outside of their output folders, on all its machines together.

    None also where no receipt vouches for the log, or the log cannot be read.
    """
    found: list[Uncollected] = []
    for machine in folder.machines():
        lines, vouched = last_lines(machine, sealing=sealing, owner_signing=owner_signing)
        if vouched:  # else the machine's host may have written it
            # The last such line: a script may have printed one of its own before.
            found += [one for line in reversed(lines) if (one := Uncollected.parse(line)) is not None][:1]
    if not found:
        return None
    return Uncollected(
        files=sum(one.files for one in found),
        bytes=sum(one.bytes for one in found),
        named=tuple(name for one in found for name in one.named),
        links=tuple(name for one in found for name in one.links),
    )
