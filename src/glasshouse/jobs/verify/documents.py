"""Verifies that a document is genuine and by its owner; offline, from the file and `owner.pub`.

A verdict never stands without its assurance level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

from glasshouse.errors import Code, ExitCode, UsageError, VerificationError
from glasshouse.evidence.bundle import BUNDLE_KIND
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES
from glasshouse.jobs.owner.home import is_there, open_regular
from glasshouse.jobs.verify.line_verdict import LineVerdict, verify_line
from glasshouse.jobs.verify.publish import ArtifactVerdict, verify_artifact
from glasshouse.jobs.verify.run_files import LOGS, verify_log_in, why_unreadable
from glasshouse.jobs.verify.verdict import Verdict, verify_bundle
from glasshouse.package.content import verify_content
from glasshouse.package.layout import MAGIC
from glasshouse.package.read import Package
from glasshouse.wire.canonical import Json
from glasshouse.wire.lines.statements import LINE_START, MAX_LINE_BYTES

BUNDLE_NAME = "receipt.json"
_PACKAGE = MAGIC[:4]  # also of one whose magic a transfer damaged
# Canonical JSON: an envelope's first key, which a bundle does not have.
_ENVELOPE = b'{"payload":'


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageVerdict:
    """A package that the owner signed."""

    package_id: str  # which
    manifest_sha256: bytes
    assurance: str  # the floor that every run of it must meet
    profile: str
    assets: int | None  # what was opened and compared with its digests; None when only the public part was
    content_bytes: int | None

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command with this verdict."""
        return ExitCode.DONE

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the level that the package demands."""
        demand = f"demands at least assurance {self.assurance}, hardening {self.profile}"
        if self.assets is None:
            return f"Signed by its owner ({demand}); its content was not opened."
        return f"Signed by its owner ({demand}); all {self.assets} assets opened and match their digests."

    def to_json(self) -> dict[str, Json]:
        """Return the verdict for `verify --json`."""
        return {
            "assets": self.assets,
            "assurance": self.assurance,
            "content_bytes": self.content_bytes,
            "hardening": self.profile,
            "kind": "package",
            "package": {"id": self.package_id, "manifest_sha256": self.manifest_sha256.hex()},
            "status": "authentic",
            "verdict": self.sentence,
        }


AnyVerdict: TypeAlias = Verdict | ArtifactVerdict | LineVerdict | PackageVerdict


def verify_package(
    stream: BinaryIO, *, owner: bytes, content: bool = False, package_key: bytes | None = None
) -> PackageVerdict:
    """Check a sealed package's public part, and with `content` every byte of its assets.

    Raises:
        PackageError, FormatError: as `Package.open`, `Package.unlock` and `AssetReader.verify`.
        UsageError: `usage` for `content` without the package's key.
    """
    package = Package.open(stream, owner_signing=owner)
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
    owner: bytes,
    content: bool = False,
    package_key: bytes | None = None,
    whole: bool = False,
    now_us: int | None = None,
    run_id: str | None = None,
) -> AnyVerdict:
    """Verify a receipt bundle, an artifact, a sealed package, a line file or an event log.

    A bundle is verified with the `events.log` and `heads.log` that lie beside it. A log that is named must be there,
    and the bundle that vouches for it beside it.

    Args:
        content: whether to open a package's content too, with its key.
        whole: whether the file is the receipt of a run's own folder, where log and heads must be.
        now_us, run_id: as of `verify_bundle`.

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
            start = stream.read(len(_PACKAGE))
            stream.seek(0)
            if start == _PACKAGE:
                return verify_package(stream, owner=owner, content=content, package_key=package_key)
            data = stream.read(MAX_BUNDLE_BYTES + 1)
            if data.startswith(LINE_START):
                return verify_line(data + stream.read(MAX_LINE_BYTES), owner=owner, now_us=now_us)
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read {path}: {why_unreadable(path, error)}") from None
    if data.startswith(_ENVELOPE):
        return verify_artifact(data, owner=owner, now_us=now_us)
    verdict = verify_bundle(data, owner=owner, now_us=now_us, run_id=run_id)
    log, heads = verify_log_in(verdict.chain, path.parent, required=required)
    return replace(verdict, log=log, heads=heads)


def kind_of(path: Path) -> str | None:
    """Return what a file claims to be, for people: nothing of it is verified; None when it claims nothing of ours."""
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_BUNDLE_BYTES + 1)
    except OSError:
        return None
    if path.name in LOGS:
        return "log"
    if data.startswith(_PACKAGE):
        return "package"
    if data.startswith(_ENVELOPE):
        return "artifact"
    if data.startswith(LINE_START):
        return "line"
    return "receipt" if BUNDLE_KIND.encode() in data else None
