"""Package keys at rest: each sealed by HPKE to the owner and to any backup recipients (ADR 0006)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.files import read_bounded, write_private
from glasshouse.wire.aead import KEY_BYTES
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.hpke import OVERHEAD_BYTES, RecipientKey, recipient_id, seal
from glasshouse.wire.kdf import lengths_prefixed

__all__ = ["KeyStore"]

_KIND = "glasshouse-package-key"
_MAX_BYTES = 65536
_MAX_RECIPIENTS = 16


class KeyStore:
    """The folder of sealed package keys.

    Args:
        folder: `keys/` of the state home.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, package_key: bytes, *, package_id: str, manifest_sha256: bytes, recipients: Sequence[bytes]) -> Path:
        """Seal a package's key to its recipients and return where it lies.

        Args:
            package_key: 32 bytes.
            package_id: 32 hex characters.
            manifest_sha256: the manifest hash; the entry opens for this manifest only.
            recipients: HPKE public keys, the owner's first.

        Raises:
            UsageError: `usage` or `disk-full`.
        """
        info = _info(package_id, manifest_sha256)
        sealed: list[Json] = [
            {"recipient": recipient_id(public), "sealed": b64encode(seal(package_key, recipient=public, info=info))}
            for public in recipients
        ]
        entry: dict[str, Json] = {
            "kind": _KIND,
            "manifest_sha256": manifest_sha256.hex(),
            "package_id": package_id,
            "recipients": sealed,
            "version": 1,
        }
        path = self.path(package_id)
        write_private(path, encode(entry) + b"\n", replace=False)
        return path

    def get(self, package_id: str, *, manifest_sha256: bytes, sealing: RecipientKey) -> bytes:
        """Return a package's key.

        Raises:
            UsageError: `file-missing` when there is no entry, `identity` when it is not for this key, or is
                of another manifest or damaged.
        """
        path = self.path(package_id)
        if not path.exists():
            raise UsageError(
                Code.FILE_MISSING,
                f"the key of package {package_id} is not in {self._folder}",
                hint="the key stays where the package was sealed; copy that entry, or run from there",
            )
        mine = recipient_id(sealing.public)
        try:
            found = _parse(read_bounded(path, max_bytes=_MAX_BYTES, what="key"), package_id, manifest_sha256)
            if mine not in found:
                raise UsageError(Code.IDENTITY, f"the key of package {package_id} is sealed to another identity")
            key = sealing.open(found[mine], info=_info(package_id, manifest_sha256))
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


def _parse(data: bytes, package_id: str, manifest_sha256: bytes) -> dict[str, bytes]:
    fields = Fields(decode(data.rstrip(b"\n"), max_bytes=_MAX_BYTES), "key")
    fields.choice("kind", [_KIND])
    fields.integer("version", low=1, high=1)
    fields.choice("package_id", [package_id])
    if fields.digest("manifest_sha256") != manifest_sha256:
        raise FormatError(Code.MANIFEST_MISMATCH, "it belongs to another manifest")
    found: dict[str, bytes] = {}
    for item in fields.items("recipients", max_items=_MAX_RECIPIENTS):
        one = Fields(item, "key.recipients")
        found[one.text("recipient", max_chars=32)] = one.octets("sealed", length=KEY_BYTES + OVERHEAD_BYTES)
        one.end()
    fields.end()
    return found
