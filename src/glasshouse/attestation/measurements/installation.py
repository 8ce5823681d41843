# pathlib would cost the runtime 30 ms at every start, to no other use:
# ruff: noqa: PTH100, PTH112, PTH113, PTH118, PTH119, PTH123, PTH208
"""An installation of Python with Glasshouse in it, as what measures it sees it: its disk, its folders, and what runs
before the first line of a program: `.pth` files with code, what these import, and the site hooks.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

SUFFIXES = (".py", ".pyc", ".so", ".dylib")
SKIPPED = frozenset({"__pycache__", "dist-packages", "site-packages"})
_MAX_DEPTH = 24
_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
# Wherever in a `.pth` file it stands: what ends a line there is not the same for every version of Python.
_CODE = re.compile(rb"import[ \t]")


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


def start_up_files(one: Installation) -> Iterator[tuple[str, str]]:
    """Yield what `site` runs before the first line of the runtime: `.pth` files with code, what they import, the hooks.

    A `.pth` file of paths alone is none of it: what lies there is measured where it is imported, wherever that is. One
    with a line of code counts as a whole, and may import anything: every word in it that names a module is taken for
    one. So is what the standard library tries to import and does not have. A file that a line names may be an archive
    with any of these in it, and counts as a whole. Directories are numbered by what they have of this, so that no other
    directory on the path counts.
    """
    # `org`: copy and pickle ask for Jython's `org.python.core`.
    modules = {b"org", b"sitecustomize", b"usercustomize", *(name.encode() for name in one.modules)}
    listings: list[list[tuple[str, str]]] = []
    named: list[str] = []
    for directory in one.sites:
        coded = []
        for listing in one.disk.names(directory, ".pth"):
            content = one.disk.content(f"{directory}/{listing}")
            named.extend(path for path in _added(one.disk, directory, content) if one.disk.is_file(path))
            if _CODE.search(content):
                modules.update(_WORD.findall(content))
                coded.append((listing, f"{directory}/{listing}"))
        listings.append(coded)
    modules -= {name.encode() for name in one.standard}  # measured there, and first in the search
    archives = [[(os.path.basename(path), path)] for path in dict.fromkeys(named)]
    for place, groups in (("file", archives), ("pth", listings), ("site", files_of_modules(one, modules))):
        for number, files in enumerate(found for found in groups if found):
            yield from ((f"{place}-{number}/{name}", path) for name, path in files)


def files_of_modules(one: Installation, modules: set[bytes]) -> list[list[tuple[str, str]]]:
    """Return the files, name below it and path, of these top-level modules in each directory that is searched.

    Raises:
        OSError: a directory cannot be read.
    """
    directories = [one.disk.real(one.stdlib)]
    for directory in one.sites:
        directories.append(one.disk.real(directory))
        for listing in one.disk.names(directory, ".pth"):
            directories.extend(_added(one.disk, directory, one.disk.content(f"{directory}/{listing}")))
    return [_modules(one.disk, directory, modules) for directory in dict.fromkeys(directories)]


def _added(disk: Disk, directory: str, content: bytes) -> list[str]:
    """Return where the paths of a `.pth` file lead: `site` takes `..` out before links are followed."""
    return [disk.real(os.path.abspath(os.path.join(directory, path))) for path in _paths(content)]


def _paths(content: bytes) -> list[str]:
    """Return every path that a version of Python could read in a `.pth` file."""
    text = os.fsdecode(content.removeprefix(b"\xef\xbb\xbf"))
    lines = (line.rstrip() for line in (*re.split("[\r\n]", text), *text.splitlines()))
    return [path for path in lines if path and "\0" not in path and not path.startswith("#")]


def _modules(disk: Disk, directory: str, modules: set[bytes]) -> list[tuple[str, str]]:
    """Return the files of these top-level modules and packages, where the directory has them."""
    found: list[tuple[str, str]] = []
    for name in disk.names(directory):
        path = f"{directory}/{name}"
        if os.fsencode(name.partition(".")[0]) not in modules:
            continue
        if name.endswith(SUFFIXES):
            found.append((name, path))
        elif disk.is_folder(path):
            found.extend(files_below(disk, path, name))
    return found


def package_directories(disk: Disk, sites: Iterable[str]) -> Iterator[str]:
    """Yield where packages are found, in this order: the site directories, and what their `.pth` files add."""
    for directory in sites:
        yield directory
        for listing in disk.names(directory, ".pth"):
            yield from _added(disk, directory, disk.content(f"{directory}/{listing}"))
