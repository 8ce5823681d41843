# pathlib would cost the runtime 30 ms at every start, to no other use:
# ruff: noqa: PTH100, PTH112, PTH113, PTH118, PTH119, PTH120, PTH123, PTH208
"""What the runtime is: digests over the files that could touch a key, by part (docs/adr/0005, 0028).

Laws: the same installation gives the same digests, from an ordinary interpreter and from one started
with `-I -B -X pycache_prefix=DIR`, wherever and however it is installed; any file more, less or changed that the
import system could load in a measured place gives another digest of its part. Byte code in `__pycache__` is not read:
the runtime never loads it.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Thread

import cryptography

import glasshouse
from glasshouse.attestation.measured import PARTS, Measured
from glasshouse.errors import Code, PlatformError
from glasshouse.wire.kdf import lengths_prefixed, sha256

__all__ = [
    "Disk",
    "Installation",
    "files_of_modules",
    "measure_environment",
    "measure_runtime",
    "measured_files",
    "package_directories",
]

_ENVIRONMENT_LABEL = b"glasshouse environment v1"
_SUFFIXES = (".py", ".pyc", ".so", ".dylib")
_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
# Wherever in a `.pth` file it stands: what ends a line there is not the same for every version of Python.
_CODE = re.compile(rb"import[ \t]")
_SKIPPED = frozenset({"__pycache__", "dist-packages", "site-packages"})
_MAX_DEPTH = 24
_MAX_FILES = 50_000
_BUFFER_BYTES = 256 * 1024
_THREADS = 4

# A measured file: its part, its name there, where it lies.
_Place = tuple[str, str, str]


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
    """What an interpreter says of itself before its files are read.

    Attributes:
        disk: where all of it lies.
        programs: the paths that it may have been started by; a `._pth` file beside one of them is obeyed.
        python: the file that is the interpreter.
        version: its major and minor version.
        stdlib: the folder of its standard library.
        modules: top-level names of the standard library, in any build of that version.
        standard: those for which another directory is not asked.
        sites: its site directories, in the order of the search path.
        packages: the folders of `blake3`, `cryptography` and `glasshouse`.
        foreign: the file of `_cffi_backend`, where there is one.
    """

    disk: Disk
    programs: frozenset[str]
    python: str
    version: tuple[int, int]
    stdlib: str
    modules: frozenset[str]
    standard: frozenset[str]
    sites: tuple[str, ...]
    packages: Mapping[str, str]
    foreign: str | None


def measure_runtime() -> Measured:
    """Measure the installation that is running.

    Uses threads that have ended when it returns; call it after the custodian was forked.

    Raises:
        PlatformError: `platform-unsupported` when a file cannot be read or there are absurdly many.
    """
    return Measured.of(measured_files())


def measured_files(installation: Installation | None = None) -> dict[str, dict[str, bytes]]:
    """Return each part's files, name → SHA-256: to see where two installations differ.

    Names begin with the package or place (``blake3/``, ``stdlib/``, …) and do not say where that is.

    Args:
        installation: that is not running; None for the one that is.

    Raises:
        PlatformError: as `measure_runtime`.
    """
    try:
        one = _running() if installation is None else installation
        places: dict[tuple[str, str], str] = {}
        for part, name, path in _places(one):
            if places.setdefault((part, name), path) != path or os.fsencode(name) != name.encode(errors="replace"):
                raise OSError(f"two files are both {name!r} of {part}, or it is no text")
        found = sorted(places.items())
        digests = _digests([path for _, path in found], one.disk)
    except OSError as error:
        raise _unreadable(error) from error
    files: dict[str, dict[str, bytes]] = {part: {} for part in PARTS}
    for ((part, name), _), digest in zip(found, digests, strict=True):
        files[part][name] = digest
    return files


def measure_environment() -> bytes:
    """Return a digest over what else is installed: each distribution's name, version and RECORD.

    It is reported in evidence and receipt; the gate does not judge it, as frameworks are trusted
    with plaintext only.

    Raises:
        PlatformError: as `measure_runtime`.
    """
    disk = Disk()
    try:
        found: dict[str, str] = {}
        for place in package_directories(disk, _site_directories()):
            for name in disk.names(place, ".dist-info"):
                found.setdefault(name, f"{place}/{name}/RECORD")  # the first, as imports take it
        others = {name: record for name, record in found.items() if not name.startswith("glasshouse_train-")}
        records = {name: record for name, record in others.items() if os.path.isfile(record)}
        digests = dict(zip(records, _digests(list(records.values()), disk), strict=True))
    except OSError as error:
        raise _unreadable(error) from error
    parts = [part for name in sorted(others) for part in (name.encode(), digests.get(name, b""))]
    return sha256(lengths_prefixed(_ENVIRONMENT_LABEL, *parts))


def _running() -> Installation:
    """Return the installation that is running; raises `OSError`."""
    stdlib, own, crypto = (os.path.dirname(module.__file__ or "") for module in (os, glasshouse, cryptography))
    disk, base = Disk(), sys._base_executable  # type: ignore[attr-defined]  # not in the type stubs
    one = Installation(
        disk=disk,
        programs=frozenset({path for one in (sys.executable, base) for path in (one, os.path.realpath(one))}),
        python=os.path.realpath(sys.executable),
        version=sys.version_info[:2],
        stdlib=stdlib,
        modules=sys.stdlib_module_names,
        standard=_standard(stdlib, disk),
        sites=tuple(_site_directories()),
        packages={"blake3": os.path.dirname(_found("blake3")), "cryptography": crypto, "glasshouse": own},
        foreign=_module("_cffi_backend"),
    )
    _refuse_another_search(one)
    return one


def _places(one: Installation) -> Iterator[_Place]:
    """Yield every file to measure."""
    disk, stdlib = one.disk, one.stdlib
    _refuse_settings(one)
    yield from _of("glasshouse", _tree(disk, one.packages["glasshouse"], "glasshouse"))
    yield from _of("cryptography", _tree(disk, one.packages["cryptography"], "cryptography"))
    # Native code beside the plaintext of every package's assets.
    yield from _of("cryptography", _tree(disk, one.packages["blake3"], "blake3"))
    if one.foreign is not None:  # the one module outside itself that `cryptography` loads
        yield "cryptography", os.path.basename(one.foreign), one.foreign
    yield "interpreter", "python", one.python
    yield from _of("interpreter", _beside_the_interpreter(one))
    # Without its own tests, which nothing imports.
    yield from _of("interpreter", _tree(disk, stdlib, "stdlib", skipped=_SKIPPED | {"test"}))
    yield from _of("start_up", _start_up(one))


def _of(part: str, files: Iterator[tuple[str, str]]) -> Iterator[_Place]:
    return ((part, name, path) for name, path in files)


def _found(package: str) -> str:
    """Return the file by which a module that we depend on is imported; raises `OSError`."""
    path = _module(package)
    if path is None:
        raise OSError(f"{package}, which this version needs, is not installed")
    return path


def _module(name: str) -> str | None:
    """Return the file by which a module would be imported, without importing it."""
    found = importlib.util.find_spec(name)
    return None if found is None else found.origin


def _archive(stdlib: str) -> str:
    """Return where the zip in front of the standard library lies, if there is one: `python311.zip`."""
    return f"{os.path.dirname(stdlib)}/{os.path.basename(stdlib).replace('.', '')}.zip"


def _beside_the_interpreter(one: Installation) -> Iterator[tuple[str, str]]:
    """Yield the shared library that holds an interpreter, and the zip in front of the standard library, if any."""
    major, minor = one.version
    directory = os.path.dirname(one.stdlib)
    for name in one.disk.names(directory):
        if name.startswith(f"libpython{major}.{minor}") and ".so" in name:
            library = one.disk.real(f"{directory}/{name}")
            yield os.path.basename(library), library
        elif name == os.path.basename(_archive(one.stdlib)):
            yield "stdlib.zip", f"{directory}/{name}"


def _refuse_settings(one: Installation) -> None:
    """Raise `OSError` where a file sets the whole search path.

    Source: CPython, Modules/getpath.py: a `._pth` file beside interpreter or library does.
    """
    beside = os.path.dirname(one.stdlib)
    settings = [f"{path}._pth" for path in sorted(one.programs)]
    settings += [f"{beside}/{name}" for name in one.disk.names(beside, "._pth") if name.startswith("libpython")]
    for path in settings:
        if one.disk.is_there(path):
            raise OSError(f"{path} changes where Python looks for modules; remove that file")


def _refuse_another_search(one: Installation) -> None:
    """Raise `OSError` where this interpreter looks for the standard library in places that are not measured for it.

    Source: CPython, Modules/getpath.py: `pyvenv.cfg` or `pybuilddir.txt` can move native modules alone.
    """
    if not sys.flags.isolated:
        return  # an owner's ordinary interpreter has the working directory and PYTHONPATH in front; no runtime does
    stdlib = one.stdlib
    expected = {os.path.realpath(path) for path in (_archive(stdlib), stdlib, f"{stdlib}/lib-dynload")}
    sites = {os.path.realpath(path) for path in one.sites}
    for path in sys.path:
        place = os.path.realpath(path)
        if place in sites:
            return
        if place not in expected:
            raise OSError(f"{path} is searched for modules before any package; look into pyvenv.cfg and start-up hooks")


def _tree(disk: Disk, directory: str, name: str, *, skipped: frozenset[str] = _SKIPPED) -> Iterator[tuple[str, str]]:
    """Yield what the import system could load below a directory, links followed as it follows them."""
    below = [(directory, name, 0)]
    while below:
        path, prefix, depth = below.pop()
        if depth > _MAX_DEPTH:
            raise OSError("a directory tree without end")
        for entry, is_folder in disk.listed(path):
            if entry.endswith(_SUFFIXES):
                yield f"{prefix}/{entry}", f"{path}/{entry}"
            elif is_folder and entry not in (skipped if depth == 0 else _SKIPPED):
                below.append((f"{path}/{entry}", f"{prefix}/{entry}", depth + 1))


def _start_up(one: Installation) -> Iterator[tuple[str, str]]:
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


def _standard(stdlib: str, disk: Disk) -> frozenset[str]:
    """Return the names of the standard library for which this build has a module that is measured.

    An empty folder of that name is none: a module of a later directory is found before it.
    """
    suffixes = importlib.machinery.all_suffixes()
    found = set(sys.builtin_module_names)
    for directory in (stdlib, f"{stdlib}/lib-dynload"):
        for name in disk.names(directory):
            module, dot, rest = name.partition(".")
            if f".{rest}" in suffixes if dot else disk.is_file(f"{directory}/{name}/__init__.py"):
                found.add(module)
    return sys.stdlib_module_names & found


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
        if name.endswith(_SUFFIXES):
            found.append((name, path))
        elif disk.is_folder(path):
            found.extend(_tree(disk, path, name))
    return found


def _site_directories() -> list[str]:
    # The user's own site directory is left out: the runtime's `-I` never looks there. `sys.path` is not asked:
    # an ordinary interpreter has the working directory and PYTHONPATH in it.
    return [os.path.abspath(directory) for directory in site.getsitepackages() if os.path.isdir(directory)]


def package_directories(disk: Disk, sites: Iterable[str]) -> Iterator[str]:
    """Yield where packages are found, in this order: the site directories, and what their `.pth` files add."""
    for directory in sites:
        yield directory
        for listing in disk.names(directory, ".pth"):
            yield from _added(disk, directory, disk.content(f"{directory}/{listing}"))


def _digests(paths: list[str], disk: Disk) -> list[bytes]:
    """Hash files in threads (`hashlib` and `readinto` release the lock), each through one reused buffer."""
    if len(paths) > _MAX_FILES:
        raise OSError(f"more than {_MAX_FILES} files to measure")
    found: list[bytes] = [b""] * len(paths)
    errors: list[OSError] = []
    # Handed out in turn from one iterator, so that no thread is left with the large ones.
    work = iter(range(len(paths)))

    def run() -> None:
        buffer = bytearray(_BUFFER_BYTES)
        try:
            for index in work:
                found[index] = disk.digest(paths[index], buffer)
        except OSError as error:
            errors.append(error)

    threads = [Thread(target=run, name="measure") for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def _unreadable(error: OSError) -> PlatformError:
    return PlatformError(Code.PLATFORM, f"the installation cannot be measured: {error.strerror or error}")
