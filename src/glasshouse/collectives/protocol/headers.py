"""The header of a frame: 64 bytes in clear before every ciphertext (spec/sealed-collectives.md, section 5).

Law: nothing in a header is acted upon before its frame has been opened, except its length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any, TypeAlias

from glasshouse.errors import Code, CollectiveError
from glasshouse.wire.crypto import TAG_BYTES, Suite, lengths_prefixed, sha256

VERSION = 1
HEADER_BYTES = 64
DIGEST_BYTES = 16
MAX_PAYLOAD_BYTES = 1 << 24
SUITE_CODES = {Suite.AES_256_GCM: 1, Suite.CHACHA20_POLY1305: 2}

Bytes: TypeAlias = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    """What a frame is for."""

    DATA = 1
    OFFER = 2
    ACCEPT = 3
    ALERT = 4
    BYE = 5


class Collective(IntEnum):
    """The operation that a frame belongs to, for the receiver's error when it expects another."""

    NONE = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10


class Algorithm(IntEnum):
    """How the operation is carried out; both ends must do the same."""

    NONE = 0
    DIRECT = 1
    ONE_SHOT = 2
    RING = 3
    SERIAL = 4


class Element(IntEnum):
    """The type of a tensor's elements; the names in lower case are torch's."""

    NONE = 0
    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT8 = 5
    UINT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    BOOL = 10
    COMPLEX64 = 11
    COMPLEX128 = 12
    UINT16 = 13
    UINT32 = 14
    UINT64 = 15
    FLOAT8_E4M3FN = 16
    FLOAT8_E5M2 = 17
    FLOAT8_E4M3FNUZ = 18
    FLOAT8_E5M2FNUZ = 19
    FLOAT8_E8M0FNU = 20


class ReductionCode(IntEnum):
    """How elements are combined."""

    NONE = 0
    SUM = 1
    AVG = 2
    PREMUL_SUM = 3
    MIN = 4
    MAX = 5
    PRODUCT = 6


_LAYOUT = struct.Struct(">8BHHIQQQII16s")
_COUNTED, _COUNTED_AT = struct.Struct(">IQ"), 12  # payload bytes, counter
_ROUTE, _ROUTE_AT = struct.Struct(">BHH"), 7  # phase, source, destination
_SUITE_AT = 2
_SEQUENCE, _SEQUENCE_AT = struct.Struct(">Q"), 24
_ELEMENTS, _ELEMENTS_AT = struct.Struct(">Q"), 32
_CHUNK, _CHUNK_AT = struct.Struct(">I"), 40
SUITES = {code: suite for suite, code in SUITE_CODES.items()}
_READ: Mapping[str, Callable[[int], Any]] = {
    "kind": FrameKind,
    "suite": SUITES.__getitem__,
    "collective": Collective,
    "algorithm": Algorithm,
    "element": Element,
    "reduction": ReductionCode,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """The 64 bytes before a frame's ciphertext, with the fields in their order on the wire behind the version.

    `payload_bytes` and `counter` are the sealer's to fill in. Law: ``FrameHeader.parse(h.encode()) == h``.
    """

    kind: FrameKind
    suite: Suite = Suite.AES_256_GCM
    collective: Collective = Collective.NONE
    algorithm: Algorithm = Algorithm.NONE
    element: Element = Element.NONE
    reduction: ReductionCode = ReductionCode.NONE
    phase: int = 0
    source: int
    destination: int
    payload_bytes: int = 0
    counter: int = 0
    sequence: int = 0  # numbers the operations of the lane
    elements: int = 0  # of the whole operation
    chunk: int = 0
    tag: int = 0
    digest: bytes = bytes(DIGEST_BYTES)  # commits to everything else that both ends must agree on

    def encode(self) -> bytearray:
        """Return the 64 bytes, to be sent or to be varied by `set_chunk`.

        Raises:
            ValueError: a digest of another length; `struct.error`, a number that does not fit its field.
        """
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes")
        kind, suite, *others = _values(self)
        return bytearray(_LAYOUT.pack(VERSION, kind, SUITE_CODES[suite], *others))

    @classmethod
    def parse(cls, data: Bytes) -> FrameHeader:
        """Read a header.

        Raises:
            CollectiveError: `collective-mismatch` for another version and for unknown codes.
        """
        version, *values = _LAYOUT.unpack_from(data)
        named = dict(zip(_NAMES, values, strict=True))
        try:
            if version != VERSION:
                raise ValueError
            return cls(**named | {name: read(named[name]) for name, read in _READ.items()})
        except (ValueError, KeyError):
            what = f"rank {named['source']} sent a code that this version does not have"
            raise CollectiveError(Code.COLLECTIVE_MISMATCH, what, rank=named["source"]) from None

    def described(self) -> str:
        """Return the operation's name in an error, such as ``all_reduce(sum) of 50 float32``."""
        if self.kind in (FrameKind.ALERT, FrameKind.BYE):
            return "its leave" if self.kind is FrameKind.BYE else "an alert"
        if self.collective is Collective.BARRIER:
            return "barrier"
        how = "" if self.reduction is ReductionCode.NONE else f"({self.reduction.name.lower()})"
        return f"{self.collective.name.lower()}{how} of {self.elements} {self.element.name.lower()}"


_NAMES = [field.name for field in fields(FrameHeader)]
_values = attrgetter(*_NAMES)


def frame_bytes(payload_bytes: int) -> int:
    """Return the size of a frame with that much payload."""
    return HEADER_BYTES + payload_bytes + TAG_BYTES


def digest(*parts: int | str) -> bytes:
    """Return 16 bytes that commit to shapes, splits or roots; they travel in clear, so nothing secret goes in."""
    return sha256(lengths_prefixed(*(str(part).encode() for part in parts)))[:DIGEST_BYTES]


def set_operation(header: bytearray, sequence: int, suite: Suite) -> None:
    """Write the number of an operation, and the suite of its frames, into a packed header."""
    header[_SUITE_AT] = SUITE_CODES[suite]
    _SEQUENCE.pack_into(header, _SEQUENCE_AT, sequence)


def set_chunk(header: bytearray | memoryview, chunk: int) -> None:
    """Write the number of a chunk into a packed header."""
    _CHUNK.pack_into(header, _CHUNK_AT, chunk)


def set_route(header: bytearray | memoryview, *, phase: int, source: int, destination: int, elements: int) -> None:
    """Write another phase, other ranks and another number of elements into a packed header."""
    _ROUTE.pack_into(header, _ROUTE_AT, phase, source, destination)
    _ELEMENTS.pack_into(header, _ELEMENTS_AT, elements)


def set_counter(header: bytearray | memoryview, size: int, counter: int) -> None:
    """Write a frame's length and counter into its packed header."""
    _COUNTED.pack_into(header, _COUNTED_AT, size, counter)


def counted(header: Bytes) -> tuple[int, int]:
    """Return the length and the counter that a packed header announces."""
    counted: tuple[int, int] = _COUNTED.unpack_from(header, _COUNTED_AT)
    return counted


def payload_bytes(header: Bytes) -> int:
    """Return how many bytes of payload a packed header announces.

    Raises:
        CollectiveError: `collective-tampered`, more than any frame carries.
    """
    size, _ = counted(header)
    if size > MAX_PAYLOAD_BYTES:
        raise CollectiveError(Code.COLLECTIVE_TAMPERED, "a frame that announces more bytes than any frame carries")
    return size
