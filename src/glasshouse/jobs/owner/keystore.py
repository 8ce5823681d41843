"""Package keys at rest: each sealed by HPKE to the owner and to any backup recipients (ADR 0006)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import read_bounded, write_private
from glasshouse.wire.crypto import HPKE_OVERHEAD_BYTES, KEY_BYTES, RecipientKey, hpke_seal, key_id, lengths_prefixed
from glasshouse.wire.record import Id, Record, Sha256, items, octets, text

_MAX_BYTES = 65536
_KIND = "glasshouse-package-key"


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
