# pathlib would cost the runtime 30 ms at every start, to no other use:
# ruff: noqa: PTH112, PTH113, PTH123, PTH208
"""An installation of Python with Glasshouse in it, as what measures it sees it: folders, and the disk that has them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SUFFIXES = (".py", ".pyc", ".so", ".dylib")
SKIPPED = frozenset({"__pycache__", "dist-packages", "site-packages"})
_MAX_DEPTH = 24


class Disk:
    """The files of this machine, as its kernel leads to them; another one may be what an owner has unpacked."""

    def names(self, directory: str, suffix: str = "") -> list[str]:
        """Return the names with that end in a folder, sorted; none where there is no folder."""
        if not self.is_folder(directory):
            return []
        return sorted(name for name in os.listdir(directory) if name.endswith(suffix))

    def listed(self, directory: str) -> Iterator[tuple[str, bool]]:
        """Yield each name in a folder, and whether it leads to a folder."""
        with os.scandir(directory) as entries:
            for entry in entries:
                yield entry.name, entry.is_dir()

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def is_there(self, path: str) -> bool:
        """Return whether something has that name, also a link to nowhere."""
        return os.path.lexists(path)

    def real(self, path: str) -> str:
        """Return where a path leads, links followed, as far as there is something."""
        return os.path.realpath(path)

    def digest(self, path: str, buffer: bytearray) -> bytes:
        """Return the SHA-256 of a file, read through a buffer."""
        digest, view = hashlib.sha256(), memoryview(buffer)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while read := os.readv(descriptor, [buffer]):
                digest.update(view[:read])
        finally:
            os.close(descriptor)
        return digest.digest()

    def content(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """Where an interpreter and its packages lie, before their files are read."""

    disk: Disk  # where all of it lies
    programs: frozenset[str]  # the paths that it may have been started by; a `._pth` file beside one of them is obeyed
    python: str  # the file that is the interpreter
    version: tuple[int, int]  # its major and minor version
    stdlib: str  # the folder of its standard library
    modules: frozenset[str]  # top-level names of the standard library, in any build of that version
    standard: frozenset[str]  # those for which another directory is not asked
    sites: tuple[str, ...]  # its site directories, in the order of the search path
    packages: Mapping[str, str]  # the folders of `blake3`, `cryptography` and `glasshouse`
    foreign: str | None  # the file of `_cffi_backend`, where there is one


def files_below(
    disk: Disk, directory: str, name: str, *, skipped: frozenset[str] = SKIPPED
) -> Iterator[tuple[str, str]]:
    """Yield what the import system could load below a directory, links followed as it follows them."""
    below = [(directory, name, 0)]
    while below:
        path, prefix, depth = below.pop()
        if depth > _MAX_DEPTH:
            raise OSError("a directory tree without end")
        for entry, is_folder in disk.listed(path):
            if entry.endswith(SUFFIXES):
                yield f"{prefix}/{entry}", f"{path}/{entry}"
            elif is_folder and entry not in (skipped if depth == 0 else SKIPPED):
                below.append((f"{path}/{entry}", f"{prefix}/{entry}", depth + 1))
