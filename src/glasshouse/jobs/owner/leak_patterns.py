"""Patterns for the secret-leak scan: the secrets and names of a run, none of which may stand in its artifact."""

from __future__ import annotations

from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.keystore import KeyStore
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.package.read import Package


def leak_patterns(folder: RunFolder, record: RunRecord, *, home: Home, identity: Identity) -> list[bytes | str]:
    """Return what must not be public: keys, names of inputs and of the job, paths on the owner's side.

    Raises:
        UsageError, PackageError, FormatError: the package does not open, so that its contents are unknown.
    """
    key = KeyStore(home.keys).get(
        record.package_id, manifest_sha256=bytes.fromhex(record.manifest_sha256), sealing=identity.sealing
    )
    found: list[bytes | str] = [key, identity.signing.seed(), identity.sealing.private()]
    with record.package.open("rb") as stream:
        index = Package.open(stream, owner_signing=identity.signing.public).unlock(key)
        for entry in index.assets:
            found += [entry.path, *entry.path.split("/"), entry.digest]
    found += [record.name, str(record.package), str(home.path), str(folder.path)]
    return [one for one in found if one]
