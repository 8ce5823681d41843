"""The public manifest: all that a stranger may know of a package, signed by its owner (spec/sealed-package.md 3)."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.package.layout import (
    MAX_ASSETS_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_INDEX_BYTES,
    VERSION,
    VERSIONS,
    Header,
    check_chunk_bytes,
    check_package_id,
)
from glasshouse.wire import dsse, hpke
from glasshouse.wire.aead import Suite
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields, b64decode, b64encode
from glasshouse.wire.kdf import sha256
from glasshouse.wire.policy import Floor
from glasshouse.wire.signing import SigningKey

__all__ = ["MANIFEST_TYPE", "MAX_RECIPIENTS", "WORKLOADS", "Manifest", "parse_signed"]

MANIFEST_TYPE = "application/vnd.glasshouse.manifest+json"
FORMATS = {version: f"glasshouse-package/{version}" for version in VERSIONS}
WORKLOADS = ("lora", "mlp", "script")
MAX_RECIPIENTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What the owner signs and everybody may read.

    Law: ``Manifest.parse(m.encode()) == m`` and the reverse, byte for byte.

    Attributes:
        package_id: 16 random bytes as 32 hex characters.
        suite: bulk cipher of index and assets.
        chunk_bytes: plaintext bytes of a full chunk.
        workload: `mlp`, `lora` or `script`.
        floor: what the owner demands of every runtime that may open it.
        recipients: HPKE public keys, 1216 bytes each; outputs and logs are sealed to these and no others.
        owner_signing: Ed25519 public key that signs this manifest.
        owner_sealing: the owner's HPKE public key.
        key_commitment: 32 bytes, checked before the package key is used.
        index_sha256: SHA-256 of the sealed index.
        index_bytes: length of the sealed index.
        assets_bytes: length of all sealed assets.
        version: of the package format, as in the header.
    """

    package_id: str
    suite: Suite
    chunk_bytes: int
    workload: str
    floor: Floor
    recipients: tuple[bytes, ...]
    owner_signing: bytes
    owner_sealing: bytes
    key_commitment: bytes
    index_sha256: bytes
    index_bytes: int
    assets_bytes: int
    version: int = VERSION

    def __post_init__(self) -> None:
        check_package_id(self.package_id)
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
            hpke.check_public(key)
        if any(len(value) != 32 for value in (self.owner_signing, self.key_commitment, self.index_sha256)):
            raise FormatError(Code.SCHEMA, "a key, commitment or digest that is not 32 bytes")

    def to_json(self) -> dict[str, Json]:
        return {
            "assets_bytes": self.assets_bytes,
            "chunk_bytes": self.chunk_bytes,
            "floor": self.floor.to_json(),
            "format": FORMATS[self.version],
            "index_bytes": self.index_bytes,
            "index_sha256": self.index_sha256.hex(),
            "key_commitment": self.key_commitment.hex(),
            "owner_sealing": b64encode(self.owner_sealing),
            "owner_signing": b64encode(self.owner_signing),
            "package_id": self.package_id,
            "recipients": [b64encode(key) for key in self.recipients],
            "suite": self.suite.value,
            "workload": self.workload,
        }

    @classmethod
    def from_json(cls, value: Json) -> Manifest:
        """Inverse of `to_json`.

        Raises:
            FormatError: `schema-invalid`.
            PackageError: `package-limit`.
        """
        fields = Fields(value, "manifest")
        written = fields.choice("format", list(FORMATS.values()))
        texts = fields.texts("recipients", max_items=MAX_RECIPIENTS, max_chars=2 * hpke.PUBLIC_BYTES)
        manifest = cls(
            package_id=fields.text("package_id", max_chars=32),
            suite=Suite(fields.choice("suite", list(Suite))),
            chunk_bytes=fields.integer("chunk_bytes"),
            workload=fields.choice("workload", WORKLOADS),
            floor=Floor.from_json(fields.any("floor")),
            recipients=tuple(b64decode(text) for text in texts),
            owner_signing=fields.octets("owner_signing", length=32),
            owner_sealing=fields.octets("owner_sealing", length=hpke.PUBLIC_BYTES),
            key_commitment=fields.digest("key_commitment"),
            index_sha256=fields.digest("index_sha256"),
            index_bytes=fields.integer("index_bytes"),
            assets_bytes=fields.integer("assets_bytes"),
            version=next(version for version, name in FORMATS.items() if name == written),
        )
        fields.end()
        return manifest

    def encode(self) -> bytes:
        """Return the canonical bytes: the DSSE payload."""
        return encode(self.to_json())

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Manifest:
        """Inverse of `encode`; raises as `from_json` does, and `too-large` or `not-canonical`."""
        return cls.from_json(decode(data, max_bytes=MAX_ENVELOPE_BYTES))

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
    """Parse a signed manifest and check that the owner that it names has signed it (checks 6–8).

    Args:
        envelope: the DSSE envelope's canonical bytes.
        owner_signing: the owner that is expected, when the caller knows one.

    Raises:
        FormatError: `too-large`, `not-canonical`, `schema-invalid`, `wrong-type` or `signature-invalid`.
        PackageError: `package-owner-mismatch` or `package-limit`.
    """
    signed = dsse.Envelope.parse(envelope, max_bytes=MAX_ENVELOPE_BYTES)
    if signed.payload_type != MANIFEST_TYPE:
        raise FormatError(Code.WRONG_TYPE, f"an envelope of another type where {MANIFEST_TYPE} was expected")
    manifest = Manifest.parse(signed.payload)
    signed.verify(MANIFEST_TYPE, manifest.owner_signing)
    if owner_signing is not None and owner_signing != manifest.owner_signing:
        raise PackageError(Code.PACKAGE_OWNER, "the package is signed by another owner than expected")
    return manifest
