"""What a checkpoint consists of: the header of each rank's sealed part, and the one that binds the parts together.

Laws: without its header there is no checkpoint; the header's SHA-256 is the checkpoint's digest, and through it every
byte of every part is what was counted. Source: spec/checkpoints.md sections 2 and 3.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.wire.canonical import encode as _encode
from glasshouse.wire.crypto import HPKE_OVERHEAD_BYTES, KEY_BYTES, RecipientKey, Suite, derive, lengths_prefixed, sha256
from glasshouse.wire.group import MAX_MACHINES, MAX_RANKS
from glasshouse.wire.lines.line_start import LINE_BYTES, MAX_LEGS
from glasshouse.wire.record import LEFT_OUT, Id, Record, Sha256, digest, digest_text, fixed, integer, items, octets

MAGIC = b"\x89GHK\r\n\x1a\n"
LENGTH_BYTES = 4
FRONT_BYTES = len(MAGIC) + LENGTH_BYTES
MAX_PART_HEADER_BYTES = 1 << 15
MAX_HEADER_BYTES = 192 * 1024
MAX_WORLD = 1024
MAX_RECIPIENTS = 9  # those of a manifest, and the resume key

_RESUME_LABEL = b"glasshouse resume v1"
_INFO_LABEL = b"glasshouse checkpoint v1 key"
_COMMITMENT_LABEL = b"glasshouse checkpoint v1 key commitment"


def resume_key(package_key: bytes | bytearray | memoryview, *, deployment: str, line: bytes) -> RecipientKey:
    """Return the key pair that opens a line's checkpoints; in the custodian alone."""
    seed = derive(package_key, _RESUME_LABEL, bytes.fromhex(deployment), line)
    return RecipientKey(hashlib.shake_256(seed).digest(96))  # draft-connolly-cfrg-xwing-kem, expandDecapsulationKey


def padded(size: int) -> int:
    """Return the least padded size that is at least `size`: a multiple of 2^max(12, b-5), b its number of bits."""
    step = 1 << max(12, size.bit_length() - 5)
    return -(-max(size, 1) // step) * step


def is_padded(size: int) -> bool:
    """Return whether a part's plaintext may be of this length."""
    return size > 0 and padded(size) == size


@dataclass(frozen=True, kw_only=True, slots=True)
class Place(Record, name="checkpoint"):
    """Which checkpoint of which line something belongs to: what part headers and header have in common."""

    deployment: Id
    environment_sha256: Sha256  # of the machine that wrote this document
    leg: Annotated[int, integer(1, MAX_LEGS)]
    line: Annotated[bytes, digest(LINE_BYTES)]
    machines: Annotated[int, integer(1, MAX_MACHINES)]
    manifest_sha256: Sha256
    ranks: Annotated[int, integer(1, MAX_RANKS)]  # on each machine
    seq: Annotated[int, integer(1)]  # among the checkpoints of the line that were counted, from 1
    step: int
    previous: Annotated[Sha256 | None, LEFT_OUT] = None  # digest of the checkpoint before

    @property
    def world_size(self) -> int:
        """How many ranks there are on all machines."""
        return self.machines * self.ranks

    def shared(self) -> dict[str, Any]:
        """Return what must be the same in every document of one checkpoint."""
        return {name: getattr(self, name) for name in _SHARED}


_SHARED = ("deployment", "leg", "line", "machines", "manifest_sha256", "ranks", "seq", "step", "previous")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartHeader(
    Place,
    name="checkpoint part",
    max_bytes=MAX_PART_HEADER_BYTES,
    constants={"format": "glasshouse-checkpoint-part/1"},
):
    """What stands in the clear before a part's chunks.

    Law: ``PartHeader.parse_front(h.front()) == h`` and the reverse, byte for byte.
    """

    chunk_bytes: int  # plaintext bytes of a full chunk
    key_commitment: Sha256  # `commitment` of the content key
    rank: Annotated[int, integer(0, MAX_WORLD - 1)]
    suite: Suite
    # Key id and wrapped content key of each recipient, in order of key id; empty while it is being made.
    recipients: Annotated[
        tuple[tuple[str, bytes], ...],
        items(MAX_RECIPIENTS, fixed(id=digest_text(16), sealed=octets(KEY_BYTES + HPKE_OVERHEAD_BYTES))),
    ]
    _without: ClassVar[str] = "recipients"

    def __post_init__(self) -> None:
        names = [name for name, _ in self.recipients]
        if names != sorted(set(names)):
            raise FormatError(Code.SCHEMA, "recipients that are repeated or out of order")
        if self.rank >= self.world_size or self.world_size > MAX_WORLD:
            raise FormatError(Code.SCHEMA, "a part of a rank that its world does not have")

    def front(self) -> bytes:
        """Return magic, length and header: what every chunk is bound to, by its SHA-256."""
        body = self.encode()
        return MAGIC + len(body).to_bytes(LENGTH_BYTES, "big") + body

    @classmethod
    def parse_front(cls, data: bytes | bytearray | memoryview) -> PartHeader:
        """Inverse of `front`.

        Raises:
            PackageError: `checkpoint-tampered`.
            FormatError: `too-large`, `not-canonical` or `schema-invalid`.
        """
        if front_length(data) != len(data):
            raise PackageError(Code.CHECKPOINT_TAMPERED, "a part of a checkpoint whose front has another length")
        return cls.parse(memoryview(data)[FRONT_BYTES:])

    @property
    def info(self) -> bytes:
        """What the wrapped keys are bound to."""
        value = self.to_json()
        del value[self._without]
        return lengths_prefixed(_INFO_LABEL, _encode(value))

    def commitment(self, key: bytes | bytearray | memoryview) -> bytes:
        """Return the 32 bytes that commit this part to its content key."""
        numbers = (self.leg, self.seq, self.rank)
        return derive(key, _COMMITMENT_LABEL, self.line, *(number.to_bytes(8, "big") for number in numbers))

    def with_recipients(self, sealed: dict[str, bytes]) -> PartHeader:
        """Return the header with the content key as it was wrapped for each."""
        return replace(self, recipients=tuple(sorted(sealed.items())))


def front_length(data: bytes | bytearray | memoryview) -> int:
    """Return how long a part's front is, from its first `FRONT_BYTES`; raises `PackageError`, `checkpoint-tampered`."""
    if len(data) < FRONT_BYTES or bytes(data[: len(MAGIC)]) != MAGIC:
        raise PackageError(Code.CHECKPOINT_TAMPERED, "not a part of a checkpoint")
    length = int.from_bytes(data[len(MAGIC) : FRONT_BYTES], "big")
    if not 0 < length <= MAX_PART_HEADER_BYTES:
        raise PackageError(Code.CHECKPOINT_TAMPERED, "a part of a checkpoint whose header is too long")
    return FRONT_BYTES + length


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRow(Record, name="checkpoint.parts"):
    """One part, as the header names it."""

    bytes: Annotated[int, integer(1)]  # of the sealed part
    head_sha256: Sha256  # of all before its chunks
    sha256: Sha256  # of the whole


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointHeader(
    Place,
    name="checkpoint header",
    max_bytes=MAX_HEADER_BYTES,
    max_elements=4 * MAX_WORLD + 64,  # it is read before it is known whose it is
    constants={"format": "glasshouse-checkpoint/1"},
):
    """What makes parts a checkpoint."""

    parts: Annotated[tuple[PartRow, ...], items(MAX_WORLD, min_items=1)]  # one for each rank, in their order

    def __post_init__(self) -> None:
        if len(self.parts) != self.world_size:
            raise FormatError(Code.SCHEMA, "a checkpoint without one part for each rank")

    @property
    def digest(self) -> bytes:
        """The checkpoint's digest."""
        return sha256(self.encode())

    def check_part(self, header: PartHeader) -> None:
        """Check that a part header is one of this checkpoint's; raises `PackageError`, `checkpoint-foreign`."""
        if header.shared() != self.shared():
            raise PackageError(Code.CHECKPOINT_FOREIGN, "a part of another checkpoint, line, package or world")
