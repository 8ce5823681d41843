"""The folder of a measurement, as values: reads what the harness left and computes every number from it again.

Laws: ``Part.load`` and ``Measurement.load`` look at files and at nothing else, and trust no number that they find: what
can be computed is computed. They check no signature and no receipt; `verify` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import BinaryIO

from glasshouse.bench.overhead.analysis import Analysis, analyse
from glasshouse.bench.overhead.combine import JobCost, job_costs
from glasshouse.bench.overhead.design import Design, Mode
from glasshouse.bench.overhead.facts import MAX_STATEMENT_BYTES, Facts, payload_of
from glasshouse.bench.overhead.lifecycle import Lifecycle, lifecycle
from glasshouse.bench.overhead.notes import MAX_NOTE_BYTES, ArmWork, SessionNote, read_notes
from glasshouse.bench.overhead.parity import Parity, parity
from glasshouse.bench.overhead.phases import Phases, analyse_phases, read_phase_slices
from glasshouse.bench.overhead.slices import MAX_LINE_BYTES, Record, SessionEnd, read_lines
from glasshouse.errors import Code, FormatError, UsageError, VerificationError
from glasshouse.jobs.files import is_there, open_regular
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.fields import Fields
from glasshouse.wire.policy import Assurance

__all__ = [
    "ANALYSIS",
    "DESIGN",
    "MAX_ANALYSIS_BYTES",
    "MAX_RECORDS",
    "ORDER",
    "PHASES",
    "PHASE_SLICES",
    "RECEIPTS",
    "SESSIONS",
    "SLICES",
    "STATEMENT",
    "ArmWork",
    "Measurement",
    "Part",
    "SessionNote",
    "bundle_name",
    "load_phases",
    "read_design",
    "read_file",
    "read_records",
    "read_session_notes",
]

STATEMENT = "statement.json"
DESIGN = "design.json"
SLICES = "slices.jsonl"
SESSIONS = "sessions.jsonl"
ANALYSIS = "analysis.json"
RECEIPTS = "receipts"
PHASE_SLICES = "phases.jsonl"
PHASES = "phases.json"
MAX_DESIGN_BYTES = 4096
MAX_ANALYSIS_BYTES = 4 << 20
# In which the parts stand in the statement.
ORDER = (Mode.INTERLEAVED, Mode.NULL, Mode.SEQUENTIAL)
# A week of half-second slices; nobody's memory is filled by a file that claims more.
MAX_RECORDS = 1 << 20


def bundle_name(session: int) -> str:
    """Return the file in `receipts/` that holds the bundle of a session's protected run."""
    return f"{session:04d}.json"


@dataclass(frozen=True, slots=True)
class Part:
    """One way of measuring: its design, all that was recorded, and what follows.

    Args:
        mode: which way.
        design: fixed before the first slice.
        records: the lines of `slices.jsonl`.
        notes: the lines of `sessions.jsonl`, one for each session of the records.
        analysis: `analyse` of design and records.
    """

    _: KW_ONLY
    mode: Mode
    design: Design
    records: tuple[Record, ...]
    notes: tuple[SessionNote, ...]
    analysis: Analysis

    @classmethod
    def load(cls, folder: Path) -> Part:
        """Read a part and compute its numbers.

        Raises:
            FormatError: a file that is not what its format says.
            VerificationError: `artifact-invalid`, files that are missing or do not fit each other.
        """
        return cls.of(read_design(folder), read_records(folder), read_session_notes(folder))

    @classmethod
    def of(cls, design: Design, records: tuple[Record, ...], notes: tuple[SessionNote, ...]) -> Part:
        """Compute the numbers of a part.

        Raises:
            VerificationError: `artifact-invalid`, records or notes that do not follow the design, or each other.
        """
        ended = sum(isinstance(record, SessionEnd) for record in records)
        if len(notes) != ended:
            raise VerificationError(Code.ARTIFACT_INVALID, f"{len(notes)} session notes for {ended} sessions")
        if design.mode is Mode.NULL and any(note.bundle_sha256 for note in notes):
            raise VerificationError(Code.ARTIFACT_INVALID, "a receipt in a null run, which protects nothing")
        return cls(mode=design.mode, design=design, records=records, notes=notes, analysis=analyse(design, records))

    @property
    def lifecycle(self) -> Lifecycle | None:
        """F, from both arms' starts and the receipts' times; None where no session has all of them."""
        return lifecycle(self.notes)

    @property
    def jobs(self) -> tuple[JobCost, ...] | None:
        """What whole jobs cost; None without an estimate, without F, and in a null run."""
        found, result = self.lifecycle, self.analysis.result
        if found is None or result is None:
            return None
        return job_costs(result, once_s=found.seconds, once_interval=found.interval)

    @property
    def parity(self) -> Parity:
        """Whether both arms trained the same weights."""
        return parity(self.notes)

    def to_json(self) -> dict[str, Json]:
        """Return `analysis.json`: everything that is computed from the files of the part."""
        jobs, found = self.jobs, self.lifecycle
        return {
            **self.analysis.to_json(),
            "jobs": None if jobs is None else [cost.to_json() for cost in jobs],
            "lifecycle": None if found is None else found.to_json(),
            "parity": self.parity.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Measurement:
    """All parts of a measurement, and what it was of.

    Args:
        workload, system: as in `Facts`.
        assurance: the lowest level of the receipts behind it, or `unattested` (also where a protected run that was
            timed has no receipt); None where no protected run was timed.
        created_us, planted_ppm: as in `Facts`.
        parts: those that were measured: interleaved, null, sequential.
        phases: what the phase slices give, if they were measured.
    """

    _: KW_ONLY
    workload: Mapping[str, Json]
    system: Mapping[str, Json]
    assurance: str | None
    created_us: int
    planted_ppm: int
    parts: tuple[Part, ...]
    phases: Phases | None

    @classmethod
    def load(cls, folder: Path) -> Measurement:
        """Read a measurement that is signed and compute all of its numbers again. No signature or receipt is checked.

        Raises:
            FormatError, VerificationError: as `Part.load`.
        """
        payload = payload_of(read_file(folder / STATEMENT, max_bytes=2 * MAX_STATEMENT_BYTES))
        value = decode(payload, max_bytes=MAX_STATEMENT_BYTES)
        fields = Fields(value, "statement")
        facts = Facts.read(fields)
        assurance = None if fields.null("assurance") else fields.choice("assurance", [*Assurance, "unattested"])
        return cls.assemble(folder, facts, assurance=assurance)

    @classmethod
    def assemble(cls, folder: Path, facts: Facts, *, assurance: str | None) -> Measurement:
        """Read the parts and phases that are in a folder; what the files do not say is given.

        Raises:
            FormatError, VerificationError: as `Part.load`; also `artifact-invalid` for a folder without a part.
        """
        parts = [Part.load(folder / mode.value) for mode in ORDER if is_there(folder / mode.value)]
        return cls.of(facts, parts, load_phases(folder), assurance=assurance)

    @classmethod
    def of(cls, facts: Facts, parts: Sequence[Part], phases: Phases | None, *, assurance: str | None) -> Measurement:
        """Put a measurement together; raises `VerificationError` where nothing was measured."""
        if not parts and phases is None:
            raise VerificationError(Code.ARTIFACT_INVALID, "a measurement of which no part was measured")
        return cls(
            workload=facts.workload,
            system=facts.system,
            assurance=assurance,
            created_us=facts.created_us,
            planted_ppm=facts.planted_ppm,
            parts=tuple(parts),
            phases=phases,
        )

    @property
    def facts(self) -> Facts:
        return Facts(
            workload=self.workload, system=self.system, created_us=self.created_us, planted_ppm=self.planted_ppm
        )

    def part(self, mode: Mode) -> Part | None:
        """Return the part that was measured in this way, if any was."""
        return next((part for part in self.parts if part.mode is mode), None)


def load_phases(folder: Path, *, most: int | None = None) -> Phases | None:
    """Return what the phase slices of a measurement, at most `most`, give, or None where none were measured.

    Raises:
        FormatError, VerificationError: from `read_phase_slices` and `analyse_phases`.
    """
    if not is_there(folder / PHASE_SLICES):
        return None
    return analyse_phases(tuple(read_phase_slices(_lines(folder / PHASE_SLICES, MAX_LINE_BYTES, most))))


def read_design(folder: Path) -> Design:
    """Read a part's `design.json`, whose mode is the folder's name.

    Raises:
        FormatError: it is none.
        VerificationError: `artifact-invalid`, one that nobody could measure or of another mode, or no file.
    """
    data = read_file(folder / DESIGN, max_bytes=MAX_DESIGN_BYTES)
    try:
        design = Design.from_json(decode(data, max_bytes=MAX_DESIGN_BYTES))
    except UsageError as error:
        raise VerificationError(Code.ARTIFACT_INVALID, error.message) from None
    if design.mode.value != folder.name:
        raise VerificationError(Code.ARTIFACT_INVALID, f"the part {folder.name} has a design for {design.mode.value}")
    return design


def read_records(folder: Path, *, most: int | None = None) -> tuple[Record, ...]:
    """Read a part's `slices.jsonl`, of at most `most` lines; raises `FormatError` and `VerificationError`."""
    return tuple(read_lines(_lines(folder / SLICES, MAX_LINE_BYTES, most)))


def read_session_notes(folder: Path, *, most: int | None = None) -> tuple[SessionNote, ...]:
    """Read a part's `sessions.jsonl`, of at most `most` lines; raises `FormatError` and `VerificationError`."""
    return tuple(read_notes(_lines(folder / SESSIONS, MAX_NOTE_BYTES, most)))


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Return the bytes of a regular file of a measurement; a link is not followed.

    Raises:
        VerificationError: `artifact-invalid`, it is not there or is something else.
        FormatError: `too-large`.
    """
    with _open(path) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise FormatError(Code.TOO_LARGE, f"{path.name} is longer than {max_bytes} bytes")
    return data


def _lines(path: Path, max_bytes: int, most: int | None = None) -> Iterator[bytes]:
    limit = MAX_RECORDS if most is None else min(most, MAX_RECORDS)
    with _open(path) as stream:
        for number in range(limit + 1):
            if not (line := stream.readline(max_bytes + 2)):
                return
            if number == limit:
                raise FormatError(Code.TOO_LARGE, f"{path.name} has more than {limit} lines")
            yield line


def _open(path: Path) -> BinaryIO:
    where = f"{path.parent.name}/{path.name}"
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise VerificationError(Code.ARTIFACT_INVALID, f"the measurement lacks {where}") from None
    except OSError:
        raise VerificationError(Code.ARTIFACT_INVALID, f"{where} is not a regular file that can be read") from None
