"""Safetensors straight into tensors: each tensor's bytes are read into its own storage.

The framework is passed in, so that this room imports none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.package.safetensors import Readable, tensor_spans
from glasshouse.task.inputs import Inputs

if TYPE_CHECKING:
    from glasshouse.package.chunks import SealedAsset

Places: TypeAlias = "Sequence[tuple[int, int, Any, Any]]"
"""Offset in the input, bytes, the tensor, and the type that its elements have in the input."""

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
        dtype = getattr(torch, _DTYPES.get(span.dtype, ""), None)
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
