"""Outputs on their way out: their names, classes and limits, and no pickle unless the owner's job file allows it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from glasshouse.errors import Code, PackageError, RunError, UsageError
from glasshouse.package.limits import MAX_COUNT, OutputLimits
from glasshouse.package.paths import check_path
from glasshouse.task.channel import Channel
from glasshouse.wire.canonical import Json

_MAX_NAME_CHARS = 128
_MAX_NAME_BYTES = 255
_PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".dill"}
# Protocols 2 to 5 begin with PROTO; a pickle of protocol 0 or 1 has no mark and is caught by its suffix only.
_PICKLE_MARK = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
_ZIP_MARK = b"PK\x03\x04"


class Deliveries:
    """The outputs of one job, under the limits of its `[params]`."""

    def __init__(self, params: Mapping[str, Json], channel: Channel) -> None:
        self._channel = channel
        self._limits = OutputLimits.of(params)
        self._allows_pickle = params.get("allow_pickle") is True
        self._names: set[str] = set()
        self._bytes = 0

    def claim(self, name: str, kind: str) -> None:
        """Take a name for an output; raises `RunError` (`output-refused`)."""
        if kind not in ("output", "checkpoint"):
            raise UsageError(Code.USAGE, "an output's kind is output or checkpoint")
        if checked_name(name) in self._names:
            raise RunError(Code.OUTPUT_REFUSED, f"an output named {name!r} was already saved")
        if len(self._names) >= self._limits.count:
            raise RunError(
                Code.OUTPUT_REFUSED,
                f"the job returns at most {self._limits.count} outputs (max_outputs); {name!r} is one more",
                hint=f"put many small files into one archive, or raise max_outputs in [params], to at most {MAX_COUNT}",
            )
        self._names.add(name)

    def deliver(self, name: str, kind: str, content: BinaryIO) -> str:
        """Send the output of a claimed name; return its SHA-256 in hex; raises `RunError` (`output-refused`)."""
        if not self._allows_pickle and _is_pickle(name, content):
            raise _refused_pickles([name])
        size = content.seek(0, io.SEEK_END)
        content.seek(0)
        if self._bytes + size > self._limits.bytes:
            raise RunError(
                Code.OUTPUT_REFUSED,
                f"the job returns at most {self._limits.bytes} bytes (max_output_bytes); {name!r} would make it "
                f"{self._bytes + size}",
                hint="return less, or raise max_output_bytes in [params]",
            )
        self._bytes += size
        # A plaintext digest of weights may be published, of a small file it may not.
        kept = "weights" if name.endswith(".safetensors") else "file"
        return self._channel.output(
            {"type": "output", "name": name, "kind": kind, "class": kept, "bytes": size}, content
        )

    def deliver_files(self, files: Iterable[tuple[str, Path]]) -> None:
        """Deliver files by these names; raises `RunError` for those that are refused after the others."""
        pickles: list[str] = []
        refused: RunError | None = None
        for name, path in files:
            with path.open("rb") as content:
                if not self._allows_pickle and _is_pickle(name, content):
                    pickles.append(name)
                    continue
                try:
                    self.claim(name, "output")
                    self.deliver(name, "output", content)
                except RunError as error:
                    refused = refused or error
        if pickles:
            raise _refused_pickles(pickles) from refused
        if refused is not None:
            raise refused


def checked_name(name: str) -> str:
    """Return `name` when it is a relative path in the one normal spelling; raises `RunError` (`output-refused`)."""
    try:
        # The grammar that it will be sealed under: found here, where the script gets the error.
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


def _is_pickle(name: str, content: BinaryIO) -> bool:
    """Return whether an output runs code when it is loaded; leaves `content` at its start."""
    content.seek(0)
    mark = content.read(4)
    pickled = PurePosixPath(name).suffix.lower() in _PICKLE_SUFFIXES or bool(_PICKLE_MARK.match(mark))
    if not pickled and mark == _ZIP_MARK:
        pickled = _is_torch_archive(content)
    content.seek(0)
    return pickled


def _refused_pickles(names: Sequence[str]) -> RunError:
    listed = ", ".join(map(repr, names))
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
