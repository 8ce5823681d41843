"""Where inputs come from, in both legs: the plain folder of the raw one, and inputs laid out as plain files."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from glasshouse.errors import Code, PackageError, PlatformError, UsageError

if TYPE_CHECKING:  # a raw run has no package
    from glasshouse.package.streams import SealedAsset

Buffer: TypeAlias = bytearray | memoryview

_PIECE_BYTES = 32 << 20


class Inputs(ABC):
    """The files that a job may read, by their names in the package."""

    sizes: Mapping[str, int]  # in bytes, by name

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self.sizes))

    def size(self, name: str) -> int:
        """Return how many bytes an input has; raises `UsageError` for a name that none has."""
        if name not in self.sizes:
            hint = "name it in the [inputs] table of the job file"
            raise UsageError(Code.FILE_MISSING, f"the job has no input named {name!r}", hint=hint)
        return self.sizes[name]

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open an input for reading."""

    @abstractmethod
    def read_into(self, name: str, destination: Buffer, offset: int) -> int:
        """Read from `offset`; return how many bytes, fewer only at the end of the input."""

    @abstractmethod
    def sealed(self, name: str) -> SealedAsset | None:
        """Return the chunks of an input that is sealed, to open them on a GPU; None for a plain one."""


class FolderInputs(Inputs):
    """The raw leg: every regular file under a folder, named by its relative path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def sizes(self) -> dict[str, int]:  # type: ignore[override]  # and not to be set
        # Listed on first need: a script that is tried out by hand may sit in a large folder.
        files = (path for path in self._folder.rglob("*") if path.is_file())
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}

    def open(self, name: str) -> BinaryIO:
        self.size(name)
        return (self._folder / name).open("rb")

    def read_into(self, name: str, destination: Buffer, offset: int) -> int:
        with self.open(name) as stream:
            stream.seek(offset)
            return stream.readinto(destination)  # type: ignore[attr-defined,no-any-return]  # buffered: reads it all

    def sealed(self, name: str) -> None:
        self.size(name)


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
        write_file(directory.joinpath(*parts), inputs.size(name), partial(inputs.read_into, name))


def write_file(target: Path, size: int, read_into: Callable[[memoryview, int], object]) -> None:
    """Make a file of `size` bytes, which are read straight into its mapping, each piece from its offset.

    Raises:
        PlatformError: `out-of-memory` when the workspace is too small.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if not size:
            return
        _allocate(descriptor, size)
        # Not closed when reading fails: the failure's frames hold pieces of it, and that would fail in its place.
        view = memoryview(mmap.mmap(descriptor, size))
        for start in range(0, size, _PIECE_BYTES):
            read_into(view[start : start + _PIECE_BYTES], start)
        view.release()
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
