"""Safetensors straight into tensors: each tensor's bytes are read into its own storage.

The framework is passed in, so that this room imports none. Source: the safetensors format (8 bytes of little-endian
length ‖ JSON ‖ data). Stricter than the reference where it leaves a choice: the tensors fill the data without hole or
overlap.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.task.inputs import Inputs

if TYPE_CHECKING:
    from glasshouse.package.streams import SealedAsset

Size: TypeAlias = int
Places: TypeAlias = "Sequence[tuple[int, int, Any, Any]]"
"""Offset in the input, bytes, the tensor, and the type that its elements have in the input."""

# Staging for a tensor on a GPU or of another dtype; bounds the extra memory whatever its size.
_STAGE_BYTES = 16 << 20

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 22
MAX_TENSORS = 1 << 15
MAX_DIMENSIONS = 16
MAX_NAME_CHARS = 1024
MAX_ELEMENTS = 1 << 50

# Element types of a whole number of bytes, and what the framework calls them; the packed 4- and 6-bit ones are refused
# by name.
DTYPES = {
    "BOOL": (1, "bool"),
    "U8": (1, "uint8"),
    "I8": (1, "int8"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "U16": (2, "uint16"),
    "I16": (2, "int16"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "U32": (4, "uint32"),
    "I32": (4, "int32"),
    "F32": (4, "float32"),
    "U64": (8, "uint64"),
    "I64": (8, "int64"),
    "F64": (8, "float64"),
    "C64": (8, "complex64"),
}


class Readable(Protocol):
    """What tensors are read from: an `AssetReader`, or a plain file behind the same two names."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, destination: object, /) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpan:
    """One tensor of a file."""

    name: str  # its name in the model
    dtype: str  # a key of `DTYPES`
    shape: tuple[int, ...]  # its dimensions; empty for a scalar
    offset: int  # its first byte, from the beginning of the file
    bytes: Size  # its length


class Opener(Protocol):
    """Opens sealed inputs on a device; given by a room that may import a framework."""

    device: Any  # as the framework names it

    def opens(self, sealed: SealedAsset) -> bool:
        """Return whether this input can be opened there."""

    def reader(self, sealed: SealedAsset) -> Readable:
        """Return what small parts of the input are read from: only those come into host memory."""

    def fill(self, sealed: SealedAsset, places: Places) -> None:
        """Open parts of an input straight into tensors.

        Raises:
            PackageError: `package-tampered` or `package-truncated`; every one of the tensors is zero then.
        """


def load(
    inputs: Inputs,
    name: str,
    torch: Any,
    *,
    into: Mapping[str, Any] | None = None,
    only: Sequence[str] | None = None,
    opener: Opener | None = None,
) -> dict[str, Any]:
    """Load a safetensors input; see `Task.tensors`."""
    sealed = None if opener is None else inputs.sealed(name)
    if opener is None or sealed is None or not opener.opens(sealed):
        host = _HostInput(inputs, name)
        tensors, places = _places(host, name, torch, into, only, "cpu")
        for label, (offset, _, tensor, dtype) in zip(tensors, places, strict=True):
            host.fill(torch, label, tensor, dtype, offset)
    else:
        tensors, places = _places(opener.reader(sealed), name, torch, into, only, opener.device)
        opener.fill(sealed, places)
    return tensors


def _places(
    source: Readable,
    name: str,
    torch: Any,
    into: Mapping[str, Any] | None,
    only: Sequence[str] | None,
    device: Any,
) -> tuple[dict[str, Any], list[tuple[int, int, Any, Any]]]:
    """Return the wanted tensors, made on `device` unless given, and where their bytes are."""
    spans = tensor_spans(source)
    known = {span.name for span in spans}
    wanted = known if only is None else set(only)
    if into is not None and only is None:
        wanted = known & set(into)
    missing = sorted(wanted - known)
    if missing:
        raise UsageError(Code.USAGE, f"{name!r} holds no tensor named {missing[0]!r}")
    tensors: dict[str, Any] = {}
    places: list[tuple[int, int, Any, Any]] = []
    for span in spans:  # in the file's order: sequential reads
        if span.name not in wanted:
            continue
        dtype = getattr(torch, DTYPES[span.dtype][1], None)
        if dtype is None:
            raise FormatError(
                Code.UNSUPPORTED, f"a tensor of the type {span.dtype}, which this framework does not have"
            )
        tensor = torch.empty(span.shape, dtype=dtype, device=device) if into is None else into[span.name]
        if tuple(tensor.shape) != span.shape:
            raise UsageError(
                Code.USAGE, f"{span.name!r} has the shape {span.shape} in {name!r}, not {tuple(tensor.shape)}"
            )
        tensors[span.name] = tensor
        places.append((span.offset, span.bytes, tensor, dtype))
    return tensors, places


class _HostInput:
    """One input, opened in host memory; what tensors are read from."""

    def __init__(self, inputs: Inputs, name: str) -> None:
        self._inputs, self._name, self.size = inputs, name, inputs.size(name)

    def read_into(self, offset: int, destination: object, /) -> int:
        return self._inputs.read_into(self._name, memoryview(destination), offset)  # type: ignore[arg-type]  # PEP 688

    def fill(self, torch: Any, label: str, tensor: Any, dtype: Any, offset: int) -> None:
        """Fill a tensor from `offset`, through a stage unless it is contiguous on the CPU and of the input's type."""
        if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
            self._fill_storage(tensor, offset)
            return
        flat = tensor.detach().reshape(-1)
        if flat.numel() and flat.data_ptr() != tensor.data_ptr():
            raise UsageError(Code.USAGE, f"the tensor to fill for {label!r} is not contiguous")
        width = torch.empty(0, dtype=dtype).element_size()
        stage = torch.empty(min(max(1, _STAGE_BYTES // width), max(1, flat.numel())), dtype=dtype, device="cpu")
        for start in range(0, flat.numel(), stage.numel()):
            piece = stage[: min(stage.numel(), flat.numel() - start)]
            self._fill_storage(piece, offset + start * width)
            flat[start : start + piece.numel()].copy_(piece)

    def _fill_storage(self, tensor: Any, offset: int) -> None:
        """Read into a contiguous CPU tensor's storage, whatever its type; no array library is needed for it."""
        size = tensor.numel() * tensor.element_size()
        if not size:
            return
        # The caller holds the tensor, and so its storage, while this view lives.
        view = memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
        if self.read_into(offset, view) != size:
            raise FormatError(Code.SCHEMA, f"{self._name!r} ends within a tensor")


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
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(Code.UNSUPPORTED, f"a tensor of type {str(dtype)[:16]!a}")
    if not _naturals(shape, MAX_DIMENSIONS) or not _naturals(offsets, 2) or len(offsets) != 2:
        raise _invalid("a shape or an offset is not a list of natural numbers")
    elements = 1
    for dimension in shape:
        elements *= dimension
        if elements > MAX_ELEMENTS:
            raise _invalid("a tensor has more elements than any file")
    first, last = offsets
    if last - first != elements * DTYPES[dtype][0]:
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
