"""`glasshouse verify` for a measurement: is it the owner's, and does every number follow from its records?

The steps and their numbers are those of spec/measurement.md, section 11. Offline, from the folder and the owner's key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, FormatError, UsageError, VerificationError
from glasshouse.evidence.receipt import CLOCK_LEEWAY_US, MAX_BUNDLE_BYTES
from glasshouse.jobs.owner.durations import utc
from glasshouse.jobs.owner.home import is_there
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.jobs.verify.verdict import Verdict, verify_bundle
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.crypto import key_id, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.merkle import Tree, leaf_hash
from glasshouse.wire.states import Outcome
from glasshouse_bench.analysis import check_same
from glasshouse_bench.artifact import (
    ANALYSIS,
    DESIGN,
    MAX_NOTE_BYTES,
    NOTE,
    RECEIPTS,
    RECORDS,
    SESSIONS,
    Attempt,
    Part,
    read_file,
)
from glasshouse_bench.design import MAX_SESSIONS, Mode
from glasshouse_bench.statement import (
    MAX_ANALYSIS_BYTES,
    MAX_STATEMENT_BYTES,
    STATEMENT,
    STATEMENT_TYPE,
    Measured,
    Measurement,
    statement_json,
)
from glasshouse_bench.strict_fields import Fields
from glasshouse_bench.verdict import Backing, MeasurementVerdict

__all__ = ["refuse_first_format", "verify_measurement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claimed:
    """What the statement has of one part, as far as it is needed to open its files."""

    analysis_sha256: bytes
    design_sha256: bytes
    root: bytes
    size: int


_PART = {DESIGN, ANALYSIS, SESSIONS}


def verify_measurement(folder: Path, *, owner: OwnerPublic | bytes, now_us: int | None = None) -> MeasurementVerdict:
    """Check a measurement's signature and files, and compute all of it again.

    Args:
        owner: the owner, or their signing key, known from elsewhere.
        now_us: the present, where it is known: a measurement of the future is refused.

    Raises:
        VerificationError: `owner-mismatch` for a statement by another owner; the code of the link that does not hold
            for a receipt; `artifact-invalid` for everything else.
    """
    public = owner if isinstance(owner, bytes) else owner.signing
    with _artifact():
        payload = _signed(folder, public)  # 1
        created_us, claimed = _read(payload)  # 2
        if now_us is not None and created_us > now_us + CLOCK_LEEWAY_US:
            raise _wrong(f"it was signed on {utc(created_us)}, which is in the future")
        for mode in Mode:  # 3
            if is_there(folder / mode.value) is not (mode in claimed):
                raise _wrong(f"the statement and the folder do not agree on the part {mode.value}")
        for mode, signed in claimed.items():
            part = Part.open(folder, mode)
            _check_signed(part, signed)
            _check_listed(part)
        analyses = {mode: signed.analysis_sha256 for mode, signed in claimed.items()}
        measurement = Measurement.load(folder)  # 4
        for one in measurement.parts:  # 5
            data = read_file(one.part.folder / ANALYSIS, max_bytes=MAX_ANALYSIS_BYTES)
            if sha256(data) != analyses[one.mode]:
                raise _wrong(f"{one.mode.value}/{ANALYSIS} is not the file that was signed")
            check_same(decode(data, max_bytes=MAX_ANALYSIS_BYTES), one.analysis, f"{one.mode.value}/{ANALYSIS}")
        check_same(  # 6
            payload, statement_json(measurement, created_us=created_us, analyses=analyses), "statement"
        )
        backings = tuple(_back(one, public, created_us) for one in measurement.parts if one.mode is not Mode.NULL)  # 7
    return MeasurementVerdict(measurement=measurement, backings=backings, created_us=created_us)


def refuse_first_format(folder: Path, *, owner: OwnerPublic | bytes, now_us: int | None = None) -> Any:
    """Refuse a measurement of the first format (`slices.jsonl`), which had another design.

    Raises:
        VerificationError: `artifact-invalid`, always.
    """
    raise VerificationError(
        Code.ARTIFACT_INVALID,
        f"{folder.name or 'this folder'} holds a measurement of the first format (slices, not slots), which is not "
        "read any more",
        hint="verify it with the release that made it, or measure again: glasshouse bench overhead",
    )


@contextmanager
def _artifact() -> Iterator[None]:
    """Give what is no measurement one code; links of receipts and another owner keep their own."""
    try:
        yield
    except (FormatError, UsageError) as error:
        raise VerificationError(Code.ARTIFACT_INVALID, f"not what the owner signed: {error.message}") from None
    except (ArithmeticError, ValueError):
        # Times at the end of what an integer may be: their numbers leave what a float can hold.
        raise VerificationError(Code.ARTIFACT_INVALID, "records whose times are beyond any measurement") from None


def _signed(folder: Path, owner: bytes) -> Json:
    """Step 1."""
    limit = 2 * MAX_STATEMENT_BYTES
    envelope = Envelope.parse(read_file(folder / STATEMENT, max_bytes=limit), max_bytes=limit)
    if [name for name, _ in envelope.signatures] != [key_id(owner)]:
        raise VerificationError(
            Code.OWNER_UNKNOWN,
            "a measurement by another owner than expected",
            hint="verify it with the owner.pub of the owner who made it, obtained from them",
        )
    return decode(envelope.verify(STATEMENT_TYPE, owner), max_bytes=MAX_STATEMENT_BYTES)


def _read(payload: Json) -> tuple[int, dict[Mode, _Claimed]]:
    """Step 2: what is needed to open the files; step 6 compares the whole."""
    fields = Fields(payload, "statement")
    claimed: dict[Mode, _Claimed] = {}
    for value in fields.items("parts", max_items=len(Mode)):
        part = Fields(value, "statement.parts")
        mode = Mode(part.choice("mode", [one.value for one in Mode]))
        if mode in claimed:
            raise FormatError(Code.SCHEMA, f"a statement with two parts {mode.value}")
        attempts = part.child("attempts")
        claimed[mode] = _Claimed(
            analysis_sha256=part.digest("analysis_sha256"),
            design_sha256=part.digest("design_sha256"),
            root=attempts.digest("root"),
            size=attempts.integer("size", high=MAX_SESSIONS),
        )
    return fields.integer("created_us"), claimed


def _check_signed(part: Part, signed: _Claimed) -> None:
    """Step 3: only the owner can make a reader parse records, for the notes name the digest of each."""
    mode = part.design.mode.value
    if part.design.sha256 != signed.design_sha256:
        raise _wrong(f"{mode}/{DESIGN} is not the one that was signed")
    tree = Tree()
    for number in range(signed.size):
        path = part.folder / SESSIONS / f"{number:04d}" / NOTE
        tree.append(leaf_hash(read_file(path, max_bytes=MAX_NOTE_BYTES)))
    if tree.root() != signed.root or part.attempted != signed.size:
        raise _wrong(f"the attempts in {mode}/ are not those that were signed")


def _check_listed(part: Part) -> None:
    """Step 3: nothing lies in a part but what its notes name; that all of it is there, reading it shows."""
    folder, attempted = part.folder, part.attempted
    _only(folder, _PART | {RECEIPTS}, lacking=_PART)
    _only(folder / SESSIONS, {f"{number:04d}" for number in range(attempted)})
    receipts = set()
    for number in range(attempted):
        note, _ = part.note(number)
        arms = zip((note.raw, note.protected), RECORDS, strict=True)
        _only(folder / SESSIONS / f"{number:04d}", {NOTE, *(name for arm, name in arms if arm.record_sha256)})
        if note.receipt_sha256 is not None:
            receipts.add(part.receipt(number).name)
    if is_there(folder / RECEIPTS):
        _only(folder / RECEIPTS, receipts)


def _only(folder: Path, names: set[str], *, lacking: set[str] = frozenset()) -> None:  # type: ignore[assignment] # empty
    if folder.is_symlink() or not folder.is_dir():
        raise _wrong(f"{folder.name} is not a folder of the measurement's own")
    # One more than may be there is enough to refuse; a folder of a million files is not listed.
    found = {one.name for one in islice(folder.iterdir(), len(names) + 1)}
    if found - names:
        raise _wrong(f"a file in {folder.name}/ that the statement does not know")
    if lacking - found:
        raise _wrong(f"the measurement lacks {folder.name}/{min(lacking - found)}")


def _back(one: Measured, owner: bytes, created_us: int) -> Backing:
    """Step 7: each receipt that lies there is walked from the owner's key on, and compared with its session."""
    verdicts: dict[int, Verdict] = {}
    needed: list[int] = []
    for note, session in zip(one.part.notes(), one.analysis["sessions"], strict=True):
        if session["outcome"] == "complete":
            needed.append(note.session)
        path = one.part.receipt(note.session)
        if note.receipt_sha256 is None or not is_there(path):
            continue
        data = read_file(path, max_bytes=MAX_BUNDLE_BYTES)
        if sha256(data) != note.receipt_sha256:
            raise _about(note, "is not the one that its note names")
        verdict = verify_bundle(data, owner=owner)
        _check_receipt(one.part, note, verdict, created_us)
        verdicts[note.session] = verdict
    return Backing(mode=one.mode, verdicts=verdicts, needed=tuple(needed))


def _check_receipt(part: Part, note: Attempt, verdict: Verdict, created_us: int) -> None:
    receipt, arm = verdict.chain.receipt, note.protected
    if (receipt.run_id, receipt.deployment) != (arm.run, arm.deployment):
        raise _about(note, "is of another run")
    if receipt.workload != part.design.workload.kind.value:
        raise _about(note, "is of another workload")
    if verdict.chain.token.group is not None:
        raise _about(note, "is of a run in a group of ranks, and a session is of one process pair")
    if receipt.finished_us > created_us + CLOCK_LEEWAY_US:
        raise _about(note, "is of a run that ended after the statement was made")
    if note.lifecycle is not None:
        told = note.lifecycle.to_json()
        if any(receipt.lifecycle_us[name] != value for name, value in told.items() if name != "start"):
            raise _about(note, "tells of another lifecycle")
    record = part.records(note)[1]
    if record is None:
        return
    if receipt.outcome is not Outcome.COMPLETED or verdict.chain.ear is None:
        raise _about(note, "is of a run that did not complete, and yet there is a record of its steps")
    if len(record) not in {output.plain_bytes for output in receipt.outputs}:
        raise _about(note, "names no output of the record's length")


def _about(note: Attempt, why: str) -> VerificationError:
    return _wrong(f"the receipt of session {note.session} {why}")


def _wrong(message: str) -> VerificationError:
    return VerificationError(Code.ARTIFACT_INVALID, message)
