"""The bytes of a sealed package around its content: fixed header, sizes, derived keys (spec/sealed-package.md 2–4).

Laws: ``Header.parse(h.encode()) == h`` and the reverse, byte for byte; every size is known before
the content is; nothing is allocated for a length that is over its limit.
"""

from __future__ import annotations

import hmac
import re
import struct
from dataclasses import dataclass

from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.wire.crypto import MAX_CHUNKS, PREFIX_BYTES, TAG_BYTES, ChunkCipher, Suite, chunk_nonce, derive, sha256

MAGIC = b"\x89GHS\r\n\x1a\n"  # in the manner of PNG: a transfer that rewrites line ends or bit 7 breaks it
VERSION = 2  # what is written
VERSIONS = (1, 2)  # what is read
SUITE_CODES = {Suite.AES_256_GCM: 1, Suite.CHACHA20_POLY1305: 2}

DEFAULT_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES = 1 << 10
MAX_CHUNK_BYTES = 1 << 24
MAX_ENVELOPE_BYTES = 1 << 16
MAX_INDEX_BYTES = 1 << 22
MAX_ASSETS_BYTES = 1 << 50

_FIELDS = struct.Struct(">8sHBBIIQQ16s32s")
HEADER_BYTES = _FIELDS.size

_COMMITMENT_LABEL = b"glasshouse package v1 key commitment"
_ASSET_LABEL = b"glasshouse package v1 asset key"
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_NO_PREFIX = bytes(PREFIX_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The first 84 bytes of a package; their SHA-256 is bound to every chunk."""

    version: int  # of the format: 1 or 2; they differ in the hash of the assets' digests (`content`)
    suite: Suite  # the bulk cipher
    chunk_bytes: int  # plaintext bytes of every chunk but an asset's last
    package_id: str  # 16 random bytes as hex
    key_commitment: bytes  # what `key_commitment` gives for the package key
    envelope_bytes: int  # length of the signed manifest
    index_bytes: int  # length of the sealed index
    assets_bytes: int  # length of all sealed assets together

    def encode(self) -> bytes:
        return _FIELDS.pack(
            MAGIC,
            self.version,
            SUITE_CODES[self.suite],
            0,
            self.chunk_bytes,
            self.envelope_bytes,
            self.index_bytes,
            self.assets_bytes,
            bytes.fromhex(self.package_id),
            self.key_commitment,
        )

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Header:
        """Checks 1–4 of the specification.

        Raises:
            PackageError: `package-not-recognised`, `package-truncated`, `unsupported` or `package-limit`.
        """
        if bytes(data[: len(MAGIC)]) != MAGIC:
            raise PackageError(Code.PACKAGE_MAGIC, "not a sealed package", hint="a sealed package ends in .sealed")
        if len(data) < HEADER_BYTES:
            raise PackageError(Code.PACKAGE_TRUNCATED, "a sealed package that ends within its header")
        _, version, suite_code, reserved, chunk, envelope, index, assets, package_id, commitment = _FIELDS.unpack(
            data[:HEADER_BYTES]
        )
        suites = {code: suite for suite, code in SUITE_CODES.items()}
        if version not in VERSIONS or suite_code not in suites or reserved:
            raise PackageError(
                Code.UNSUPPORTED, f"a sealed package of version {version}, suite {suite_code}, which are not read here"
            )
        check_chunk_bytes(chunk)
        for what, value, least, limit in (
            ("manifest", envelope, 1, MAX_ENVELOPE_BYTES),
            ("sealed index", index, TAG_BYTES, MAX_INDEX_BYTES),
            ("asset area", assets, 0, MAX_ASSETS_BYTES),
        ):
            if not least <= value <= limit:
                raise PackageError(Code.PACKAGE_LIMIT, f"a {what} of {value} bytes; the limit is {limit}")
        return cls(
            version=version,
            suite=suites[suite_code],
            chunk_bytes=chunk,
            package_id=package_id.hex(),
            key_commitment=commitment,
            envelope_bytes=envelope,
            index_bytes=index,
            assets_bytes=assets,
        )

    @property
    def sha256(self) -> bytes:
        """What every chunk, and every asset key, is bound to."""
        return sha256(self.encode())

    @property
    def index_offset(self) -> int:
        """Where the sealed index begins."""
        return HEADER_BYTES + self.envelope_bytes

    @property
    def assets_offset(self) -> int:
        """Where the first asset begins."""
        return self.index_offset + self.index_bytes

    @property
    def total_bytes(self) -> int:
        """The one length that the file may have."""
        return self.assets_offset + self.assets_bytes


def check_chunk_bytes(chunk_bytes: int) -> int:
    """Return a chunk size; refuse what is no power of two from 1 KiB to 16 MiB (`PackageError`, `package-limit`)."""
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes & (chunk_bytes - 1):
        raise PackageError(
            Code.PACKAGE_LIMIT,
            f"a chunk size of {chunk_bytes}; it is a power of two from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}",
        )
    return chunk_bytes


def chunk_count(plain_bytes: int, chunk_bytes: int) -> int:
    """Return the number of chunks of a stream: at least one, and only an empty stream has an empty chunk.

    Raises:
        PackageError: `package-limit` beyond 2^32 - 1 chunks.
    """
    count = max(1, -(-plain_bytes // chunk_bytes))
    if count > MAX_CHUNKS:
        raise PackageError(Code.PACKAGE_LIMIT, f"a stream of {count} chunks; the limit is {MAX_CHUNKS}")
    return count


def sealed_size(plain_bytes: int, chunk_bytes: int) -> int:
    """Return how many bytes a stream of `plain_bytes` takes when it is sealed."""
    return plain_bytes + TAG_BYTES * chunk_count(plain_bytes, chunk_bytes)


def plain_size(sealed_bytes: int, chunk_bytes: int) -> int | None:
    """Inverse of `sealed_size`; None for what no stream takes."""
    size = sealed_bytes - TAG_BYTES * -(-sealed_bytes // (chunk_bytes + TAG_BYTES))
    return size if size >= 0 and sealed_size(size, chunk_bytes) == sealed_bytes else None


def check_id(value: str, what: str) -> bytes:
    """Return the 16 bytes of the id of `what`; raises `FormatError` (`schema-invalid`)."""
    if not _IDENTITY.fullmatch(value):
        raise FormatError(Code.SCHEMA, f"a {what} id that is not 32 hex characters: {value[:40]!a}")
    return bytes.fromhex(value)


def key_commitment(package_key: bytes | bytearray | memoryview, package_id: str) -> bytes:
    """Return the 32 bytes that commit a package to its key: AES-GCM and ChaCha20-Poly1305 do not."""
    return derive(package_key, _COMMITMENT_LABEL, check_id(package_id, "package"))


def check_commitment(package_key: bytes | bytearray | memoryview, package_id: str, commitment: bytes) -> None:
    """Check a package key before it touches any cipher; raises `PackageError` (`key-commitment-mismatch`)."""
    if len(package_key) != 32 or not hmac.compare_digest(key_commitment(package_key, package_id), commitment):
        raise PackageError(Code.KEY_COMMITMENT, "this key does not belong to this package")


def asset_key(package_key: bytes | bytearray | memoryview, asset_id: int, suite: Suite, header_sha256: bytes) -> bytes:
    """Derive the key of one asset; asset 0 is the index."""
    return derive(package_key, _ASSET_LABEL, suite.value.encode(), header_sha256, asset_id.to_bytes(8, "big"))


def stream_cipher(*, suite: Suite, key: bytes, header_sha256: bytes, asset_id: int) -> ChunkCipher:
    """Return the cipher of one asset: its chunks are bound to the header and to the asset's id."""
    return bound_cipher(suite=suite, key=key, binding=stream_binding(header_sha256, asset_id))


def bound_cipher(*, suite: Suite, key: bytes | bytearray | memoryview, binding: bytes) -> ChunkCipher:
    """Return the cipher of a stream whose key seals it alone; `binding` is the associated data of every chunk."""
    return ChunkCipher(suite=suite, key=key, prefix=_NO_PREFIX, associated_data=binding)


def stream_binding(header_sha256: bytes, asset_id: int) -> bytes:
    """Return the associated data of every chunk of an asset."""
    return header_sha256 + asset_id.to_bytes(8, "big")


def stream_nonce(chunk: int, *, last: bool) -> bytes:
    """Return the nonce of a chunk; its prefix is constant because an asset's key seals that asset only."""
    return chunk_nonce(_NO_PREFIX, chunk, last=last)
