"""The header of a frame: 64 bytes in clear before every ciphertext, and what their codes mean.

Law: nothing in a header is believed before its frame has been opened.
Source: spec/sealed-collectives.md, section 5.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from glasshouse.collectives.protocol.group_keys import ALL, SUITE_CODES, Lane, Membership
from glasshouse.errors import Code, CollectiveError
from glasshouse.wire.aead import TAG_BYTES, Suite
from glasshouse.wire.kdf import lengths_prefixed, sha256

__all__ = [
    "ALL",
    "DIGEST_BYTES",
    "HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "TAG_BYTES",
    "VERSION",
    "Algorithm",
    "Bytes",
    "Collective",
    "Element",
    "Header",
    "Kind",
    "ReductionCode",
    "Suite",
    "counted",
    "digest",
    "frame_bytes",
    "payload_bytes",
    "route",
    "set_chunk",
    "set_counter",
    "set_route",
]

VERSION = 1
HEADER_BYTES = 64
DIGEST_BYTES = 16
MAX_PAYLOAD_BYTES = 1 << 24

Bytes: TypeAlias = bytes | bytearray | memoryview


class Kind(IntEnum):
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
_COUNTED = struct.Struct(">IQ")  # payload bytes, counter
_COUNTED_AT = 12
_ROUTE = struct.Struct(">BHH")  # phase, source, destination
_ROUTE_AT = 7
_CHUNK = struct.Struct(">QI")  # elements, chunk
_CHUNK_AT = 32
_KINDS = frozenset(Kind)
_SUITES = {code: suite for suite, code in SUITE_CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The 64 bytes before a frame's ciphertext.

    `payload_bytes` and `counter` are the sealer's to fill in. `sequence` numbers the operations of the lane,
    `elements` is the size of the whole operation, `digest` says what else both ends must agree on.
    Law: ``Header.parse(h.encode()) == h``.
    """

    kind: Kind
    source: int
    destination: int
    sequence: int = 0
    suite: Suite = Suite.AES_256_GCM
    collective: Collective = Collective.NONE
    algorithm: Algorithm = Algorithm.NONE
    element: Element = Element.NONE
    reduction: ReductionCode = ReductionCode.NONE
    phase: int = 0
    payload_bytes: int = 0
    counter: int = 0
    elements: int = 0
    chunk: int = 0
    tag: int = 0
    digest: bytes = bytes(DIGEST_BYTES)

    def pack_into(self, buffer: bytearray | memoryview) -> None:
        """Write the 64 bytes at the beginning of `buffer`.

        Raises:
            ValueError: a digest of another length; `struct.error`, a number that does not fit its field.
        """
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes")
        _LAYOUT.pack_into(
            buffer,
            0,
            VERSION,
            self.kind,
            SUITE_CODES[self.suite],
            self.collective,
            self.algorithm,
            self.element,
            self.reduction,
            self.phase,
            self.source,
            self.destination,
            self.payload_bytes,
            self.counter,
            self.sequence,
            self.elements,
            self.chunk,
            self.tag,
            self.digest,
        )

    def encode(self) -> bytearray:
        """Return the 64 bytes, to be sent or to be varied by `set_chunk`."""
        buffer = bytearray(HEADER_BYTES)
        self.pack_into(buffer)
        return buffer

    @classmethod
    def parse(cls, data: Bytes) -> Header:
        """Read a header; nothing in it is believed before its frame has been opened.

        Raises:
            CollectiveError: `collective-mismatch` for another version and for codes that are not known.
        """
        version, kind, suite, collective, algorithm, element, reduction, phase, *rest = _LAYOUT.unpack_from(data)
        source, destination, payload, counter, sequence, elements, chunk, tag, described = rest
        try:
            if version != VERSION:
                raise ValueError
            return cls(
                kind=Kind(kind),
                suite=_SUITES[suite],
                collective=Collective(collective),
                algorithm=Algorithm(algorithm),
                element=Element(element),
                reduction=ReductionCode(reduction),
                phase=phase,
                source=source,
                destination=destination,
                payload_bytes=payload,
                counter=counter,
                sequence=sequence,
                elements=elements,
                chunk=chunk,
                tag=tag,
                digest=described,
            )
        except (ValueError, KeyError):
            raise CollectiveError(
                Code.COLLECTIVE_MISMATCH,
                f"rank {source} speaks of something that this version does not know",
                rank=source,
            ) from None

    def described(self) -> str:
        """Return what an error calls the operation, such as ``all_reduce(sum) of 50 float32``."""
        if self.kind in (Kind.ALERT, Kind.BYE):
            return "its leave" if self.kind is Kind.BYE else "an alert"
        how = "" if self.reduction is ReductionCode.NONE else f"({self.reduction.name.lower()})"
        if self.collective is Collective.BARRIER:
            return "barrier"
        return f"{self.collective.name.lower()}{how} of {self.elements} {self.element.name.lower()}"


def frame_bytes(payload_bytes: int) -> int:
    """Return the size of a frame with that much payload."""
    return HEADER_BYTES + payload_bytes + TAG_BYTES


def digest(*parts: int | str) -> bytes:
    """Return 16 bytes that differ when any part does: shapes, splits, roots, whatever both ends must agree on.

    They travel in clear and are the same for equal parts: nothing that is secret goes in.
    """
    return sha256(lengths_prefixed(*(str(part).encode() for part in parts)))[:DIGEST_BYTES]


def set_chunk(header: bytearray | memoryview, *, elements: int, chunk: int) -> None:
    """Make a packed header that of another chunk."""
    _CHUNK.pack_into(header, _CHUNK_AT, elements, chunk)


def set_route(header: bytearray | memoryview, *, phase: int, source: int, destination: int) -> None:
    """Make a packed header that of another phase and other ranks."""
    _ROUTE.pack_into(header, _ROUTE_AT, phase, source, destination)


def set_counter(header: bytearray | memoryview, size: int, counter: int) -> None:
    """Write a frame's length and counter into its packed header."""
    _COUNTED.pack_into(header, _COUNTED_AT, size, counter)


def counted(header: Bytes) -> tuple[int, int]:
    """Return the length and the counter that a packed header announces."""
    size, counter = _COUNTED.unpack_from(header, _COUNTED_AT)
    return size, counter


def payload_bytes(header: Bytes) -> int:
    """Return how many bytes of payload a packed header announces.

    Raises:
        CollectiveError: `collective-tampered`, more than any frame carries.
    """
    size, _ = counted(header)
    if size > MAX_PAYLOAD_BYTES:
        raise CollectiveError(Code.COLLECTIVE_TAMPERED, "a frame that announces more bytes than any frame carries")
    return size


def route(membership: Membership, lane: Lane, source: int, header: Bytes) -> tuple[Suite, bool]:
    """Return the suite of a received header, and whether its frame was sealed for all.

    Raises:
        CollectiveError: `collective-tampered`, no frame of the connection with `source` has such a header.
    """
    payload_bytes(header)
    suite = _SUITES.get(header[2])
    destination = int.from_bytes(header[10:12], "big")
    for_all = destination == ALL and lane is Lane.COLLECTIVE
    if (
        suite is None
        or header[0] != VERSION
        or header[1] not in _KINDS
        or int.from_bytes(header[8:10], "big") != source
        or not (for_all or destination == membership.rank)
    ):
        raise CollectiveError(
            Code.COLLECTIVE_TAMPERED,
            f"on the connection with {membership.called(source)} came what it never sends there",
            rank=source,
        )
    return suite, for_all
