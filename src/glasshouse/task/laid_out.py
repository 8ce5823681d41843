"""Lays inputs out as plain files in the workspace, for code that wants paths."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from glasshouse.errors import Code, PackageError, PlatformError
from glasshouse.task.inputs import Inputs

_PIECE_BYTES = 32 << 20


def lay_out(inputs: Inputs, names: Iterable[str], directory: Path) -> None:
    """Open each named input straight into a mapped file under `directory`.

    Raises:
        PackageError: `package-path` for a name that leads out of the directory.
        PlatformError: `out-of-memory` when the workspace is too small.
    """
    for name in names:
        parts = PurePosixPath(name).parts
        if name.startswith("/") or not parts or ".." in parts:
            raise PackageError(Code.PACKAGE_PATH, "an input whose name leads out of the workspace")
        target = directory.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(inputs, name, target)


def _write(inputs: Inputs, name: str, target: Path) -> None:
    size = inputs.size(name)
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if not size:
            return
        _allocate(descriptor, size)
        with mmap.mmap(descriptor, size) as mapped, memoryview(mapped) as view:
            for start in range(0, size, _PIECE_BYTES):
                inputs.read_into(name, view[start : start + _PIECE_BYTES], start)
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, size: int) -> None:
    # Storage is taken before it is mapped: running out of it while writing would end the process by SIGBUS.
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except OSError as error:
        raise PlatformError(
            Code.OUT_OF_MEMORY,
            f"the workspace has no room for an input of {size} bytes: {error.strerror}",
            hint="rent a machine with more memory, or read the input through glasshouse.task instead of as a file",
        ) from error


def regular_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield each regular file under `directory` with its relative name, in order; links are not followed."""
    for name, entry in entries(directory):
        if entry.is_file(follow_symlinks=False):
            yield name, Path(entry.path)


def entries(directory: Path) -> list[tuple[str, os.DirEntry[str]]]:
    """Return everything under `directory` with its relative name, in order; links are not followed. Empty without it.

    However deep: `Path.rglob` and `os.walk` call themselves for each level, and a script may nest as it likes.

    Raises:
        OSError: a folder cannot be listed.
    """
    found, waiting = [], [""] if directory.is_dir() else []
    while waiting:
        below = waiting.pop()
        with os.scandir(directory / below) as listed:
            for entry in listed:
                found.append((f"{below}{entry.name}", entry))
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{below}{entry.name}/")
    return sorted(found, key=lambda one: one[0].split("/"))
