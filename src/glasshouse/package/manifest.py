"""The public manifest: all that a stranger may know of a package, signed by its owner (spec/sealed-package.md 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.package.layout import (
    MAX_ASSETS_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_INDEX_BYTES,
    VERSION,
    VERSIONS,
    Header,
    check_chunk_bytes,
    check_id,
)
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Codec
from glasshouse.wire.crypto import HPKE_PUBLIC_BYTES, SigningKey, Suite, check_recipient, sha256
from glasshouse.wire.policy import WORKLOADS, Floor
from glasshouse.wire.record import Id, Member, Record, Sha256, choice, items, octets

MANIFEST_TYPE = "application/vnd.glasshouse.manifest+json"
FORMATS = {version: f"glasshouse-package/{version}" for version in VERSIONS}
MAX_RECIPIENTS = 8

_VERSIONS = {name: version for version, name in FORMATS.items()}
_NAME = choice(_VERSIONS)
_FORMAT = Codec(lambda value, where: _VERSIONS[_NAME.read(value, where)], FORMATS.get)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Record, name="manifest", max_bytes=MAX_ENVELOPE_BYTES):
    """What the owner signs and anyone may read; raises `FormatError` or `PackageError` (`package-limit`)."""

    package_id: Id  # random
    suite: Suite  # of index and assets
    chunk_bytes: int  # plaintext bytes of a full chunk
    workload: Annotated[str, choice(WORKLOADS)]
    floor: Floor  # what the owner demands of every runtime that may open it
    # HPKE public keys; outputs and logs are sealed to these and no others.
    recipients: Annotated[tuple[bytes, ...], items(MAX_RECIPIENTS, octets(HPKE_PUBLIC_BYTES))]
    owner_signing: Annotated[bytes, octets(32)]  # Ed25519 public key that signs this manifest
    owner_sealing: Annotated[bytes, octets(HPKE_PUBLIC_BYTES)]  # the owner's HPKE public key
    key_commitment: Sha256  # checked before the package key is used
    index_sha256: Sha256  # of the sealed index
    index_bytes: int  # of the sealed index
    assets_bytes: int  # of all sealed assets
    version: Annotated[int, Member("format"), _FORMAT] = VERSION  # of the package format, as in the header

    def __post_init__(self) -> None:
        check_id(self.package_id, "package")
        if self.workload not in WORKLOADS:
            raise FormatError(Code.SCHEMA, f"an unknown workload {self.workload[:40]!a}")
        check_chunk_bytes(self.chunk_bytes)
        if not 0 < self.index_bytes <= MAX_INDEX_BYTES or not 0 <= self.assets_bytes <= MAX_ASSETS_BYTES:
            raise PackageError(
                Code.PACKAGE_LIMIT, f"an index of {self.index_bytes} or assets of {self.assets_bytes} bytes"
            )
        # No recipient would mean that results are lost; a repeated one is a mistake of the signer's.
        if not 0 < len(self.recipients) <= MAX_RECIPIENTS or len(set(self.recipients)) != len(self.recipients):
            raise FormatError(Code.SCHEMA, "recipients that are missing, too many or repeated")
        for key in {*self.recipients, self.owner_sealing}:
            check_recipient(key)
        if any(len(value) != 32 for value in (self.owner_signing, self.key_commitment, self.index_sha256)):
            raise FormatError(Code.SCHEMA, "a key, commitment or digest that is not 32 bytes")

    def sign(self, owner: SigningKey) -> bytes:
        """Return the DSSE envelope's bytes.

        Raises:
            PackageError: `package-owner-mismatch` when `owner` is not the key that the manifest names.
        """
        if owner.public != self.owner_signing:
            raise PackageError(Code.PACKAGE_OWNER, "a manifest is signed by the owner that it names")
        return dsse.sign(MANIFEST_TYPE, self.encode(), [owner]).encode()

    @property
    def sha256(self) -> bytes:
        """The manifest hash: SHA-256 of the canonical bytes; it identifies the package's content."""
        return sha256(self.encode())

    def header(self, envelope_bytes: int) -> Header:
        """Return the one header that a package with this manifest may begin with."""
        return Header(
            version=self.version,
            suite=self.suite,
            chunk_bytes=self.chunk_bytes,
            package_id=self.package_id,
            key_commitment=self.key_commitment,
            envelope_bytes=envelope_bytes,
            index_bytes=self.index_bytes,
            assets_bytes=self.assets_bytes,
        )


def parse_signed(envelope: bytes | bytearray | memoryview, owner_signing: bytes | None = None) -> Manifest:
    """Parse a signed manifest; check that the owner that it names, and is expected if any, has signed it (checks 6–8).

    Raises:
        FormatError: `too-large`, `not-canonical`, `schema-invalid`, `wrong-type` or `signature-invalid`.
        PackageError: `package-owner-mismatch` or `package-limit`.
    """
    signed = dsse.Envelope.parse(envelope, max_bytes=MAX_ENVELOPE_BYTES)
    manifest = Manifest.parse(signed.payload_of(MANIFEST_TYPE))
    signed.verify(MANIFEST_TYPE, manifest.owner_signing)
    if owner_signing is not None and owner_signing != manifest.owner_signing:
        raise PackageError(Code.PACKAGE_OWNER, "the package is signed by another owner than expected")
    return manifest
