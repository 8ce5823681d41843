"""The receipts of a part: each is walked from the owner's key on and compared with the session that names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from glasshouse.bench.overhead.artifact import RECEIPTS, Part, bundle_name, read_file
from glasshouse.bench.overhead.blocks import Session
from glasshouse.bench.overhead.design import Arm, Mode
from glasshouse.bench.overhead.notes import ArmWork, SessionNote
from glasshouse.errors import Code, VerificationError
from glasshouse.evidence.bundle import MAX_BUNDLE_BYTES
from glasshouse.evidence.receipt import Receipt
from glasshouse.evidence.results import PACED
from glasshouse.jobs.files import is_there
from glasshouse.jobs.verdict import Status, Verdict
from glasshouse.jobs.verify import verify_bundle
from glasshouse.wire.kdf import sha256
from glasshouse.wire.policy import Assurance
from glasshouse.wire.states import Outcome

__all__ = ["UNATTESTED", "Backing", "back", "entries", "lowest"]

UNATTESTED = "unattested"
_LEVELS = (UNATTESTED, *(level.value for level in Assurance))


@dataclass(frozen=True, slots=True)
class Backing:
    """The receipts behind a part.

    Args:
        mode: of the part.
        verdicts: of each session's receipt, all genuine; None where the session has none.
        assurance: the lowest level among the sessions with slices of a protected run, of which one without a receipt
            counts as `unattested`; None where there is no such session.
        unbacked: sessions with slices of a protected run that is not vouched for: it has no receipt, its receipt lacks
            a part, or the run did not complete although the session did.
        timed: sessions with slices of a protected run.
        broken_off: those of them whose run did not complete: no receipt says how many steps it took.
    """

    _: KW_ONLY
    mode: Mode
    verdicts: tuple[Verdict | None, ...]
    assurance: str | None
    unbacked: tuple[int, ...]
    timed: tuple[int, ...] = ()
    broken_off: tuple[int, ...] = ()

    @property
    def receipts(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict is not None)


def lowest(backings: Sequence[Backing]) -> str | None:
    """Return the lowest assurance behind several parts, or None where no protected run was timed."""
    found = [backing.assurance for backing in backings if backing.assurance is not None]
    return min(found, key=_LEVELS.index, default=None)


def back(folder: Path, part: Part, *, owner: bytes, workload: str) -> Backing:
    """Verify the receipts of a part and compare them with what its sessions say.

    Args:
        folder: of the part.
        part: what was read from it.
        owner: the owner's signing key: the measurement's owner is the owner of its runs.
        workload: the kind of workload that the measurement is of.

    Raises:
        FormatError, VerificationError: a receipt that is not genuine, with the code of the link that does not hold; or
            `artifact-invalid`, one that is missing, too many, or of another run than the session says.
    """
    names = {bundle_name(note.session) for note in part.notes if note.bundle_sha256 is not None}
    if names != entries(folder / RECEIPTS):
        raise VerificationError(Code.ARTIFACT_INVALID, f"the receipts of {part.mode} are not those that it names")
    verdicts: list[Verdict | None] = []
    for note, session in zip(part.notes, part.analysis.sessions, strict=True):
        if note.bundle_sha256 is None:
            verdicts.append(None)
            continue
        data = read_file(folder / RECEIPTS / bundle_name(note.session), max_bytes=MAX_BUNDLE_BYTES)
        if sha256(data) != note.bundle_sha256:
            raise _wrong(note, "is not the one that it names")
        verdict = verify_bundle(data, owner=owner)
        _check(note, session, verdict, workload)
        verdicts.append(verdict)
    if part.mode is Mode.NULL:
        return Backing(mode=part.mode, verdicts=tuple(verdicts), assurance=None, unbacked=())
    timed = [(one, found) for one, found in zip(part.analysis.sessions, verdicts, strict=True) if _protected(one)]
    levels = [UNATTESTED if found is None else found.assurance for _, found in timed]
    return Backing(
        mode=part.mode,
        verdicts=tuple(verdicts),
        assurance=min(levels, key=_LEVELS.index, default=None),
        unbacked=tuple(one.number for one, found in timed if not _vouched(one, found)),
        timed=tuple(one.number for one, _ in timed),
        broken_off=tuple(one.number for one, found in timed if not _completed(found)),
    )


def entries(folder: Path) -> set[str]:
    """Return the names in a folder of the measurement; a folder that is not there has none.

    Raises:
        VerificationError: `artifact-invalid`, a link or a file in its place.
    """
    if not is_there(folder):
        return set()
    if folder.is_symlink() or not folder.is_dir():
        raise VerificationError(Code.ARTIFACT_INVALID, f"{folder.name} is not a folder of the measurement's own")
    return {found.name for found in folder.iterdir()}


def _protected(session: Session) -> int | None:
    """Return the largest count of steps that a protected slice of the session names; None where there is no slice."""
    blocks = (*session.warmup, *session.blocks)
    return max((one.done_after for block in blocks for one in block.slices if one.arm is Arm.PROTECTED), default=None)


def _vouched(session: Session, verdict: Verdict | None) -> bool:
    if verdict is None or verdict.status is Status.INCOMPLETE:
        return False
    return verdict.status is Status.GOOD or session.end.code is not None


def _completed(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.chain.receipt.outcome is Outcome.COMPLETED


def _check(note: SessionNote, session: Session, verdict: Verdict, workload: str) -> None:
    receipt = verdict.chain.receipt
    if receipt.workload != workload:
        raise _wrong(note, "is of another workload")
    if verdict.chain.token.group is not None:
        raise _wrong(note, "is of a run in a group of ranks, and a session is of one process pair")
    if note.lifecycle_us != receipt.lifecycle_us or note.imports_us != receipt.training_imports_us:
        raise _wrong(note, "tells of another lifecycle")
    if (note.protected is not None) != (receipt.outcome is Outcome.COMPLETED):
        raise _wrong(note, "tells of another end")
    if note.protected is not None and not _same_work(note.protected, receipt):
        raise _wrong(note, "tells of other work")
    steps = _protected(session)
    if steps is None:
        return
    if verdict.chain.ear is None:
        raise _wrong(note, "is of a run that was given no key, and yet it has slices")
    if receipt.work is not None and receipt.work.stop_reason != PACED:
        raise _wrong(note, "is of a run that never rested between slices")
    # What a run that did not complete says of its work may be from before its last slices.
    if note.protected is not None and note.protected.done < steps:
        raise _wrong(note, "tells of fewer steps than its slices")


def _same_work(work: ArmWork, receipt: Receipt) -> bool:
    """Compare what the harness saw of a run with its receipt: of files only that they are there."""
    outputs = tuple((output.kind, output.of, output.plain_hmac) for output in receipt.outputs)
    return receipt.work is not None and receipt.work.done == work.done and outputs == work.outputs


def _wrong(note: SessionNote, why: str) -> VerificationError:
    return VerificationError(Code.ARTIFACT_INVALID, f"the receipt of session {note.session} {why}")
