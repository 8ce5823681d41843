"""What may leave as an output: names, classes, and no pickle unless the owner's job file says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import BinaryIO

from glasshouse.errors import Code, PackageError, RunError
from glasshouse.package.limits import MAX_COUNT
from glasshouse.package.paths import check_path

__all__ = ["MAX_OUTPUTS", "checked_name", "is_pickle", "output_class", "refused_pickles"]

MAX_OUTPUTS = MAX_COUNT
_MAX_NAME_CHARS = 128
_MAX_NAME_BYTES = 255
_PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".dill"}
# Protocols 2 to 5 begin with PROTO; a pickle of protocol 0 or 1 has no mark and is caught by its suffix only.
_PICKLE_MARK = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
_ZIP_MARK = b"PK\x03\x04"


def checked_name(name: str) -> str:
    """Return `name` when it is a relative path in the one normal spelling.

    Raises:
        RunError: `output-refused`.
    """
    try:
        # The grammar that it will be sealed under: found here, where the script can be told.
        if len(name) <= _MAX_NAME_CHARS:
            return check_path(name, max_bytes=_MAX_NAME_BYTES)
    except PackageError:
        pass
    raise RunError(
        Code.OUTPUT_REFUSED,
        f"an output cannot be named {name[:80]!a}",
        hint=f"use a relative path of at most {_MAX_NAME_CHARS} characters ({_MAX_NAME_BYTES} bytes), "
        "without control or format characters",
    )


def output_class(name: str) -> str:
    """Return `weights` or `file`: a plaintext digest of weights may be published, of a small file it may not."""
    return "weights" if name.endswith(".safetensors") else "file"


def is_pickle(name: str, content: BinaryIO) -> bool:
    """Return whether an output runs code when it is loaded; leaves `content` at its start."""
    content.seek(0)
    mark = content.read(4)
    pickled = PurePosixPath(name).suffix.lower() in _PICKLE_SUFFIXES or bool(_PICKLE_MARK.match(mark))
    if not pickled and mark == _ZIP_MARK:
        pickled = _is_torch_archive(content)
    content.seek(0)
    return pickled


def refused_pickles(names: Sequence[str]) -> RunError:
    """Return the error of pickles that were written as outputs, all of them."""
    listed = ", ".join(repr(name) for name in names)
    what, they = ("pickles", "they are") if len(names) > 1 else ("a pickle", "it is")
    return RunError(
        Code.OUTPUT_REFUSED,
        f"not sent back, because {they} {what}, and loading one runs code that the rented machine may have put there: "
        f"{listed}",
        hint="save tensors with safetensors.torch.save_file, or set allow_pickle = true in the job's [params]",
    )


def _is_torch_archive(content: BinaryIO) -> bool:
    import zipfile  # 35 ms with the compressors that come along, for the few outputs that are archives

    try:
        with zipfile.ZipFile(content) as archive:
            return any(PurePosixPath(entry).suffix == ".pkl" for entry in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False
