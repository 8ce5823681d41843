# pathlib would cost the runtime 30 ms at every start, to no other use:
# ruff: noqa: PTH112, PTH113, PTH118, PTH119, PTH120, PTH123, PTH208
"""What the runtime is: digests over the files that could touch a key (docs/adr/0005).

Laws: the same installation gives the same digest, from an ordinary interpreter and from one started
with `-I -B -X pycache_prefix=DIR`, wherever it is installed; any file more, less or changed that the
import system could load in a measured place gives another. Byte code in `__pycache__` is not read:
the runtime never loads it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import site
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Thread

import cryptography

import glasshouse
from glasshouse.errors import Code, PlatformError
from glasshouse.wire.kdf import lengths_prefixed, sha256

__all__ = ["Measurement", "measure_environment", "measure_runtime", "runtime_files"]

_LABEL = b"glasshouse runtime measurement v1"
_ENVIRONMENT_LABEL = b"glasshouse environment v1"
_SUFFIXES = (".py", ".pyc", ".so", ".dylib")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SKIPPED = frozenset({"__pycache__", "dist-packages", "site-packages"})
_MAX_DEPTH = 24
_MAX_FILES = 50_000
_BUFFER_BYTES = 256 * 1024
_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The runtime measurement.

    Attributes:
        sha256: 32 bytes, compared with the deployment's reference values (check 8).
        files: how many files it covers.
    """

    sha256: bytes
    files: int


def measure_runtime() -> Measurement:
    """Measure the installation that is running.

    Uses threads that have ended when it returns; call it after the custodian was forked.

    Raises:
        PlatformError: `platform-unsupported` when a file cannot be read or there are absurdly many.
    """
    files = runtime_files()
    parts = [part for name, digest in files for part in (name.encode(), digest)]
    return Measurement(sha256=sha256(lengths_prefixed(_LABEL, *parts)), files=len(files))


def runtime_files() -> list[tuple[str, bytes]]:
    """Return every measured file's name and SHA-256, sorted by name: to see where two installations differ.

    Names begin with the place (``glasshouse/``, ``stdlib/``, …) and do not say where that place is.

    Raises:
        PlatformError: as `measure_runtime`.
    """
    try:
        return _digests(sorted(dict(_places()).items()))
    except OSError as error:
        raise _unreadable(error) from error


def measure_environment() -> bytes:
    """Return a digest over what else is installed: each distribution's name, version and RECORD.

    It is reported in evidence and receipt; the gate does not judge it, as frameworks are trusted
    with plaintext only.

    Raises:
        PlatformError: as `measure_runtime`.
    """
    try:
        found = {
            name: f"{place}/{name}/RECORD" for place in _site_directories() for name in _names(place, ".dist-info")
        }
        others = {name: record for name, record in found.items() if not name.startswith("glasshouse_train-")}
        digests = dict(_digests([(name, record) for name, record in others.items() if os.path.isfile(record)]))
    except OSError as error:
        raise _unreadable(error) from error
    parts = [part for name in sorted(others) for part in (name.encode(), digests.get(name, b""))]
    return sha256(lengths_prefixed(_ENVIRONMENT_LABEL, *parts))


def _places() -> Iterator[tuple[str, str]]:
    """Yield (name, path) of every file to measure."""
    stdlib, own, crypto = (os.path.dirname(module.__file__ or "") for module in (os, glasshouse, cryptography))
    yield "interpreter", os.path.realpath(sys.executable)
    yield from _beside_the_interpreter(os.path.dirname(stdlib))
    yield from _tree(own, "glasshouse")
    yield from _tree(crypto, "cryptography")
    yield from _tree(_directory("blake3"), "blake3")  # native code beside the plaintext of every package's assets
    yield from _tree(stdlib, "stdlib", skipped=_SKIPPED | {"test"})  # its own tests, which nothing imports
    yield from _start_up(stdlib)


def _directory(package: str) -> str:
    """Return where a package that we depend on is installed, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise OSError(f"{package}, which this version needs, is not installed")
    return os.path.dirname(found.origin)


def _beside_the_interpreter(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the shared library that holds an interpreter, and the zip in front of the standard library, if any."""
    major, minor = sys.version_info[:2]
    for name in _names(directory, ""):
        if name.startswith(f"libpython{major}.{minor}") and ".so" in name:
            library = os.path.realpath(f"{directory}/{name}")
            yield f"interpreter/{os.path.basename(library)}", library
        elif name == f"python{major}{minor}.zip":
            yield "interpreter/python.zip", f"{directory}/{name}"


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
    """Yield what `site` reads or runs before the first line of the runtime: `.pth` files, their code, the hooks.

    A `.pth` line that is code may import anything: every word in it that names a module is taken for one.
    With them goes the one module outside itself that `cryptography` loads.
    """
    directories, modules = [stdlib], {"_cffi_backend", "sitecustomize", "usercustomize"}
    for number, directory in enumerate(_site_directories()):
        directories.append(directory)
        for listing in _names(directory, ".pth"):
            yield f"pth-{number}/{listing}", f"{directory}/{listing}"
            for line in _lines(f"{directory}/{listing}"):
                if line.startswith(("import ", "import\t")):
                    modules.update(_WORD.findall(line))
                else:
                    directories.append(os.path.join(directory, line))
    modules -= sys.stdlib_module_names  # measured with the standard library, which comes first in the search
    for number, directory in enumerate(dict.fromkeys(directories)):
        yield from _modules(directory, f"site-{number}", modules)


def _modules(directory: str, prefix: str, modules: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the files of these top-level modules and packages, where the directory has them."""
    for name in _names(directory, ""):
        path = f"{directory}/{name}"
        if name.partition(".")[0] not in modules:
            continue
        if name.endswith(_SUFFIXES):
            yield f"{prefix}/{name}", path
        elif os.path.isdir(path):
            yield from _tree(path, f"{prefix}/{name}")


def _site_directories() -> list[str]:
    # The user's own site directory is left out: the runtime's `-I` never looks there. `sys.path` is not asked:
    # an ordinary interpreter has the working directory and PYTHONPATH in it.
    return [directory for directory in site.getsitepackages() if os.path.isdir(directory)]


def _names(directory: str, suffix: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(suffix)) if os.path.isdir(directory) else []


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as listing:
        return [line.rstrip() for line in listing if line.strip() and not line.startswith("#")]


def _digests(files: list[tuple[str, str]]) -> list[tuple[str, bytes]]:
    """Hash files in threads (`hashlib` and `readinto` release the lock), each through one reused buffer."""
    if len(files) > _MAX_FILES:
        raise OSError(f"more than {_MAX_FILES} files to measure")
    found: list[bytes] = [b""] * len(files)
    errors: list[OSError] = []
    # Handed out in turn from one iterator, so that no thread is left with the large ones.
    work = iter(range(len(files)))

    def run() -> None:
        buffer = bytearray(_BUFFER_BYTES)
        try:
            for index in work:
                found[index] = _file_digest(files[index][1], buffer)
        except OSError as error:
            errors.append(error)

    threads = [Thread(target=run, name="measure") for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [(name, digest) for (name, _), digest in zip(files, found, strict=True)]


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
