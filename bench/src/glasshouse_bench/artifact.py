"""The folder of a measurement: the note of each attempt, and how a harness writes and goes on with a part.

Laws (spec/measurement.md, sections 9 and 10): an attempt counts from its first note on; a session is attempted once;
nothing but files that a note names lies in a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self, TypeVar

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import is_there, open_regular, private_folder, write_private
from glasshouse.wire.canonical import MAX_INTEGER, decode
from glasshouse.wire.crypto import sha256
from glasshouse_bench.design import MAX_DESIGN_BYTES, MAX_SESSIONS, Design, Mode
from glasshouse_bench.documents import COUNT, INSTANT, NAME, PLAIN, Document, integer, listed

__all__ = ["Arm", "Attempt", "Clock", "Ended", "Lifecycle", "Part", "Sample", "Spent", "read_document", "read_file"]

DESIGN, NOTE, ANALYSIS = "design.json", "session.json", "analysis.json"
SESSIONS, RECEIPTS = "sessions", "receipts"
RECORDS = ("raw.steps", "protected.steps")
MAX_NOTE_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20
_SIGNED = integer(-MAX_INTEGER)
_D = TypeVar("_D", bound=Document)


class Ended(StrEnum):
    """How one arm's process ended."""

    NOT_STARTED = "not-started"
    COMPLETED = "completed"
    FAILED = "failed"  # by itself
    KILLED = "killed"  # by the harness, because the other arm had failed or time was over
    INTERRUPTED = "interrupted"  # with the harness


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock(Document):
    """One moment by three clocks."""

    monotonic_ns: Annotated[int, INSTANT]
    boot_ns: Annotated[int, _SIGNED]  # CLOCK_BOOTTIME − CLOCK_MONOTONIC
    real_us: Annotated[int, COUNT]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm(Document):
    """One arm's process in a session.

    Args:
        exit: status of the process, negative for a signal; None where it is not known.
        launched_ns: when the process was started; None where it was not.
        padding_bytes: that were drawn for its environment and arguments; None where it was not started.
        speculation: the kernel's lines on this process's own mitigations; None where it was not looked at.
        deployment, run: names that the broker's log has of it; None for a raw arm.
        record_sha256: of the step record beside the note; None where the arm left none.
    """

    ended: Ended = Ended.NOT_STARTED
    code: Code | None = None
    exit: Annotated[int, integer(-255, 255)] | None = None
    launched_ns: Annotated[int, INSTANT] | None = None
    padding_bytes: Annotated[int, COUNT] | None = None
    speculation: Annotated[tuple[str, ...], listed(PLAIN, most=16)] | None = None
    deployment: Annotated[str, NAME] | None = None
    run: Annotated[str, NAME] | None = None
    record_sha256: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Document):
    """The machine from the sample before, or the session's begin, to `at_ns`; None for what could not be looked at.

    Args:
        at_ns: since the session began.
        steal_ppm: part of the processors' time that the hypervisor took, in millionths.
        throttled: by how much the machine's counters of throttling (heat, power, of processor and GPU) went up.
        frequency_khz: the lowest of the processors', or the GPU's clock.
    """

    at_ns: Annotated[int, COUNT]
    steal_ppm: Annotated[int, integer(0, 1_000_000)] | None = None
    throttled: Annotated[int, COUNT] | None = None
    frequency_khz: Annotated[int, COUNT] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent(Document):
    """Processor time, over the time in protected slots in which it was looked at."""

    spent_ns: Annotated[int, COUNT]
    over_ns: Annotated[int, integer(1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifecycle(Document):
    """What a protected run takes once: the receipt's steps, and what else makes it start later than the raw one.

    Args:
        harden, attest, release, open, seal_outputs, zeroize: microseconds, as the receipt has them.
        start: from launch to the first step, protected less raw, without the first four of these; may be below 0.
    """

    harden: Annotated[int, COUNT]
    attest: Annotated[int, COUNT]
    release: Annotated[int, COUNT]
    open: Annotated[int, COUNT]
    start: Annotated[int, _SIGNED]
    seal_outputs: Annotated[int, COUNT]
    zeroize: Annotated[int, COUNT]

    @property
    def seconds(self) -> float:
        """F of this session."""
        receipts = self.harden + self.attest + self.release + self.open + self.seal_outputs + self.zeroize
        return (receipts + self.start) / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt(Document):
    """The note of one attempt, at `session`, from 0.

    Args:
        raw, protected: the two arms; in a null measurement `protected` is the second raw one.
        lifecycle: None where no protected run ended well.
        background: processor time of agent and watchdog; None where there are none, or they were not looked at.
        samples: of the machine, in order, about one a second.
        receipt_sha256: of the bundle in `receipts/`; None where there is none.
    """

    version: Annotated[int, integer(1, 1)] = 1
    session: Annotated[int, integer(0, MAX_SESSIONS - 1)]
    began: Clock
    raw: Arm = Arm()
    protected: Arm = Arm()
    lifecycle: Lifecycle | None = None
    background: Spent | None = None
    samples: Annotated[tuple[Sample, ...], listed(Sample, most=4096)] = ()
    receipt_sha256: bytes | None = None

    def _check(self) -> None:
        instants = [one.at_ns for one in self.samples]
        if any(later <= before for before, later in pairwise(instants)):
            raise FormatError(Code.SCHEMA, "a session's samples are out of order")
        if self.receipt_sha256 is not None and self.protected.run is None:
            raise FormatError(Code.SCHEMA, "a session has a receipt of no run")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a measurement, as a harness writes it: its folder ``MODE/``, and the design sealed before."""

    folder: Path
    design: Design

    @classmethod
    def begin(cls, measurement: Path, design: Design) -> Self:
        """Write a design, or go on with the part that has this design already.

        Raises:
            UsageError: `usage`, another design lies there; `disk-full`.
            FormatError: what lies there is no part.
        """
        part = cls(private_folder(measurement / design.mode.value), design)
        for name in (SESSIONS, RECEIPTS):
            private_folder(part.folder / name)
        path = part.folder / DESIGN
        if not is_there(path):
            write_private(path, design.encode(), replace=False)
        elif cls.open(measurement, design.mode).design != design:
            raise UsageError(Code.USAGE, f"{part.folder} is measured by another design", hint="choose another folder")
        part._tidy()
        return part

    @classmethod
    def open(cls, measurement: Path, mode: Mode) -> Self:
        """Return the part that lies in a measurement's folder.

        Raises:
            FormatError: `artifact-invalid`, there is none; `schema-invalid`, or `not-canonical`.
        """
        folder = measurement / mode.value
        design = read_document(folder / DESIGN, Design, max_bytes=MAX_DESIGN_BYTES)
        if design.mode is not mode:
            raise FormatError(Code.ARTIFACT_INVALID, f"the design in {mode.value}/ is of another mode")
        return cls(folder, design)

    @property
    def attempted(self) -> int:
        """How many sessions were attempted: those from 0 to the one before this number."""
        numbers = range(self.design.sessions)
        return next((number for number in numbers if not is_there(self._session(number))), self.design.sessions)

    def next(self) -> int | None:
        """Return the session that is to be attempted next; None where all were."""
        number = self.attempted
        return None if number == self.design.sessions else number

    def attempt(self, note: Attempt) -> None:
        """Write down that a session is attempted: from here on it counts, however it ends.

        Raises:
            UsageError: `usage`, it was attempted before, or is not the design's; `disk-full`.
        """
        if note.session != self.next():
            raise UsageError(Code.USAGE, f"session {note.session} is not the next one of this design")
        private_folder(self._session(note.session))
        write_private(self._session(note.session) / NOTE, note.encode(), replace=False)

    def keep(
        self, note: Attempt, *, raw: bytes | None = None, protected: bytes | None = None, receipt: bytes | None = None
    ) -> Attempt:
        """Write how an attempted session ended: a note without digests, the step records, and the run's bundle.

        Returns:
            The note with the digests of what it left.

        Raises:
            UsageError: `usage`, it was not attempted; `disk-full`.
        """
        folder = self._session(note.session)
        if not is_there(folder / NOTE):
            raise UsageError(Code.USAGE, f"session {note.session} was not attempted")
        digests = [None if data is None else sha256(data) for data in (raw, protected, receipt)]
        whole = replace(
            note,
            raw=replace(note.raw, record_sha256=digests[0]),
            protected=replace(note.protected, record_sha256=digests[1]),
            receipt_sha256=digests[2],
        )
        self._put(note.session, (raw, protected, receipt), whole.encode())
        return whole

    def merge(self, other: Part) -> int:
        """Take over the attempts of another folder's part of the same design, and return how many.

        Raises:
            UsageError: `usage`, another design, or one session that was attempted in both.
            FormatError: files of the other part that are missing, or not those that its notes name.
        """
        if other.design.sha256 != self.design.sha256:
            raise UsageError(Code.USAGE, f"{other.folder} was measured by another design")
        own = self.attempted
        for number in range(other.attempted):
            note, data = other.note(number)
            if number < own:
                if self.note(number)[1] != data:
                    raise UsageError(
                        Code.USAGE,
                        f"session {number} was attempted twice, here and in {other.folder}",
                        hint="an attempt that is left out would be a choice: measure again by a new design",
                    )
                continue
            shown = note.receipt_sha256 is not None and is_there(other.receipt(number))
            receipt = read_file(other.receipt(number), max_bytes=MAX_RECORD_BYTES) if shown else None
            files = [*other.records(note), receipt]
            private_folder(self._session(number))
            self._put(number, files, data)
        return max(0, other.attempted - own)

    def notes(self) -> Iterator[Attempt]:
        """Yield the notes of all attempts, from session 0 on; raises as `note`."""
        for number in range(self.attempted):
            yield self.note(number)[0]

    def note(self, session: int) -> tuple[Attempt, bytes]:
        """Return one attempt's note, and its bytes; raises `FormatError` where it is of another, or cannot be read."""
        data = read_file(self._session(session) / NOTE, max_bytes=MAX_NOTE_BYTES)
        note = Attempt.parse(decode(data, max_bytes=MAX_NOTE_BYTES))
        if note.session != session:
            raise FormatError(Code.ARTIFACT_INVALID, f"the note of session {session} is of another one")
        return note, data

    def records(self, note: Attempt) -> list[bytes | None]:
        """Return the bytes of the records that a note names, raw and protected.

        Raises:
            FormatError: `artifact-invalid`, one that is missing or another one; `too-large`.
        """
        found: list[bytes | None] = []
        for arm, name in zip((note.raw, note.protected), RECORDS, strict=True):
            if arm.record_sha256 is None:
                found.append(None)
                continue
            data = read_file(self._session(note.session) / name, max_bytes=MAX_RECORD_BYTES)
            if sha256(data) != arm.record_sha256:
                raise FormatError(
                    Code.ARTIFACT_INVALID, f"{name} of session {note.session} is not the record that its note names"
                )
            found.append(data)
        return found

    def receipt(self, session: int) -> Path:
        return self.folder / RECEIPTS / f"{session:04d}.json"

    def _session(self, session: int) -> Path:
        return self.folder / SESSIONS / f"{session:04d}"

    def _put(self, session: int, files: Sequence[bytes | None], note: bytes) -> None:
        """Write both records and the receipt, and then the note: files that it does not name yet were broken off."""
        folder = self._session(session)
        for path, data in zip(self._files(session), files, strict=True):
            if data is not None:
                write_private(path, data)
        write_private(folder / NOTE, note)

    def _files(self, session: int) -> list[Path]:
        return [*(self._session(session) / name for name in RECORDS), self.receipt(session)]

    def _tidy(self) -> None:
        """Remove what an attempt that was broken off left beside its note, and files that were not written whole."""
        last = self.attempted - 1
        folder = self._session(max(last, 0))
        for place in (self.folder, self.folder / RECEIPTS, folder):
            for path in place.glob(".*.part"):
                path.unlink()
        if last < 0:
            return
        if not is_there(folder / NOTE):
            folder.rmdir()
            return
        note, _ = self.note(last)
        digests = (note.raw.record_sha256, note.protected.record_sha256, note.receipt_sha256)
        for path, digest in zip(self._files(last), digests, strict=True):
            if digest is None:
                path.unlink(missing_ok=True)


def read_document(path: Path, document: type[_D], *, max_bytes: int) -> _D:
    """Return a document of a measurement; raises `FormatError`, as `read_file` and for what is none."""
    return document.parse(decode(read_file(path, max_bytes=max_bytes), max_bytes=max_bytes))


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Return the bytes of a measurement's file: a regular one, and no link.

    Raises:
        FormatError: `artifact-invalid`, it is not there or something else; `too-large`.
    """
    name = "/".join(path.parts[-3:])
    try:
        with open_regular(path) as source:
            data = source.read(max_bytes + 1)
    except OSError:
        raise FormatError(Code.ARTIFACT_INVALID, f"the measurement lacks {name}, or it is no regular file") from None
    if len(data) > max_bytes:
        raise FormatError(Code.TOO_LARGE, f"{name} is longer than {max_bytes} bytes")
    return data
