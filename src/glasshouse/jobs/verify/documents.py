"""Verifies that a document is genuine and by its owner; offline, from the file and `owner.pub`.

A verdict never stands without its assurance level.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from glasshouse.attestation.roots.root_table import REACHABLE
from glasshouse.errors import Code, FormatError, UsageError, VerificationError
from glasshouse.evidence.artifact import MAX_ARTIFACT_BYTES, Artifact
from glasshouse.evidence.bundle import BUNDLE_KIND
from glasshouse.evidence.receipt import CLOCK_LEEWAY_US, MAX_BUNDLE_BYTES
from glasshouse.jobs.owner.durations import utc
from glasshouse.jobs.owner.files import is_there, open_regular
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.jobs.verify.owner_verdicts import AnyVerdict, ArtifactVerdict, PackageVerdict
from glasshouse.jobs.verify.receipt_chain import walk
from glasshouse.jobs.verify.run_files import LOGS, verify_log_in, why_unreadable
from glasshouse.jobs.verify.verdict import Verdict
from glasshouse.package.content import verify_content
from glasshouse.package.read import Package
from glasshouse.wire.crypto import key_id
from glasshouse.wire.dsse import Envelope

BUNDLE_NAME = "receipt.json"
_PACKAGE_MAGIC = b"\x89GHS"
# Canonical JSON: an envelope's first key, which a bundle does not have.
_ENVELOPE = b'{"payload":'


def verify_bundle(data: bytes, *, owner: OwnerPublic | bytes, now_us: int | None = None) -> Verdict:
    """Walk a receipt bundle from the owner's key to what happened.

    Args:
        owner: the owner, or their signing key, known from elsewhere than the bundle.
        now_us: the present, where it is known: a run of the future is refused.

    Raises:
        FormatError: it is not a bundle.
        VerificationError: with the code of the link that does not hold.
    """
    chain = walk(data, owner=_signing(owner))
    _check_past(chain.closed_us, now_us, Code.CHAIN_RECEIPT)
    return Verdict(chain=chain)


def verify_artifact(data: bytes, *, owner: OwnerPublic | bytes, now_us: int | None = None) -> ArtifactVerdict:
    """Check an artifact by itself; `publish.compare` holds it to its bundle.

    Raises:
        VerificationError: `owner-mismatch` for one by another owner, `artifact-invalid` for any alteration and for a
            run of the future, `unsupported` for a level that no root of this version can verify.
    """
    public = _signing(owner)
    try:
        envelope = Envelope.parse(data, max_bytes=MAX_ARTIFACT_BYTES)
        if [name for name, _ in envelope.signatures] != [key_id(public)]:
            raise VerificationError(Code.OWNER_UNKNOWN, "an artifact by another owner than expected")
        artifact = Artifact.parse_signed(data, public)
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
    assets = content_bytes = None
    if content:
        if package_key is None:
            raise UsageError(
                Code.USAGE,
                "the content of a package can only be checked with its key",
                hint="verify it where it was sealed: the key is in that key store",
            )
        index = package.unlock(package_key)
        for entry in index.assets:
            verify_content(package.asset(entry, package_key))
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
    """Verify a receipt bundle, an artifact, a sealed package or an event log.

    A bundle is verified with the `events.log` and `heads.log` that lie beside it. A log that is named must be there,
    and the bundle that vouches for it beside it.

    Args:
        content: whether to open a package's content too, with its key.
        whole: whether the file is the receipt of a run's own folder, where log and heads must be.
        now_us: the present, where it is known: what is dated in the future is refused.

    Raises:
        UsageError: `file-missing`, or `usage` for a file that is none of these.
        GlasshouseError: as the verifier of its kind.
    """
    required = frozenset(LOGS[: LOGS.index(path.name) + 1] if path.name in LOGS else LOGS if whole else ())
    if path.name in LOGS:
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
        raise UsageError(Code.FILE_MISSING, f"cannot read {path}: {why_unreadable(path, error)}") from None
    if data.startswith(_ENVELOPE):
        return verify_artifact(data, owner=owner, now_us=now_us)
    verdict = verify_bundle(data, owner=owner, now_us=now_us)
    return verify_log_in(verdict, path.parent, required=required)


def of_run(verdict: AnyVerdict, run_id: str) -> Verdict:
    """Return the verdict on a run's own receipt; raises `VerificationError` for another run's, however good."""
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
    if path.name in LOGS:
        return "log"
    if data.startswith(_PACKAGE_MAGIC):
        return "package"
    if data.startswith(_ENVELOPE):
        return "artifact"
    return "receipt" if BUNDLE_KIND.encode() in data else None


def _signing(owner: OwnerPublic | bytes) -> bytes:
    return owner if isinstance(owner, bytes) else owner.signing


def _check_past(time_us: int, now_us: int | None, code: Code) -> None:
    """Refuse what was closed in the future; where the present is not known, nothing is refused."""
    if now_us is not None and time_us > now_us + CLOCK_LEEWAY_US:
        raise VerificationError(
            code, f"it ended on {utc(time_us)}, which is in the future", hint="look at this machine's clock too"
        )
