"""Where inputs come from: what both legs answer, and the plain folder of the raw one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias

from glasshouse.errors import Code, UsageError

if TYPE_CHECKING:  # a raw run has no package, and does not load ciphers
    from glasshouse.package.chunks import SealedAsset

Buffer: TypeAlias = bytearray | memoryview


class Inputs(Protocol):
    """The files that a job may read, by their names in the package."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        ...

    def size(self, name: str) -> int:
        """Return how many bytes an input has; raises `UsageError` for a name that none has."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open an input for reading."""
        ...

    def read_into(self, name: str, destination: Buffer, offset: int) -> int:
        """Read from `offset`; return how many bytes, fewer only at the end of the input."""
        ...

    def sealed(self, name: str) -> SealedAsset | None:
        """Return the chunks of an input that is sealed, to open them on a GPU; None for a plain one."""
        ...


class ListedInputs(Inputs):
    """Inputs whose sizes are listed by their names."""

    _sizes: Mapping[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._sizes))

    def size(self, name: str) -> int:
        if name not in self._sizes:
            hint = "name it in the [inputs] table of the job file"
            raise UsageError(Code.FILE_MISSING, f"the job has no input named {name!r}", hint=hint)
        return self._sizes[name]


class FolderInputs(ListedInputs):
    """The raw leg: every regular file under a folder, named by its relative path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _sizes(self) -> dict[str, int]:  # type: ignore[override]  # and not to be set
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
