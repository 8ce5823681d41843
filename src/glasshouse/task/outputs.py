"""What may leave as an output: names, classes, and no pickle unless the owner's job file says so."""

from __future__ import annotations

import re
import zipfile
from pathlib import PurePosixPath
from typing import BinaryIO

from glasshouse.errors import Code, RunError

__all__ = ["MAX_OUTPUTS", "checked_name", "output_class", "refuse_pickle"]

# Limits of the receipt (spec/evidence.md).
MAX_OUTPUTS = 256
_MAX_NAME_CHARS = 128
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".dill"}
# Protocols 2 to 5 begin with PROTO; a pickle of protocol 0 or 1 has no mark and is caught by its suffix only.
_PICKLE_MARK = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
_ZIP_MARK = b"PK\x03\x04"


def checked_name(name: str) -> str:
    """Return `name` when it is a relative path in the one normal spelling.

    Raises:
        RunError: `output-refused`.
    """
    parts = PurePosixPath(name).parts
    normal = bool(parts) and not name.startswith("/") and ".." not in parts and "/".join(parts) == name
    if not normal or len(name) > _MAX_NAME_CHARS or _CONTROL.search(name):
        raise RunError(
            Code.OUTPUT_REFUSED,
            f"an output cannot be named {name[:80]!r}",
            hint=f"use a relative path of at most {_MAX_NAME_CHARS} characters",
        )
    return name


def output_class(name: str) -> str:
    """Return `weights` or `file`: a plaintext digest of weights may be published, of a small file it may not."""
    return "weights" if name.endswith(".safetensors") else "file"


def refuse_pickle(name: str, content: BinaryIO) -> None:
    """Refuse an output that runs code when it is loaded; leaves `content` at its start.

    Raises:
        RunError: `output-refused`.
    """
    content.seek(0)
    mark = content.read(4)
    pickled = PurePosixPath(name).suffix.lower() in _PICKLE_SUFFIXES or bool(_PICKLE_MARK.match(mark))
    if not pickled and mark == _ZIP_MARK:
        pickled = _is_torch_archive(content)
    content.seek(0)
    if pickled:
        raise RunError(
            Code.OUTPUT_REFUSED,
            f"{name!r} is a pickle: loading one runs code that the rented machine may have put there",
            hint="save tensors with safetensors, or set allow_pickle = true in the job's [params]",
        )


def _is_torch_archive(content: BinaryIO) -> bool:
    try:
        with zipfile.ZipFile(content) as archive:
            return any(PurePosixPath(entry).suffix == ".pkl" for entry in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False
