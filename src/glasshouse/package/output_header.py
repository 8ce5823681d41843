"""The header of a sealed output, and the 320 bytes that only its recipients read (spec/sealed-package.md 8)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.package.layout import bound_cipher, check_chunk_bytes, check_id
from glasshouse.package.manifest import MAX_RECIPIENTS
from glasshouse.package.paths import check_path
from glasshouse.package.streams import Positioned
from glasshouse.wire.crypto import (
    HPKE_OVERHEAD_BYTES,
    KEY_BYTES,
    ChunkCipher,
    Suite,
    derive,
    lengths_prefixed,
    sha256,
)
from glasshouse.wire.record import Id, Record, Sha256, digest_text, fixed, items, octets

MAGIC = b"\x89GHO\r\n\x1a\n"
LENGTH_BYTES = 4
MAX_HEADER_BYTES = 1 << 15
MAX_NAME_BYTES = 255
SALT_BYTES = 32
# Key, salt, name's length, name, zeros: of one size, so that the name's length does not show either.
_NAME_AT = KEY_BYTES + SALT_BYTES
PRIVATE_BYTES = _NAME_AT + 1 + MAX_NAME_BYTES
FORMAT = "glasshouse-output/1"

_INFO_LABEL = b"glasshouse output v1 key"
_COMMITMENT_LABEL = b"glasshouse output v1 key commitment"


class OutputKind(StrEnum):
    """What a sealed file is: a result, a checkpoint, or a segment of the log."""

    OUTPUT = "output"
    CHECKPOINT = "checkpoint"
    LOG = "log"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputHeader(Record, name="output", max_bytes=MAX_HEADER_BYTES, constants={"format": FORMAT}):
    """What stands in the clear before an output's chunks; its digest is bound to every chunk.

    Law: ``OutputHeader.parse(h.encode()) == h`` and the reverse, byte for byte.
    """

    run_id: Id
    manifest_sha256: Sha256  # the package's manifest hash
    kind: OutputKind
    sequence: int
    suite: Suite
    chunk_bytes: int  # plaintext bytes of a full chunk
    key_commitment: Sha256  # `commitment` of the key
    # Key id and HPKE message of each recipient, in order of key id.
    recipients: Annotated[
        tuple[tuple[str, bytes], ...],
        items(MAX_RECIPIENTS, fixed(id=digest_text(16), sealed=octets(PRIVATE_BYTES + HPKE_OVERHEAD_BYTES))),
    ]

    def __post_init__(self) -> None:
        check_id(self.run_id, "run")
        check_chunk_bytes(self.chunk_bytes)
        names = [name for name, _ in self.recipients]
        if not 0 < len(names) <= MAX_RECIPIENTS or names != sorted(set(names)):
            raise FormatError(Code.SCHEMA, "recipients that are missing, too many, repeated or out of order")

    def encode(self) -> bytes:
        """Return magic, length of the canonical JSON (4 bytes, big endian) and the canonical JSON."""
        body = Record.encode(self)
        return MAGIC + len(body).to_bytes(LENGTH_BYTES, "big") + body

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, **apart: Any) -> OutputHeader:
        """Inverse of `encode`.

        Raises:
            PackageError: `package-not-recognised`, `output-tampered` or `package-limit`.
            FormatError: `not-canonical` or `schema-invalid`.
        """
        begin = cls.front(data)
        body = memoryview(data)[begin:]
        if int.from_bytes(data[len(MAGIC) : begin], "big") != len(body):
            raise PackageError(Code.OUTPUT_TAMPERED, "a sealed output whose header has another length than it states")
        return super(OutputHeader, cls).parse(body, **apart)

    @classmethod
    def read(cls, source: Positioned, total: int) -> OutputHeader:
        """Read the header of a stream of `total` bytes; raises as `parse` does."""
        front = source.read(0, min(total, len(MAGIC) + LENGTH_BYTES))
        begin = cls.front(front)
        length = int.from_bytes(front[len(MAGIC) :], "big")
        if length > MAX_HEADER_BYTES:
            raise PackageError(Code.PACKAGE_LIMIT, f"a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
        if begin + length > total:
            raise PackageError(Code.OUTPUT_TAMPERED, "a sealed output that ends within its header")
        return cls.parse(source.read(0, begin + length))

    @staticmethod
    def front(data: bytes | bytearray | memoryview) -> int:
        """Check magic and length field; return where the JSON begins."""
        if bytes(data[: len(MAGIC)]) != MAGIC:
            raise PackageError(Code.PACKAGE_MAGIC, "not a sealed output")
        if len(data) < len(MAGIC) + LENGTH_BYTES:
            raise PackageError(Code.OUTPUT_TAMPERED, "a sealed output that ends within its header")
        return len(MAGIC) + LENGTH_BYTES

    @property
    def length(self) -> int:
        """Where the first chunk begins."""
        return len(self.encode())

    @property
    def info(self) -> bytes:
        """What the HPKE messages are bound to; the name is inside them."""
        return output_info(self.run_id, self.manifest_sha256, self.kind, self.sequence, self.key_commitment)

    def cipher(self, key: bytes | bytearray | memoryview) -> ChunkCipher:
        """Return the cipher of this output's chunks."""
        return bound_cipher(suite=self.suite, key=key, binding=sha256(self.encode()))


def commitment(key: bytes | bytearray | memoryview, *, run_id: str, manifest_sha256: bytes) -> bytes:
    """Return the 32 bytes that commit an output to its key."""
    return derive(key, _COMMITMENT_LABEL, bytes.fromhex(run_id), manifest_sha256)


def private_block(key: bytes | bytearray | memoryview, salt: bytes | bytearray | memoryview, name: str) -> bytearray:
    """Return what is sealed to the recipients: key ‖ salt ‖ length of the name ‖ name ‖ zeros; 320 bytes."""
    text = check_path(name, max_bytes=MAX_NAME_BYTES).encode("utf-8")
    block = bytearray(PRIVATE_BYTES)
    block[:KEY_BYTES] = key
    block[KEY_BYTES:_NAME_AT] = salt
    block[_NAME_AT] = len(text)
    block[_NAME_AT + 1 : _NAME_AT + 1 + len(text)] = text
    return block


def read_private(block: bytes | bytearray | memoryview) -> tuple[bytes, str]:
    """Return the salt and the name in a private block; raises `PackageError` (`output-tampered` or `package-path`)."""
    end = _NAME_AT + 1 + block[_NAME_AT]
    if any(block[end:]):
        raise PackageError(Code.OUTPUT_TAMPERED, "an output's name with something behind it")
    try:
        name = bytes(block[_NAME_AT + 1 : end]).decode("utf-8")
    except UnicodeDecodeError:
        raise PackageError(Code.PACKAGE_PATH, "an output's name that is not Unicode text") from None
    return bytes(block[KEY_BYTES:_NAME_AT]), check_path(name, max_bytes=MAX_NAME_BYTES)


def output_info(run_id: str, manifest_sha256: bytes, kind: OutputKind, sequence: int, key_commitment: bytes) -> bytes:
    """See `OutputHeader.info`."""
    return lengths_prefixed(
        _INFO_LABEL,
        bytes.fromhex(run_id),
        manifest_sha256,
        kind.value.encode(),
        sequence.to_bytes(8, "big"),
        key_commitment,
    )
