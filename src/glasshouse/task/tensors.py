"""Safetensors straight into tensors: each tensor's bytes are read into its own storage.

The framework is passed in, so that this room imports none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.package.safetensors import Layout, Readable, TensorSpan
from glasshouse.task.inputs import Inputs

if TYPE_CHECKING:
    from glasshouse.package.chunks import SealedAsset

__all__ = ["Opener", "load"]

# Staging for a tensor on a GPU or of another dtype; bounds the extra memory whatever its size.
_STAGE_BYTES = 16 << 20

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}


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
    if opener is not None and sealed is not None and opener.opens(sealed):
        return _load(opener.reader(sealed), name, torch, into, only, opener.device, partial(_open, opener, sealed))
    return _load(_Named(inputs, name), name, torch, into, only, "cpu", partial(_read, inputs, name, torch))


def _load(
    source: Readable,
    name: str,
    torch: Any,
    into: Mapping[str, Any] | None,
    only: Sequence[str] | None,
    device: Any,
    fill: Callable[[list[tuple[TensorSpan, Any, Any]]], None],
) -> dict[str, Any]:
    spans = Layout.parse(source).tensors
    known = {span.name for span in spans}
    wanted = known if only is None else set(only)
    if into is not None and only is None:
        wanted = known & set(into)
    missing = sorted(wanted - known)
    if missing:
        raise UsageError(Code.USAGE, f"{name!r} holds no tensor named {missing[0]!r}")
    places: list[tuple[TensorSpan, Any, Any]] = []
    for span in spans:  # in the file's order: sequential reads
        if span.name not in wanted:
            continue
        dtype = _dtype(torch, span)
        tensor = torch.empty(span.shape, dtype=dtype, device=device) if into is None else into[span.name]
        if tuple(tensor.shape) != span.shape:
            raise UsageError(
                Code.USAGE, f"{span.name!r} has the shape {span.shape} in {name!r}, not {tuple(tensor.shape)}"
            )
        places.append((span, tensor, dtype))
    fill(places)
    return {span.name: tensor for span, tensor, _ in places}


def _read(inputs: Inputs, name: str, torch: Any, places: list[tuple[TensorSpan, Any, Any]]) -> None:
    """Fill tensors from an input that is opened in host memory."""
    for span, tensor, dtype in places:
        if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
            _fill(inputs, name, tensor, span.offset)
        else:
            _copy(inputs, name, tensor, span, torch, dtype)


def _open(opener: Opener, sealed: SealedAsset, places: list[tuple[TensorSpan, Any, Any]]) -> None:
    """Fill tensors from an input that is opened where the opener's tensors are."""
    opener.fill(sealed, [(span.offset, span.bytes, tensor, dtype) for span, tensor, dtype in places])


class Opener(Protocol):
    """Opens sealed inputs on a device; given by a room that may import a framework.

    Attributes:
        device: where, as the framework names it.
    """

    device: Any

    def opens(self, sealed: SealedAsset) -> bool:
        """Return whether this input can be opened there."""

    def reader(self, sealed: SealedAsset) -> Readable:
        """Return what small parts of the input are read from: only those come into host memory."""

    def fill(self, sealed: SealedAsset, places: Sequence[tuple[int, int, Any, Any]]) -> None:
        """Open parts of an input straight into tensors.

        Args:
            places: offset in the input, bytes, the tensor, and the type that its elements have in the input.

        Raises:
            PackageError: `package-tampered` or `package-truncated`; every one of the tensors is zero then.
        """


class _Named:
    """One input as what a `Layout` is read from."""

    def __init__(self, inputs: Inputs, name: str) -> None:
        self._inputs, self._name = inputs, name

    @property
    def size(self) -> int:
        return self._inputs.size(self._name)

    def read_into(self, offset: int, destination: object, /) -> int:
        return self._inputs.read_into(self._name, memoryview(destination), offset)  # type: ignore[arg-type]  # PEP 688


def _dtype(torch: Any, span: TensorSpan) -> Any:
    dtype = getattr(torch, _DTYPES.get(span.dtype, ""), None)
    if dtype is None:
        raise FormatError(Code.UNSUPPORTED, f"a tensor of the type {span.dtype}, which this framework does not have")
    return dtype


def _fill(inputs: Inputs, name: str, tensor: Any, offset: int) -> None:
    """Read into a contiguous CPU tensor's storage, whatever its type; no array library needs to know it."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return
    # The caller holds the tensor, and so its storage, while this view lives.
    view = memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
    if inputs.read_into(name, view, offset) != size:
        raise FormatError(Code.SCHEMA, f"{name!r} ends within a tensor")


def _copy(inputs: Inputs, name: str, tensor: Any, span: TensorSpan, torch: Any, dtype: Any) -> None:
    flat = tensor.detach().reshape(-1)
    if flat.numel() and flat.data_ptr() != tensor.data_ptr():
        raise UsageError(Code.USAGE, f"the tensor to fill for {span.name!r} is not contiguous")
    width = torch.empty(0, dtype=dtype).element_size()
    stage = torch.empty(min(max(1, _STAGE_BYTES // width), max(1, flat.numel())), dtype=dtype, device="cpu")
    for start in range(0, flat.numel(), stage.numel()):
        piece = stage[: min(stage.numel(), flat.numel() - start)]
        _fill(inputs, name, piece, span.offset + start * width)
        flat[start : start + piece.numel()].copy_(piece)
