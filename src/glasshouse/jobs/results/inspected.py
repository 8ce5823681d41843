"""What a stranger may know of a sealed package, for programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glasshouse.jobs.define.package_records import public_part
from glasshouse.jobs.owner.home import Home, is_file
from glasshouse.jobs.owner.known_owners import Anchor, OwnerTrust, recognise
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.package.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """The public facts of a sealed package, whose signature holds.

    Attributes:
        path: of the package.
        manifest: workload, policy, recipients, sizes.
        trust: whose it is, and where that key came from.
        yours: whether its owner is this home's; None where the home has no identity.
        key_here: whether its key is in this home's key store.
        bytes: how long the file is.
    """

    path: Path
    manifest: Manifest
    trust: OwnerTrust
    yours: bool | None
    key_here: bool
    bytes: int


def inspect(package: Path | str, *, home: Path | str | None = None) -> Inspected:
    """Read a package's public facts and check its signature; nothing is decrypted.

    Raises:
        UsageError: `file-missing`.
        PackageError, FormatError: it is no package, or not as it was signed.
    """
    place, path = Home.locate(None if home is None else Path(home)), Path(package)
    manifest, _envelope = public_part(path)
    trust = recognise(place, OwnerPublic(signing=manifest.owner_signing, sealing=manifest.owner_sealing))
    return Inspected(
        path=path,
        manifest=manifest,
        trust=trust,
        yours=trust.anchor is Anchor.YOURS if is_file(place.owner_public) else None,
        key_here=is_file(place.keys / f"{manifest.package_id}.json"),
        bytes=path.stat().st_size,
    )
