"""Packages on their owner's side: keys at rest, sealed to the owner and to backups (ADR 0006), and records.

A record has a label, and how to deploy; nothing in it is signed or secret. One that is missing means the defaults of
`Deployment`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.define.wanted import Deployment
from glasshouse.jobs.owner.home import Home, private_folder, read_bounded, read_state, write_private, write_state
from glasshouse.package.manifest import Manifest
from glasshouse.package.read import Package
from glasshouse.wire.crypto import HPKE_OVERHEAD_BYTES, KEY_BYTES, RecipientKey, hpke_seal, key_id, lengths_prefixed
from glasshouse.wire.record import LEFT_OUT, Id, Record, Sha256, items, octets, text

_MAX_BYTES = 65536
_KIND = "glasshouse-package-key"


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTo(Record, name="gate"):
    """A gate that a package's key was sent to."""

    name: Annotated[str, text()]  # what it was called then
    public: Sha256  # its signing key, by which it is found whatever it is called
    deployed: bool  # whether it confirmed that it has the key; otherwise it may have it


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageRecord(Record, name="package record"):
    """The owner's record of a package."""

    package_id: Id
    name: Annotated[str, text(1024)]  # label for people
    workload: Annotated[str, text()]  # `mlp`, `lora` or `script`
    deployment: Deployment  # how to deploy it
    revoked: bool = False  # whether its owner has revoked its key
    gates: Annotated[tuple[GivenTo, ...], items(4096), LEFT_OUT] = ()  # those that stay and were given its key

    def save(self, home: Home) -> None:
        """Write the record; raises `UsageError`."""
        write_state(private_folder(home.packages) / f"{self.package_id}.json", self.to_json())

    def given_to(self, gate: GivenTo) -> PackageRecord:
        """Return the record with one more gate; an earlier confirmation still counts."""
        deployed = gate.deployed or any(one.deployed for one in self.gates if one.public == gate.public)
        others = tuple(one for one in self.gates if one.public != gate.public)
        return replace(self, gates=(*others, replace(gate, deployed=deployed)))

    def remove(self, home: Home) -> None:
        """Forget a package that never got its name."""
        with contextlib.suppress(OSError):
            (home.packages / f"{self.package_id}.json").unlink()

    @classmethod
    def load(cls, home: Home, package_id: str, *, workload: str) -> PackageRecord:
        """Return the record, or the defaults for a package from elsewhere; raises `UsageError` when it is damaged."""
        path = home.packages / f"{package_id}.json"
        if not path.exists():
            return cls(package_id=package_id, name=package_id[:8], workload=workload, deployment=Deployment())
        value = read_state(path, what="package record")
        try:
            return cls.from_json(cls.known(value))
        except FormatError:
            raise UsageError(Code.USAGE, f"the package record {path} is damaged") from None


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


def public_part(path: Path, *, owner_signing: bytes | None = None) -> tuple[Manifest, bytes]:
    """Return a package's checked public manifest and its envelope; raises as `Package.open`, or `UsageError`."""
    try:
        with path.open("rb") as stream:
            package = Package.open(stream, owner_signing=owner_signing)
            return package.manifest, package.envelope
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read the package {path}: {error.strerror}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _SealedKey(Record, name="key.recipients"):
    recipient: Annotated[str, text(32)]
    sealed: Annotated[bytes, octets(KEY_BYTES + HPKE_OVERHEAD_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry(Record, name="key", max_bytes=_MAX_BYTES, constants={"kind": _KIND, "version": 1}):
    package_id: Id
    manifest_sha256: Sha256
    recipients: Annotated[tuple[_SealedKey, ...], items(16)]


class KeyStore:
    """The folder of sealed package keys, `keys/` of the state home."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, package_key: bytes, *, package_id: str, manifest_sha256: bytes, recipients: Sequence[bytes]) -> Path:
        """Seal a package's key to HPKE public keys, for one manifest, and return where it lies; raises `UsageError`."""
        info = _info(package_id, manifest_sha256)
        sealed = [
            _SealedKey(recipient=key_id(public), sealed=hpke_seal(package_key, recipient=public, info=info))
            for public in recipients
        ]
        entry = _Entry(package_id=package_id, manifest_sha256=manifest_sha256, recipients=tuple(sealed))
        path = self.path(package_id)
        write_private(path, entry.encode() + b"\n", replace=False)
        return path

    def get(self, package_id: str, *, manifest_sha256: bytes, sealing: RecipientKey) -> bytes:
        """Return a package's key; raises `UsageError`: `file-missing`, or `identity` where the entry does not open."""
        path = self.path(package_id)
        if not path.exists():
            raise UsageError(
                Code.FILE_MISSING,
                f"the key of package {package_id} is not in {self._folder}",
                hint="the key stays where the package was sealed; copy that entry, or run from there",
            )
        try:
            entry = _Entry.parse(read_bounded(path, max_bytes=_MAX_BYTES, what="key").rstrip(b"\n"))
            if (entry.package_id, entry.manifest_sha256) != (package_id, manifest_sha256):
                raise FormatError(Code.MANIFEST_MISMATCH, "it belongs to another manifest")
            found = {one.recipient: one.sealed for one in entry.recipients}.get(key_id(sealing.public))
            if found is None:
                raise UsageError(Code.IDENTITY, f"the key of package {package_id} is sealed to another identity")
            key = sealing.open(found, info=_info(package_id, manifest_sha256))
        except FormatError as error:
            raise UsageError(Code.IDENTITY, f"the key of package {package_id} does not open: {error.message}") from None
        if len(key) != KEY_BYTES:
            raise UsageError(Code.IDENTITY, f"the key of package {package_id} is damaged")
        return key

    def remove(self, package_id: str) -> None:
        """Forget a key that nothing was sealed under."""
        self.path(package_id).unlink(missing_ok=True)

    def path(self, package_id: str) -> Path:
        return self._folder / f"{package_id}.json"


def _info(package_id: str, manifest_sha256: bytes) -> bytes:
    return lengths_prefixed(b"glasshouse package key v1", bytes.fromhex(package_id), manifest_sha256)
