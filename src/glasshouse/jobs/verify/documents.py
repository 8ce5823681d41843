"""`verify`: is this document genuine, by this owner, and what does it say? Offline, from the file and `owner.pub`.

Composed here from the rooms below, none of which knows the whole chain. A verdict never stands without
its assurance level.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from glasshouse.attestation.roots.root_table import REACHABLE
from glasshouse.errors import Code, FormatError, PackageError, UsageError, VerificationError
from glasshouse.evidence.artifact import MAX_ARTIFACT_BYTES, Artifact
from glasshouse.evidence.bundle import BUNDLE_KIND, MAX_BUNDLE_BYTES
from glasshouse.evidence.events import Event, EventType
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, CountersignedHead
from glasshouse.evidence.log import VerifiedLog, read_lines, verify_heads, verify_log
from glasshouse.evidence.receipt import CLOCK_LEEWAY_US
from glasshouse.evidence.results import Output, Work
from glasshouse.jobs.owner.durations import utc
from glasshouse.jobs.owner.files import is_there, open_regular
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.jobs.verify.receipt_chain import Chain, walk
from glasshouse.jobs.verify.verdict import AnyVerdict, ArtifactVerdict, PackageVerdict, Status, Verdict
from glasshouse.package.read import Package
from glasshouse.wire.canonical import Json
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.signing import key_id
from glasshouse.wire.states import Outcome

__all__ = [
    "BUNDLE_NAME",
    "AnyVerdict",
    "ArtifactVerdict",
    "PackageVerdict",
    "Status",
    "Verdict",
    "kind_of",
    "of_run",
    "segment_name",
    "verify_artifact",
    "verify_bundle",
    "verify_file",
    "verify_log_beside",
    "verify_log_in",
    "verify_package",
    "verify_sealed_in",
]

LOG_NAME = "events.log"
HEADS_NAME = "heads.log"
BUNDLE_NAME = "receipt.json"
# In this order: heads are held to the log, so the log is read first.
_LOGS = (LOG_NAME, HEADS_NAME)
_PACKAGE_MAGIC = b"\x89GHS"
# Canonical JSON: an envelope's first key, which a bundle does not have.
_ENVELOPE = b'{"payload":'


def verify_bundle(data: bytes, *, owner: OwnerPublic | bytes, now_us: int | None = None) -> Verdict:
    """Walk a receipt bundle from the owner's key to what happened.

    Args:
        data: the bundle's bytes.
        owner: the owner, or their signing key, known from elsewhere than the bundle.
        now_us: the present, where it is known: a run of the future is refused.

    Raises:
        FormatError: it is not a bundle.
        VerificationError: with the code of the link that does not hold.
    """
    chain = walk(data, owner=_signing(owner))
    _check_past(chain.closed_us, now_us, Code.CHAIN_RECEIPT)
    return Verdict(chain=chain)


def verify_log_beside(verdict: Verdict, lines: Iterable[bytes], heads: Iterable[bytes] | None = None) -> Verdict:
    """Check the event log that lies beside a bundle, and that both tell the same story.

    Args:
        verdict: of the bundle.
        lines: of `events.log`, as `read_lines` yields them.
        heads: lines of `heads.log`, each with its line end; None when it is not looked at.

    Raises:
        VerificationError: `log-invalid` or `state-illegal`.
    """
    chain, receipt = verdict.chain, verdict.chain.receipt
    log = verify_log(lines, chain.head)
    probes = [(e.body["probe"], e.body["result"], e.body["detail"]) for e in log.of(EventType.PROBE)]
    outputs = [
        (e.body["kind"], e.body["class"], e.body["bytes"], e.body["sealed_bytes"], e.body["sealed_sha256"])
        for e in log.of(EventType.OUTPUT)
    ]
    digests = {
        "ear": receipt.ear_sha256,
        "environment": receipt.environment_sha256,
        "evidence": receipt.evidence_sha256,
        "manifest": receipt.manifest_sha256,
        "measurement": receipt.measurement,
        "token": chain.token_sha256,
    }
    for what, holds in (
        ("outcome", (log.outcome, log.code) == (receipt.outcome, receipt.code)),
        ("probes", probes == [(p.probe, p.result.value, p.detail) for p in receipt.zeroization]),
        ("outputs", outputs == [_as_event(output) for output in receipt.outputs]),
        ("log segments", len(log.of(EventType.SEGMENT)) == receipt.segments),
        ("work", receipt.work is None or _borne_out(receipt.work, log)),
        ("digests", all(_agrees(e.body["subject"], e.body["sha256"], digests) for e in log.of(EventType.DIGEST))),
    ):
        if not holds:
            raise VerificationError(Code.LOG_INVALID, f"log and receipt tell different {what}")
    return replace(verdict, log=log, heads=None if heads is None else _verify_heads(chain, heads, log))


def verify_artifact(data: bytes, *, owner: OwnerPublic | bytes, now_us: int | None = None) -> ArtifactVerdict:
    """Check an artifact by itself; `jobs.artifact.compare` holds it to its bundle.

    Raises:
        VerificationError: `owner-mismatch` for one by another owner, `artifact-invalid` for any alteration and for a
            run of the future, `unsupported` for a level that no root of this version can verify.
    """
    public = _signing(owner)
    try:
        envelope = Envelope.parse(data, max_bytes=MAX_ARTIFACT_BYTES)
        if [name for name, _ in envelope.signatures] != [key_id(public)]:
            raise VerificationError(Code.OWNER_UNKNOWN, "an artifact by another owner than expected")
        artifact = Artifact.parse_signed(data, owner=public)
    except FormatError as error:
        raise VerificationError(Code.ARTIFACT_INVALID, f"not the artifact that the owner signed: {error}") from None
    if artifact.assurance not in REACHABLE:
        # No bundle that this version accepts has the level: nothing that it could be compared with bears it out.
        raise VerificationError(
            Code.UNSUPPORTED, f"an artifact of assurance {artifact.assurance}, which this version cannot verify"
        )
    _check_past(artifact.countersigned_us, now_us, Code.ARTIFACT_INVALID)
    return ArtifactVerdict(artifact=artifact)


def verify_package(
    stream: BinaryIO, *, owner: OwnerPublic | bytes, content: bool = False, package_key: bytes | None = None
) -> PackageVerdict:
    """Check a sealed package's public part, and with `content` every byte of its assets.

    Raises:
        PackageError, FormatError: as `Package.open`, `Package.unlock` and `AssetReader.verify`.
        UsageError: `usage` for `content` without the package's key.
    """
    package = Package.open(stream, owner_signing=_signing(owner))
    manifest = package.manifest
    assets: int | None = None
    content_bytes: int | None = None
    if content:
        if package_key is None:
            raise UsageError(
                Code.USAGE,
                "the content of a package can only be checked with its key",
                hint="verify it where it was sealed: the key is in that key store",
            )
        index = package.unlock(package_key)
        for entry in index.assets:
            package.asset(entry, package_key).verify()
        assets, content_bytes = len(index.assets), sum(entry.bytes for entry in index.assets)
    return PackageVerdict(
        package_id=manifest.package_id,
        manifest_sha256=manifest.sha256,
        assurance=manifest.floor.assurance.value,
        profile=manifest.floor.profile.value,
        assets=assets,
        content_bytes=content_bytes,
    )


def verify_file(
    path: Path,
    *,
    owner: OwnerPublic | bytes,
    content: bool = False,
    package_key: bytes | None = None,
    whole: bool = False,
    now_us: int | None = None,
) -> AnyVerdict:
    """Find out what a file is and verify it.

    A bundle is verified with the `events.log` and `heads.log` that lie beside it. A log that is named must be there,
    and the bundle that vouches for it beside it.

    Args:
        path: a receipt bundle, an artifact, a sealed package or an event log.
        owner: the owner, or their signing key.
        content: whether to open a package's content too.
        package_key: for `content`.
        whole: whether the file is the receipt of a run's own folder, where log and heads must be.
        now_us: the present, where it is known: what is dated in the future is refused.

    Raises:
        UsageError: `file-missing`, or `usage` for a file that is none of these.
        GlasshouseError: as the verifier of its kind.
    """
    required = frozenset(_LOGS[: _LOGS.index(path.name) + 1] if path.name in _LOGS else _LOGS if whole else ())
    if path.name in _LOGS:
        if not is_there(path):
            raise UsageError(Code.FILE_MISSING, f"there is no file {path}")
        if not is_there(path.with_name(BUNDLE_NAME)):
            raise VerificationError(
                Code.CHAIN_INCOMPLETE, f"a log proves nothing without the {BUNDLE_NAME} that vouches for it"
            )
        path = path.with_name(BUNDLE_NAME)
    try:
        with open_regular(path) as stream:
            start = stream.read(len(_PACKAGE_MAGIC))
            stream.seek(0)
            if start == _PACKAGE_MAGIC:
                return verify_package(stream, owner=owner, content=content, package_key=package_key)
            data = stream.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read {path}: {_why(path, error)}") from None
    if data.startswith(_ENVELOPE):
        return verify_artifact(data, owner=owner, now_us=now_us)
    verdict = verify_bundle(data, owner=owner, now_us=now_us)
    return verify_log_in(verdict, path.parent, required=required)


def of_run(verdict: AnyVerdict, run_id: str) -> Verdict:
    """Return the verdict on a run's own receipt: another run's, however good, says nothing about this one.

    Raises:
        VerificationError: `receipt-invalid`.
    """
    if not isinstance(verdict, Verdict):
        raise VerificationError(Code.CHAIN_RECEIPT, "the receipt is another document")
    if verdict.chain.receipt.run_id != run_id:
        raise VerificationError(Code.CHAIN_RECEIPT, "the receipt is of another run")
    return verdict


def kind_of(path: Path) -> str | None:
    """Return what a file claims to be, for people: nothing of it is verified; None when it claims nothing of ours."""
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_BUNDLE_BYTES + 1)
    except OSError:
        return None
    if path.name in _LOGS:
        return "log"
    if data.startswith(_PACKAGE_MAGIC):
        return "package"
    if data.startswith(_ENVELOPE):
        return "artifact"
    return "receipt" if BUNDLE_KIND.encode() in data else None


def verify_log_in(verdict: Verdict, folder: Path, *, required: Collection[str] = _LOGS) -> Verdict:
    """Check the `events.log` and `heads.log` of a folder as `verify_log_beside` does.

    Args:
        verdict: of the receipt.
        folder: where both lie.
        required: which of them must be there; another is checked if something stands under its name.

    Raises:
        VerificationError: `log-invalid` or `state-illegal`; `log-invalid` also for a file that is not there or is a
            link, a folder or a pipe.
    """
    wanted = [name for name in _LOGS if name in required or is_there(folder / name)]
    if LOG_NAME not in wanted:
        return verdict
    with ExitStack() as opened:
        try:
            streams = [opened.enter_context(open_regular(folder / name)) for name in wanted]
            heads = _head_lines(streams[1]) if len(streams) > 1 else None
            return verify_log_beside(verdict, read_lines(streams[0]), heads)
        except OSError as error:
            path = Path(error.filename or folder)
            raise VerificationError(
                Code.LOG_INVALID, f"{path} belongs to the run and cannot be read: {_why(path, error)}"
            ) from None


def verify_sealed_in(verdict: Verdict, folder: Path, *, expected: bool) -> Verdict:
    """Compare the sealed outputs and log segments in a receipt's folder with receipt and log, without opening them.

    Args:
        verdict: of the receipt, and of the log if there is one: the log names the segments.
        folder: where the receipt lies.
        expected: whether they must be there; otherwise a receipt that lies alone is left at that.

    Raises:
        PackageError: `output-tampered` for a file that is missing, is a link, a folder or a pipe, or is not the one
            that the receipt or the log names.
    """
    outputs, segments = sealed_files(verdict)
    for named, by in ((outputs, "receipt"), (segments, "log")):
        if not expected and not any(is_there(folder / name) for name, _, _ in named):
            continue
        for name, size, digest in named:
            _check_sealed(folder / name, size, digest, by)
        if by == "receipt":
            verdict = replace(verdict, outputs_match=len(named), unnamed=_unnamed(folder / "outputs", len(named)))
        elif verdict.log:
            unnamed = (*verdict.unnamed, *_unnamed(folder / "log", len(named)))
            verdict = replace(verdict, segments_match=len(named), unnamed=unnamed)
    return verdict


def sealed_files(verdict: Verdict) -> tuple[list[tuple[str, int, bytes]], list[tuple[str, int, bytes]]]:
    """Return name, size and digest of the outputs that a receipt names, and of the segments that its log does."""
    outputs = [(o.file_name, o.sealed_bytes, o.sealed_sha256) for o in verdict.chain.receipt.outputs]
    segments = [
        (segment_name(event), int(str(event.body["sealed_bytes"])), bytes.fromhex(str(event.body["sealed_sha256"])))
        for event in (verdict.log.of(EventType.SEGMENT) if verdict.log else ())
    ]
    return outputs, segments


def _unnamed(folder: Path, named: int) -> tuple[str, ...]:
    """Say how many entries a folder has beside those that are named, all of which are there."""
    more = sum(1 for _ in folder.iterdir()) - named if folder.is_dir() else 0
    return (f"what else lies in {folder.name}/ ({more})",) if more else ()


def segment_name(event: Event) -> str:
    """Return where a log segment lies in the run's folder, from the event that names it."""
    return f"log/{int(str(event.body['sequence'])):04d}.sealed"


def _check_sealed(path: Path, size: int, digest: bytes, by: str) -> None:
    try:
        with open_regular(path) as stream:
            same = os.fstat(stream.fileno()).st_size == size
            same = same and hashlib.file_digest(stream, "sha256").digest() == digest
    except OSError as error:
        raise PackageError(
            Code.OUTPUT_TAMPERED, f"{path} is named by the {by} but cannot be read: {_why(path, error)}"
        ) from None
    if not same:
        raise PackageError(Code.OUTPUT_TAMPERED, f"{path} is not the file that the {by} names")


def _why(path: Path, error: OSError) -> str:
    """Return why a file was not opened: a link, a folder or a pipe in its place is said as such."""
    if error.errno == errno.ENOENT:
        return "there is no such file"
    if is_there(path) and not stat.S_ISREG(path.lstat().st_mode):
        return "not a regular file"
    return (error.strerror or type(error).__name__).lower()


def _head_lines(stream: BinaryIO) -> Iterable[bytes]:
    while line := stream.readline(MAX_COUNTERSIGNED_HEAD_BYTES + 2):
        yield line


def _verify_heads(chain: Chain, lines: Iterable[bytes], log: VerifiedLog) -> int:
    """Check the countersigned heads of a run and return how many there are."""
    heads: list[CountersignedHead] = []
    for line in lines:
        if not chain.claims:
            raise VerificationError(Code.LOG_INVALID, "countersigned heads of a run whose key was never attested")
        if not line.endswith(b"\n"):
            raise VerificationError(Code.LOG_INVALID, f"line {len(heads)} of heads is cut short or too long")
        if len(heads) == log.head.size:  # before it is kept: copies of one genuine line would fill the memory
            raise VerificationError(Code.LOG_INVALID, "more heads than the log has events")
        try:
            found = CountersignedHead.parse(
                line[:-1],
                broker_public=chain.delegation.broker_public,
                evidence_public=chain.claims.evidence_public,
            )
        except FormatError as error:
            raise VerificationError(Code.LOG_INVALID, f"a line of heads that is none: {error.message}") from None
        heads.append(found)
    verify_heads([found.head for found in heads], log)
    _check_unbroken(chain, heads)
    return len(heads)


def _check_unbroken(chain: Chain, heads: Sequence[CountersignedHead]) -> None:
    """No head that the broker countersigned was taken out, and the last one is the bundle's."""
    size = time_us = 0
    for found in heads:
        # A full disk can lose a line of a run that fails of it; of one that completed every line is there.
        lost = found.previous_size > size and chain.receipt.outcome is not Outcome.COMPLETED
        if (found.previous_size != size and not lost) or found.time_us < time_us:
            raise VerificationError(Code.LOG_INVALID, f"head {found.head.sequence} does not follow the one before it")
        size, time_us = found.head.size, found.time_us
    if chain.countersigned_head and (not heads or heads[-1] != chain.countersigned_head):
        raise VerificationError(Code.LOG_INVALID, "the last of the heads is not the one that the receipt came with")


def _signing(owner: OwnerPublic | bytes) -> bytes:
    return owner if isinstance(owner, bytes) else owner.signing


def _check_past(time_us: int, now_us: int | None, code: Code) -> None:
    """Refuse what was closed in the future; where the present is not known, nothing is refused."""
    if now_us is not None and time_us > now_us + CLOCK_LEEWAY_US:
        raise VerificationError(
            code, f"it ended on {utc(time_us)}, which is in the future", hint="look at this machine's clock too"
        )


def _borne_out(work: Work, log: VerifiedLog) -> bool:
    """Return whether the work is of the unit of its own progress, and not less."""
    return log.done is None or (work.unit == log.done[0] and work.done >= log.done[1])


def _agrees(subject: Json, digest: Json, expected: dict[str, bytes | None]) -> bool:
    known = expected.get(str(subject))
    return known is not None and known.hex() == digest


def _as_event(output: Output) -> tuple[Json, ...]:
    return output.kind, output.of, output.plain_bytes, output.sealed_bytes, output.sealed_sha256.hex()
