"""`verify`: is this document genuine, by this owner, and what does it say? Offline, from the file and `owner.pub`.

Composed here from the rooms below, none of which knows the whole chain. A verdict never stands without
its assurance level.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from glasshouse.errors import Code, FormatError, PackageError, UsageError, VerificationError
from glasshouse.evidence.artifact import MAX_ARTIFACT_BYTES, Artifact
from glasshouse.evidence.bundle import BUNDLE_KIND, MAX_BUNDLE_BYTES
from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, CountersignedHead
from glasshouse.evidence.log import VerifiedLog, read_lines, verify_heads, verify_log
from glasshouse.evidence.results import PACED, Output
from glasshouse.jobs.chain import Chain, walk
from glasshouse.jobs.files import is_file, is_there, open_regular
from glasshouse.jobs.identity import OwnerPublic
from glasshouse.jobs.verdict import AnyVerdict, ArtifactVerdict, PackageVerdict, Status, Verdict
from glasshouse.package.read import Package
from glasshouse.wire.canonical import Json
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.signing import key_id

__all__ = [
    "AnyVerdict",
    "ArtifactVerdict",
    "PackageVerdict",
    "Status",
    "Verdict",
    "kind_of",
    "verify_artifact",
    "verify_bundle",
    "verify_file",
    "verify_log_beside",
    "verify_log_in",
    "verify_outputs_in",
    "verify_package",
]

LOG_NAME = "events.log"
HEADS_NAME = "heads.log"
BUNDLE_NAME = "receipt.json"
_PACKAGE_MAGIC = b"\x89GHS"
# Canonical JSON: an envelope's first key, which a bundle does not have.
_ENVELOPE = b'{"payload":'


def verify_bundle(data: bytes, *, owner: OwnerPublic | bytes) -> Verdict:
    """Walk a receipt bundle from the owner's key to what happened.

    Args:
        data: the bundle's bytes.
        owner: the owner, or their signing key, known from elsewhere than the bundle.

    Raises:
        FormatError: it is not a bundle.
        VerificationError: with the code of the link that does not hold.
    """
    return Verdict(chain=walk(data, owner=_signing(owner)))


def verify_log_beside(verdict: Verdict, lines: Iterable[bytes], heads: Iterable[bytes] = ()) -> Verdict:
    """Check the event log that lies beside a bundle, and that both tell the same story.

    Args:
        verdict: of the bundle.
        lines: of `events.log`, as `read_lines` yields them.
        heads: lines of `heads.log`.

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
        ("pacing", receipt.work is None or log.paced == (receipt.work.stop_reason == PACED)),
        ("log segments", len(log.of(EventType.SEGMENT)) == receipt.segments),
        ("digests", all(_agrees(e.body["subject"], e.body["sha256"], digests) for e in log.of(EventType.DIGEST))),
    ):
        if not holds:
            raise VerificationError(Code.LOG_INVALID, f"log and receipt tell different {what}")
    _verify_heads(chain, heads, log)
    return Verdict(chain=chain, log=log)


def verify_artifact(data: bytes, *, owner: OwnerPublic | bytes) -> ArtifactVerdict:
    """Check an artifact.

    Raises:
        VerificationError: `owner-mismatch` for one by another owner, `artifact-invalid` for any alteration.
    """
    public = _signing(owner)
    try:
        envelope = Envelope.parse(data, max_bytes=MAX_ARTIFACT_BYTES)
        if [name for name, _ in envelope.signatures] != [key_id(public)]:
            raise VerificationError(Code.OWNER_UNKNOWN, "an artifact by another owner than expected")
        return ArtifactVerdict(artifact=Artifact.parse_signed(data, owner=public))
    except FormatError as error:
        raise VerificationError(Code.ARTIFACT_INVALID, f"not the artifact that the owner signed: {error}") from None


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
    path: Path, *, owner: OwnerPublic | bytes, content: bool = False, package_key: bytes | None = None
) -> AnyVerdict:
    """Find out what a file is and verify it.

    A bundle is verified with the `events.log` and `heads.log` that lie beside it, if they do; for an event log,
    the bundle beside it is needed.

    Args:
        path: a receipt bundle, an artifact, a sealed package or an event log.
        owner: the owner, or their signing key.
        content: whether to open a package's content too.
        package_key: for `content`.

    Raises:
        UsageError: `file-missing`, or `usage` for a file that is none of these.
        GlasshouseError: as the verifier of its kind.
    """
    if path.name in (LOG_NAME, HEADS_NAME):
        if not is_file(path.with_name(BUNDLE_NAME)):
            raise VerificationError(
                Code.CHAIN_INCOMPLETE, f"a log proves nothing without the {BUNDLE_NAME} that vouches for it"
            )
        path = path.with_name(BUNDLE_NAME)
    if not is_file(path):
        raise UsageError(Code.FILE_MISSING, f"there is no file {path}")
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_PACKAGE_MAGIC))
            stream.seek(0)
            if start == _PACKAGE_MAGIC:
                return verify_package(stream, owner=owner, content=content, package_key=package_key)
            data = stream.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(Code.FILE_MISSING, f"cannot read {path}: {reason}") from None
    if data.startswith(_ENVELOPE):
        return verify_artifact(data, owner=owner)
    verdict = verify_bundle(data, owner=owner)
    return verify_log_in(verdict, path.parent)


def kind_of(path: Path) -> str | None:
    """Return what a file claims to be, for people: nothing of it is verified; None when it claims nothing of ours."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BUNDLE_BYTES + 1)
    except OSError:
        return None
    if path.name in (LOG_NAME, HEADS_NAME):
        return "log"
    if data.startswith(_PACKAGE_MAGIC):
        return "package"
    if data.startswith(_ENVELOPE):
        return "artifact"
    return "receipt" if BUNDLE_KIND.encode() in data else None


def verify_log_in(verdict: Verdict, folder: Path) -> Verdict:
    """Check the `events.log` and `heads.log` of a folder, as far as they are there, as `verify_log_beside` does.

    Raises:
        VerificationError: `log-invalid` or `state-illegal`.
        UsageError: `file-missing` for one that cannot be read.
    """
    log, heads = folder / LOG_NAME, folder / HEADS_NAME
    if not is_file(log):
        return verdict
    try:
        with log.open("rb") as lines:
            if not is_file(heads):
                return verify_log_beside(verdict, read_lines(lines))
            with heads.open("rb") as kept:
                return verify_log_beside(verdict, read_lines(lines), _head_lines(kept))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(Code.FILE_MISSING, f"cannot read the log in {folder}: {reason}") from None


def verify_outputs_in(verdict: Verdict, folder: Path, *, expected: bool) -> Verdict:
    """Compare the sealed outputs in a receipt's folder with it, byte for byte, without opening them.

    Args:
        verdict: of the receipt.
        folder: where the receipt lies.
        expected: whether the outputs must be there; otherwise a receipt that lies alone is left at that.

    Raises:
        PackageError: `output-tampered` for an output that is missing or is not the one that the receipt names.
    """
    outputs = verdict.chain.receipt.outputs
    if not expected and not any(is_there(folder / output.file_name) for output in outputs):
        return verdict
    for output in outputs:
        path = folder / output.file_name
        try:
            with open_regular(path) as stream:
                same = os.fstat(stream.fileno()).st_size == output.sealed_bytes
                same = same and hashlib.file_digest(stream, "sha256").digest() == output.sealed_sha256
        except OSError:
            raise PackageError(Code.OUTPUT_TAMPERED, f"{path} is named by the receipt but not there") from None
        if not same:
            raise PackageError(Code.OUTPUT_TAMPERED, f"{path} is not the output that the receipt names")
    return replace(verdict, outputs_match=len(outputs))


def _head_lines(stream: BinaryIO) -> Iterable[bytes]:
    while line := stream.readline(MAX_COUNTERSIGNED_HEAD_BYTES + 2):
        yield line


def _verify_heads(chain: Chain, lines: Iterable[bytes], log: VerifiedLog) -> None:
    if not chain.claims:
        for _ in lines:
            raise VerificationError(Code.LOG_INVALID, "countersigned heads of a run whose key was never attested")
        return
    heads = []
    for line in lines:
        try:
            found = CountersignedHead.parse(
                line.rstrip(b"\n"),
                broker_public=chain.delegation.broker_public,
                evidence_public=chain.claims.evidence_public,
            )
        except FormatError as error:
            raise VerificationError(Code.LOG_INVALID, f"a line of heads that is none: {error.message}") from None
        heads.append(found.head)
    verify_heads(heads, log)


def _signing(owner: OwnerPublic | bytes) -> bytes:
    return owner if isinstance(owner, bytes) else owner.signing


def _agrees(subject: Json, digest: Json, expected: dict[str, bytes | None]) -> bool:
    known = expected.get(str(subject))
    return known is not None and known.hex() == digest


def _as_event(output: Output) -> tuple[Json, ...]:
    return output.kind, output.of, output.plain_bytes, output.sealed_bytes, output.sealed_sha256.hex()
