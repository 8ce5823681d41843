"""Where the tensors lie in a safetensors file, so that each is read straight into its own storage.

Source: the safetensors format (8 bytes of little-endian length ‖ JSON ‖ data). Stricter than the
reference where it leaves a choice: the tensors fill the data without hole or overlap.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

from glasshouse.errors import Code, FormatError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 22
MAX_TENSORS = 1 << 15
MAX_DIMENSIONS = 16
MAX_NAME_CHARS = 1024
MAX_ELEMENTS = 1 << 50

# Element types of a whole number of bytes; the packed 4- and 6-bit ones are refused by name.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

Size: TypeAlias = int


class Readable(Protocol):
    """What tensors are read from: an `AssetReader`, or a plain file behind the same two names."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, destination: object, /) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpan:
    """One tensor of a file."""

    name: str  # its name in the model
    dtype: str  # a key of `DTYPE_BYTES`
    shape: tuple[int, ...]  # its dimensions; empty for a scalar
    offset: int  # its first byte, from the beginning of the file
    bytes: Size  # its length


def tensor_spans(reader: Readable) -> tuple[TensorSpan, ...]:
    """Return the tensors of a file in the order of their bytes, by its header.

    Raises:
        FormatError: `too-large`, `schema-invalid` or `unsupported`.
        PackageError: from the reader.
    """
    prefix = bytearray(LENGTH_BYTES)
    if reader.read_into(0, prefix) != LENGTH_BYTES:
        raise _invalid("it ends within its first eight bytes")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(Code.TOO_LARGE, f"a safetensors header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
    at = LENGTH_BYTES + length
    if at > reader.size:
        raise _invalid("it ends within its header")
    text = bytearray(length)
    reader.read_into(LENGTH_BYTES, text)
    document = _json(text)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid("its metadata is not text")
    if len(document) > MAX_TENSORS:
        raise FormatError(Code.TOO_LARGE, f"{len(document)} tensors; the limit is {MAX_TENSORS}")
    spans = sorted((_span(name, value, at) for name, value in document.items()), key=_place)
    for span in spans:
        if span.offset != at:
            raise _invalid("its tensors overlap or leave a hole")
        at += span.bytes
    if at != reader.size:
        raise _invalid("its tensors do not end where the file does")
    return tuple(spans)


def _place(span: TensorSpan) -> tuple[int, int, str]:
    return (span.offset, span.bytes, span.name)  # an empty tensor comes before the one at the same place


def _span(name: str, value: object, begin: int) -> TensorSpan:
    if len(name) > MAX_NAME_CHARS or not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _invalid("an entry is not a tensor")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise FormatError(Code.UNSUPPORTED, f"a tensor of type {str(dtype)[:16]!a}")
    if not _naturals(shape, MAX_DIMENSIONS) or not _naturals(offsets, 2) or len(offsets) != 2:
        raise _invalid("a shape or an offset is not a list of natural numbers")
    elements = 1
    for dimension in shape:
        elements *= dimension
        if elements > MAX_ELEMENTS:
            raise _invalid("a tensor has more elements than any file")
    first, last = offsets
    if last - first != elements * DTYPE_BYTES[dtype]:
        raise _invalid("a tensor is not as long as its shape and type say")
    return TensorSpan(name=name, dtype=dtype, shape=tuple(shape), offset=begin + first, bytes=last - first)


def _naturals(value: object, most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(item) is int and 0 <= item <= MAX_ELEMENTS for item in value)
    )


def _json(text: bytearray) -> dict[str, object]:
    try:
        document = json.loads(
            text.decode("utf-8"), object_pairs_hook=_closed, parse_float=_no_number, parse_constant=_no_number,
            parse_int=_natural,
        )  # fmt: skip
    except FormatError:
        raise
    except (ValueError, RecursionError):
        raise _invalid("its header is not JSON") from None
    if not isinstance(document, dict):
        raise _invalid("its header is not an object")
    return document


def _closed(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _invalid("a name is repeated")
    return found


def _natural(digits: str) -> int:
    if len(digits) > 16:
        raise _invalid("a number is larger than any file")
    return int(digits)


def _no_number(_text: str) -> NoReturn:
    raise _invalid("a number is not an integer")


def _invalid(why: str) -> FormatError:
    return FormatError(Code.SCHEMA, f"not a valid safetensors file: {why}")
