"""Safetensors straight into tensors: each tensor's bytes are read into its own storage.

The framework is passed in, so that this room imports none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.package.safetensors import Layout, TensorSpan
from glasshouse.task.inputs import Inputs

__all__ = ["load"]

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
) -> dict[str, Any]:
    """Load a safetensors input; see `Task.tensors`."""
    spans = Layout.parse(_Named(inputs, name)).tensors
    known = {span.name for span in spans}
    wanted = known if only is None else set(only)
    if into is not None and only is None:
        wanted = known & set(into)
    missing = sorted(wanted - known)
    if missing:
        raise UsageError(Code.USAGE, f"{name!r} holds no tensor named {missing[0]!r}")
    loaded: dict[str, Any] = {}
    for span in spans:  # in the file's order: sequential reads
        if span.name not in wanted:
            continue
        dtype = _dtype(torch, span)
        tensor = torch.empty(span.shape, dtype=dtype) if into is None else into[span.name]
        if tuple(tensor.shape) != span.shape:
            raise UsageError(
                Code.USAGE, f"{span.name!r} has the shape {span.shape} in {name!r}, not {tuple(tensor.shape)}"
            )
        if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
            _fill(inputs, name, tensor, span.offset)
        else:
            _copy(inputs, name, tensor, span, torch, dtype)
        loaded[span.name] = tensor
    return loaded


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
    stage = torch.empty(min(max(1, _STAGE_BYTES // width), max(1, flat.numel())), dtype=dtype)
    for start in range(0, flat.numel(), stage.numel()):
        piece = stage[: min(stage.numel(), flat.numel() - start)]
        _fill(inputs, name, piece, span.offset + start * width)
        flat[start : start + piece.numel()].copy_(piece)
