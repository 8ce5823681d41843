"""`verify` for a measurement: is it the owner's, and does every number follow from its slices and receipts?

The steps and their numbers are those of spec/overhead-artifact.md section 12. Offline, from the folder and the
owner's public key. A word stands only if a null run stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glasshouse.bench.overhead.analysis import check_same
from glasshouse.bench.overhead.artifact import (
    ANALYSIS,
    DESIGN,
    MAX_ANALYSIS_BYTES,
    ORDER,
    PHASE_SLICES,
    PHASES,
    RECEIPTS,
    SESSIONS,
    SLICES,
    STATEMENT,
    Measurement,
    Part,
    load_phases,
    read_design,
    read_file,
    read_records,
    read_session_notes,
)
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.facts import MAX_STATEMENT_BYTES, STATEMENT_KIND, STATEMENT_TYPE, Facts
from glasshouse.bench.overhead.receipts import back, entries, lowest
from glasshouse.bench.overhead.slices import tree
from glasshouse.bench.overhead.statement import check_runs, statement_json
from glasshouse.bench.overhead.verdict import MeasurementVerdict
from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.evidence.receipt import CLOCK_LEEWAY_US
from glasshouse.jobs.durations import utc
from glasshouse.jobs.files import is_there
from glasshouse.jobs.identity import OwnerPublic
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields
from glasshouse.wire.kdf import sha256
from glasshouse.wire.merkle import Tree
from glasshouse.wire.signing import key_id

__all__ = ["verify_measurement"]

_FILES = {DESIGN, SLICES, SESSIONS, ANALYSIS}


@dataclass(frozen=True, slots=True)
class _Claimed:
    """What the statement says of one part, as far as it is needed to open its files."""

    mode: Mode
    slices: tuple[bytes, int]
    sessions: tuple[bytes, int]
    analysis_sha256: bytes


def verify_measurement(folder: Path, *, owner: OwnerPublic | bytes, now_us: int | None = None) -> MeasurementVerdict:
    """Check a measurement's signature and files, and compute all of it again.

    Args:
        folder: with `statement.json` and the parts.
        owner: the owner, or their signing key, known from elsewhere.
        now_us: the present, where it is known: a measurement of the future is refused.

    Raises:
        VerificationError: `owner-mismatch` for a statement by another owner; the code of the link that does not hold
            for a receipt; `artifact-invalid` for everything else.
    """
    public = owner if isinstance(owner, bytes) else owner.signing
    with _artifact():
        payload = _signed(folder, public)  # 1
        facts, claimed, (phases_sha256, phase_slices) = _read(payload)  # 2
        if now_us is not None and facts.created_us > now_us + CLOCK_LEEWAY_US:
            raise _wrong(f"it was signed on {utc(facts.created_us)}, which is in the future")
        _check_listed(folder, claimed, phases=phases_sha256 is not None)  # 3
        parts = [_part(folder / one.mode.value, one) for one in claimed]  # 4 to 6
        backings = [
            back(folder / part.mode.value, part, owner=public, workload=str(facts.workload["kind"])) for part in parts
        ]  # 7
        check_runs(backings, facts)
        phases = load_phases(folder, most=phase_slices)  # 8
        if phases is not None:
            check_same(_computed(folder, PHASES, phases_sha256), phases.to_json(), "phases")
        measurement = Measurement.of(facts, parts, phases, assurance=lowest(backings))
        again = statement_json(
            measurement, analyses={one.mode: one.analysis_sha256 for one in claimed}, phases_sha256=phases_sha256
        )
        check_same(payload, again, "statement")  # 9
    return MeasurementVerdict(measurement=measurement, backings=tuple(backings))


@contextmanager
def _artifact() -> Iterator[None]:
    """Give what is no measurement one code; links of receipts and another owner keep their own."""
    try:
        yield
    except FormatError as error:
        raise VerificationError(Code.ARTIFACT_INVALID, f"not what the owner signed: {error.message}") from None
    except (ArithmeticError, ValueError):
        # Times at the end of what an integer may be: their numbers leave what a float can hold.
        raise VerificationError(Code.ARTIFACT_INVALID, "slices whose times are beyond any measurement") from None


def _signed(folder: Path, owner: bytes) -> Json:
    """Step 1."""
    envelope = Envelope.parse(
        read_file(folder / STATEMENT, max_bytes=2 * MAX_STATEMENT_BYTES), max_bytes=2 * MAX_STATEMENT_BYTES
    )
    if [name for name, _ in envelope.signatures] != [key_id(owner)]:
        raise VerificationError(
            Code.OWNER_UNKNOWN,
            "a measurement by another owner than expected",
            hint="verify it with the owner.pub of the owner who made it, obtained from them",
        )
    return decode(envelope.verify(STATEMENT_TYPE, owner), max_bytes=MAX_STATEMENT_BYTES)


def _read(payload: Json) -> tuple[Facts, list[_Claimed], tuple[bytes | None, int]]:
    """Step 2: what is needed to open the files; step 9 compares the whole."""
    fields = Fields(payload, "statement")
    fields.choice("kind", [STATEMENT_KIND])
    facts = Facts.read(fields)
    claimed = [_claimed(item) for item in fields.items("parts", max_items=len(ORDER))]
    phases: tuple[bytes | None, int] = (None, 0)
    if not fields.null("phases"):
        told = fields.child("phases")
        phases = told.digest("analysis_sha256"), _tree(told.child("slices"))[1]
    modes = [one.mode for one in claimed]
    if modes != [mode for mode in ORDER if mode in modes]:
        raise FormatError(Code.SCHEMA, "parts that are repeated or out of order")
    return facts, claimed, phases


def _claimed(value: Json) -> _Claimed:
    fields = Fields(value, "statement.parts")
    return _Claimed(
        mode=Mode(fields.choice("mode", [mode.value for mode in Mode])),
        slices=_tree(fields.child("slices")),
        sessions=_tree(fields.child("sessions")),
        analysis_sha256=fields.digest("analysis_sha256"),
    )


def _tree(fields: Fields) -> tuple[bytes, int]:
    found = fields.digest("root"), fields.integer("size")
    fields.end()
    return found


def _check_listed(folder: Path, claimed: Iterable[_Claimed], *, phases: bool) -> None:
    """Step 3: everything that is named is there, and in the parts nothing else is."""
    modes = {one.mode for one in claimed}
    for mode in ORDER:
        found = entries(folder / mode.value)
        if mode not in modes:
            if is_there(folder / mode.value):
                raise _wrong(f"the statement does not speak of the part {mode} that lies beside it")
            continue
        if lacking := sorted(_FILES - found):
            raise _wrong(f"the measurement lacks {mode}/{lacking[0]}")
        if found - _FILES - {RECEIPTS}:
            raise _wrong(f"a file in {mode}/ that the statement does not know")
    for name in (PHASE_SLICES, PHASES):
        if is_there(folder / name) is not phases:
            raise _wrong(f"the measurement {'lacks' if phases else 'does not speak of'} {name}")


def _part(folder: Path, claimed: _Claimed) -> Part:
    """Steps 4 to 6: the lines are those that were signed, and every number follows from them."""
    # No more is read than was signed: whoever put other files here must not keep anybody busy with them.
    design, records = read_design(folder), read_records(folder, most=claimed.slices[1])
    notes = read_session_notes(folder, most=claimed.sessions[1])
    _check_tree(f"{folder.name}/{SLICES}", tree(records), claimed.slices)
    _check_tree(f"{folder.name}/{SESSIONS}", tree(notes), claimed.sessions)
    part = Part.of(design, records, notes)
    where = f"{folder.name}/{ANALYSIS}"
    check_same(_computed(folder.parent, where, claimed.analysis_sha256), part.to_json(), where)
    return part


def _check_tree(name: str, grown: Tree, claimed: tuple[bytes, int]) -> None:
    if (grown.root(), len(grown)) != claimed:
        raise _wrong(f"{name} does not hold the lines that were signed")


def _computed(folder: Path, where: str, digest: bytes | None) -> Json:
    data = read_file(folder / where, max_bytes=MAX_ANALYSIS_BYTES)
    if sha256(data) != digest:
        raise _wrong(f"{where} is not the file that was signed")
    return decode(data, max_bytes=MAX_ANALYSIS_BYTES)


def _wrong(message: str) -> VerificationError:
    return VerificationError(Code.ARTIFACT_INVALID, message)
