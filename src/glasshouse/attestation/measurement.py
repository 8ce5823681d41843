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
from collections.abc import Iterator
from threading import Thread

import cryptography

import glasshouse
from glasshouse.attestation.measured import PARTS, Measured
from glasshouse.errors import Code, PlatformError
from glasshouse.wire.kdf import lengths_prefixed, sha256

__all__ = ["measure_environment", "measure_runtime", "measured_files"]

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


def measure_runtime() -> Measured:
    """Measure the installation that is running.

    Uses threads that have ended when it returns; call it after the custodian was forked.

    Raises:
        PlatformError: `platform-unsupported` when a file cannot be read or there are absurdly many.
    """
    return Measured.of(measured_files())


def measured_files() -> dict[str, dict[str, bytes]]:
    """Return each part's files, name → SHA-256: to see where two installations differ.

    Names begin with the package or place (``blake3/``, ``stdlib/``, …) and do not say where that is.

    Raises:
        PlatformError: as `measure_runtime`.
    """
    try:
        places: dict[tuple[str, str], str] = {}
        for part, name, path in _places():
            if places.setdefault((part, name), path) != path or os.fsencode(name) != name.encode(errors="replace"):
                raise OSError(f"two files are both {name!r} of {part}, or it is no text")
        found = sorted(places.items())
        digests = _digests([path for _, path in found])
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
    try:
        found: dict[str, str] = {}
        for place in _packages_directories():
            for name in _names(place, ".dist-info"):
                found.setdefault(name, f"{place}/{name}/RECORD")  # the first, as imports take it
        others = {name: record for name, record in found.items() if not name.startswith("glasshouse_train-")}
        records = {name: record for name, record in others.items() if os.path.isfile(record)}
        digests = dict(zip(records, _digests(list(records.values())), strict=True))
    except OSError as error:
        raise _unreadable(error) from error
    parts = [part for name in sorted(others) for part in (name.encode(), digests.get(name, b""))]
    return sha256(lengths_prefixed(_ENVIRONMENT_LABEL, *parts))


def _places() -> Iterator[_Place]:
    """Yield every file to measure."""
    stdlib, own, crypto = (os.path.dirname(module.__file__ or "") for module in (os, glasshouse, cryptography))
    _refuse_another_search(stdlib)
    yield from _of("glasshouse", _tree(own, "glasshouse"))
    yield from _of("cryptography", _tree(crypto, "cryptography"))
    # Native code beside the plaintext of every package's assets.
    yield from _of("cryptography", _tree(os.path.dirname(_found("blake3")), "blake3"))
    if (foreign := _module("_cffi_backend")) is not None:  # the one module outside itself that `cryptography` loads
        yield "cryptography", os.path.basename(foreign), foreign
    yield "interpreter", "python", os.path.realpath(sys.executable)
    yield from _of("interpreter", _beside_the_interpreter(stdlib))
    # Without its own tests, which nothing imports.
    yield from _of("interpreter", _tree(stdlib, "stdlib", skipped=_SKIPPED | {"test"}))
    yield from _of("start_up", _start_up(stdlib))


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


def _beside_the_interpreter(stdlib: str) -> Iterator[tuple[str, str]]:
    """Yield the shared library that holds an interpreter, and the zip in front of the standard library, if any."""
    major, minor = sys.version_info[:2]
    directory = os.path.dirname(stdlib)
    for name in _names(directory, ""):
        if name.startswith(f"libpython{major}.{minor}") and ".so" in name:
            library = os.path.realpath(f"{directory}/{name}")
            yield os.path.basename(library), library
        elif name == os.path.basename(_archive(stdlib)):
            yield "stdlib.zip", f"{directory}/{name}"


def _refuse_another_search(stdlib: str) -> None:
    """Raise `OSError` where this interpreter looks for the standard library in places that are not measured for it.

    Source: CPython, Modules/getpath.py: a `._pth` file beside interpreter or library sets the whole search path, and
    `pyvenv.cfg` or `pybuilddir.txt` can move native modules alone.
    """
    beside = os.path.dirname(stdlib)
    base = sys._base_executable  # type: ignore[attr-defined]  # not in the type stubs
    programs = {path for one in (sys.executable, base) for path in (one, os.path.realpath(one))}
    settings = [f"{path}._pth" for path in sorted(programs)]
    settings += [f"{beside}/{name}" for name in _names(beside, "._pth") if name.startswith("libpython")]
    for path in settings:
        if os.path.lexists(path):
            raise OSError(f"{path} changes where Python looks for modules; remove that file")
    if not sys.flags.isolated:
        return  # an owner's ordinary interpreter has the working directory and PYTHONPATH in front; no runtime does
    expected = {os.path.realpath(path) for path in (_archive(stdlib), stdlib, f"{stdlib}/lib-dynload")}
    sites = {os.path.realpath(path) for path in _site_directories()}
    for path in sys.path:
        place = os.path.realpath(path)
        if place in sites:
            return
        if place not in expected:
            raise OSError(f"{path} is searched for modules before any package; look into pyvenv.cfg and start-up hooks")


def _tree(directory: str, name: str, *, skipped: frozenset[str] = _SKIPPED) -> Iterator[tuple[str, str]]:
    """Yield what the import system could load below a directory, links followed as it follows them."""
    below = [(directory, name, 0)]
    while below:
        path, prefix, depth = below.pop()
        if depth > _MAX_DEPTH:
            raise OSError("a directory tree without end")
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIXES):
                    yield f"{prefix}/{entry.name}", entry.path
                elif entry.name not in (skipped if depth == 0 else _SKIPPED) and entry.is_dir():
                    below.append((entry.path, f"{prefix}/{entry.name}", depth + 1))


def _start_up(stdlib: str) -> Iterator[tuple[str, str]]:
    """Yield what `site` runs before the first line of the runtime: `.pth` files with code, what they import, the hooks.

    A `.pth` file of paths alone is none of it: what lies there is measured where it is imported, wherever that is. One
    with a line of code counts as a whole, and may import anything: every word in it that names a module is taken for
    one. So is what the standard library tries to import and does not have. A file that a line names may be an archive
    with any of these in it, and counts as a whole. Directories are numbered by what they have of this, so that no other
    directory on the path counts.
    """
    # `org`: copy and pickle ask for Jython's `org.python.core`.
    modules = {b"org", b"sitecustomize", b"usercustomize", *(name.encode() for name in sys.stdlib_module_names)}
    directories, listings = [os.path.realpath(stdlib)], []
    named: list[str] = []
    for directory in _site_directories():
        directories.append(os.path.realpath(directory))
        coded = []
        for listing in _names(directory, ".pth"):
            content = _content(f"{directory}/{listing}")
            added = _added(directory, content)
            directories.extend(added)
            named.extend(path for path in added if os.path.isfile(path))
            if _CODE.search(content):
                modules.update(_WORD.findall(content))
                coded.append((listing, f"{directory}/{listing}"))
        listings.append(coded)
    modules -= _standard(stdlib)  # measured there, and first in the search
    hooks = [_modules(directory, modules) for directory in dict.fromkeys(directories)]
    archives = [[(os.path.basename(path), path)] for path in dict.fromkeys(named)]
    for place, groups in (("file", archives), ("pth", listings), ("site", hooks)):
        for number, files in enumerate(found for found in groups if found):
            yield from ((f"{place}-{number}/{name}", path) for name, path in files)


def _standard(stdlib: str) -> set[bytes]:
    """Return the names of the standard library for which this build has a module that is measured.

    An empty folder of that name is none: a module of a later directory is found before it.
    """
    suffixes = importlib.machinery.all_suffixes()
    found = set(sys.builtin_module_names)
    for directory in (stdlib, f"{stdlib}/lib-dynload"):
        for name in _names(directory, ""):
            module, dot, rest = name.partition(".")
            if f".{rest}" in suffixes if dot else os.path.isfile(f"{directory}/{name}/__init__.py"):
                found.add(module)
    return {name.encode() for name in sys.stdlib_module_names & found}


def _added(directory: str, content: bytes) -> list[str]:
    """Return where the paths of a `.pth` file lead: `site` takes `..` out before links are followed."""
    return [os.path.realpath(os.path.abspath(os.path.join(directory, path))) for path in _paths(content)]


def _paths(content: bytes) -> list[str]:
    """Return every path that a version of Python could read in a `.pth` file."""
    text = os.fsdecode(content.removeprefix(b"\xef\xbb\xbf"))
    lines = (line.rstrip() for line in (*re.split("[\r\n]", text), *text.splitlines()))
    return [path for path in lines if path and "\0" not in path and not path.startswith("#")]


def _modules(directory: str, modules: set[bytes]) -> list[tuple[str, str]]:
    """Return the files of these top-level modules and packages, where the directory has them."""
    found: list[tuple[str, str]] = []
    for name in _names(directory, ""):
        path = f"{directory}/{name}"
        if os.fsencode(name.partition(".")[0]) not in modules:
            continue
        if name.endswith(_SUFFIXES):
            found.append((name, path))
        elif os.path.isdir(path):
            found.extend(_tree(path, name))
    return found


def _site_directories() -> list[str]:
    # The user's own site directory is left out: the runtime's `-I` never looks there. `sys.path` is not asked:
    # an ordinary interpreter has the working directory and PYTHONPATH in it.
    return [os.path.abspath(directory) for directory in site.getsitepackages() if os.path.isdir(directory)]


def _packages_directories() -> Iterator[str]:
    """Yield where distributions are found: the site directories, and what their `.pth` files add."""
    for directory in _site_directories():
        yield directory
        for listing in _names(directory, ".pth"):
            yield from _added(directory, _content(f"{directory}/{listing}"))


def _names(directory: str, suffix: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(suffix)) if os.path.isdir(directory) else []


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _digests(paths: list[str]) -> list[bytes]:
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
                found[index] = _file_digest(paths[index], buffer)
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


def _file_digest(path: str, buffer: bytearray) -> bytes:
    digest, view = hashlib.sha256(), memoryview(buffer)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while read := os.readv(descriptor, [buffer]):
            digest.update(view[:read])
    finally:
        os.close(descriptor)
    return digest.digest()


def _unreadable(error: OSError) -> PlatformError:
    return PlatformError(Code.PLATFORM, f"the installation cannot be measured: {error.strerror or error}")
