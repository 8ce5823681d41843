"""Where inputs come from: what both legs answer, and the plain folder of the raw one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias

from glasshouse.errors import Code, UsageError

if TYPE_CHECKING:  # a raw run has no package, and does not load ciphers
    from glasshouse.package.chunks import SealedAsset

__all__ = ["Buffer", "FolderInputs", "Inputs", "unknown_input"]

Buffer: TypeAlias = bytearray | memoryview


class Inputs(Protocol):
    """The files that a job may read, by their names in the package."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def size(self, name: str) -> int: ...

    def open(self, name: str) -> BinaryIO: ...

    def read_into(self, name: str, destination: Buffer, offset: int) -> int: ...

    def sealed(self, name: str) -> SealedAsset | None:
        """Return the chunks of an input that is sealed, for who opens them on a GPU; None for a plain one."""


def unknown_input(name: str) -> UsageError:
    """Return the error of a name that no input has."""
    return UsageError(
        Code.FILE_MISSING,
        f"the job has no input named {name!r}",
        hint="name it in the [inputs] table of the job file",
    )


class FolderInputs:
    """The raw leg: every regular file under a folder, named by its relative path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] | None = None

    def _known(self) -> Mapping[str, int]:
        # Listed on first need: a script that is tried out by hand may sit in a large folder.
        if self._sizes is None:
            files = (path for path in self._folder.rglob("*") if path.is_file())
            self._sizes = {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}
        return self._sizes

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._known()))

    def size(self, name: str) -> int:
        try:
            return self._known()[name]
        except KeyError:
            raise unknown_input(name) from None

    def open(self, name: str) -> BinaryIO:
        self.size(name)
        return (self._folder / name).open("rb")

    def read_into(self, name: str, destination: Buffer, offset: int) -> int:
        with self.open(name) as stream:
            stream.seek(offset)
            return _fill(stream, destination)

    def sealed(self, name: str) -> None:
        self.size(name)


def _fill(stream: BinaryIO, destination: Buffer) -> int:
    view = memoryview(destination).cast("B")
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
