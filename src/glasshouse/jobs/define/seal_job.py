"""Seals a job: the owner's files under a fresh package key, the manifest under the owner's signature.

Law: a package never appears without its key. It is written under a temporary name, its key and record are stored, and
then it gets its final name; a failure before that leaves nothing, and one after it leaves the key with the package.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.define.job_content import content_of
from glasshouse.jobs.define.jobfile import Job
from glasshouse.jobs.define.package_records import PackageRecord, public_part
from glasshouse.jobs.owner.home import Home, is_there, write_private
from glasshouse.jobs.owner.keystore import KeyStore
from glasshouse.jobs.owner.owner_identity import Identity, read_public
from glasshouse.package.manifest import Manifest
from glasshouse.package.write import write
from glasshouse.wire.crypto import KEY_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """A sealed job.

    Attributes:
        path: of the package.
        name: the job's.
        manifest: its public manifest.
        files, plain_bytes: how much went in.
        left_out: what of the inputs' folders did not.
        notes: what of them could not be checked here, or a run will pass over.
        package_bytes: how long the package is.
        seconds: how long sealing it took.
    """

    path: Path
    name: str
    manifest: Manifest
    files: int
    plain_bytes: int
    package_bytes: int
    seconds: float
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def seal(
    job: Job,
    *,
    out: Path,
    home: Home,
    identity: Identity,
    replace: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Sealed:
    """Seal a job into one file and keep its key; `progress` gets the plaintext bytes sealed so far, and in all.

    Raises:
        UsageError: `file-missing`, `job-invalid`, `model-not-found`, `source-changed`, `disk-full` or `usage`.
        PackageError: `package-path` or `package-limit` for what a package cannot hold.
    """
    began = time.monotonic()
    packed = content_of(job)
    # The owner first, then each backup once.
    recipients = tuple(dict.fromkeys([identity.public.sealing, *(read_public(path).sealing for path in job.backups)]))
    package_id, package_key = secrets.token_hex(16), secrets.token_bytes(KEY_BYTES)
    store, written = KeyStore(home.keys), list[Manifest]()
    record = PackageRecord(package_id=package_id, name=job.name, workload=job.workload, deployment=job.deployment)

    def content(stream: BinaryIO) -> None:
        sealed = write(
            stream,
            sources=packed.sources,
            job=dict(packed.params),
            workload=job.workload,
            floor=job.floor,
            owner=identity.signing,
            owner_sealing=identity.sealing.public,
            recipients=recipients,
            package_key=package_key,
            package_id=package_id,
            suite=job.suite,
            chunk_bytes=job.chunk_bytes,
            progress=progress,
        )
        written.append(sealed.manifest)
        store.put(
            package_key,
            package_id=package_id,
            manifest_sha256=sealed.manifest.sha256,
            recipients=recipients,
        )
        record.save(home)

    if is_there(out) and not replace:
        raise UsageError(Code.USAGE, f"{out} exists already", hint="--force replaces it")
    try:
        write_private(out, content, replace=replace)
    except BaseException:
        if not _stands(out, package_id):
            store.remove(package_id)
            record.remove(home)
        raise
    return Sealed(
        path=out,
        name=job.name,
        manifest=written[0],
        files=len(packed.sources),
        plain_bytes=sum(source.bytes for source in packed.sources),
        package_bytes=out.stat().st_size,
        seconds=time.monotonic() - began,
        left_out=tuple(packed.left_out),
        notes=tuple(packed.notes),
    )


def _stands(path: Path, package_id: str) -> bool:
    """Return whether this very package has its final name."""
    try:
        return public_part(path)[0].package_id == package_id
    except GlasshouseError:
        return False
