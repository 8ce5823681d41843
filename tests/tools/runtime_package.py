"""A sealed package on disk with everything that its owner knows about it."""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glasshouse.package.manifest import Manifest
from glasshouse.package.write import Source, write
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import RecipientKey, SigningKey
from glasshouse.wire.policy import Assurance, Floor, Profile

SCRIPT = "print('hello')\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnersPackage:
    path: Path
    key: bytes
    owner: SigningKey
    recipient: RecipientKey
    manifest: Manifest
    envelope: bytes
    files: Mapping[str, bytes]


def seal(
    path: Path,
    files: Mapping[str, bytes],
    *,
    job: dict[str, Json] | None = None,
    workload: str = "script",
    profile: Profile = Profile.STANDARD,
    chunk_bytes: int = 1 << 16,
    owner: SigningKey | None = None,
    egress: tuple[str, ...] = (),
    disk: bool = False,
) -> OwnersPackage:
    owner, recipient, key = owner or SigningKey.generate(), RecipientKey.generate(), secrets.token_bytes(32)
    with path.open("w+b") as out:
        sealed = write(
            out,
            sources=[
                Source(path=name, bytes=len(data), open=lambda data=data: io.BytesIO(data))
                for name, data in sorted(files.items())
            ],
            job=job or {},
            workload=workload,
            floor=Floor(assurance=Assurance.SOFTWARE, profile=profile, egress=egress, disk=disk),
            owner=owner,
            owner_sealing=recipient.public,
            recipients=[recipient.public],
            package_key=key,
            package_id=secrets.token_hex(16),
            chunk_bytes=chunk_bytes,
        )
    return OwnersPackage(
        path=path,
        key=key,
        owner=owner,
        recipient=recipient,
        manifest=sealed.manifest,
        envelope=sealed.envelope,
        files=files,
    )
