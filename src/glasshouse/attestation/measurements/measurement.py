# pathlib would cost the runtime 30 ms at every start, to no other use:
# ruff: noqa: PTH100, PTH112, PTH113, PTH119, PTH120
"""What the runtime is: digests over the files that could touch a key, by part (docs/adr/0005, 0028).

Laws: the same installation gives the same digests, from an ordinary interpreter and from one started
with `-I -B -X pycache_prefix=DIR`, wherever and however it is installed; any file more, less or changed that the
import system could load in a measured place gives another digest of its part. Byte code in `__pycache__` is not read:
the runtime never loads it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import site
import sys
from collections.abc import Iterator
from threading import Thread

import cryptography

import glasshouse
from glasshouse.attestation.measurements.installation import (
    SKIPPED,
    Disk,
    Installation,
    files_below,
    package_directories,
    start_up_files,
)
from glasshouse.attestation.measurements.measured import PARTS, Measured
from glasshouse.errors import Code, PlatformError
from glasshouse.wire.crypto import lengths_prefixed, sha256

_ENVIRONMENT_LABEL = b"glasshouse environment v1"
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


def measured_files(installation: Installation | None = None) -> dict[str, dict[str, bytes]]:
    """Return each part's files, name → SHA-256: to see where two installations differ.

    Names begin with the package or place (``blake3/``, ``stdlib/``, …) and not with its path.

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
    if (native := _module("blake3")) is None:
        raise OSError("blake3, which this version needs, is not installed")
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
        packages={"blake3": os.path.dirname(native), "cryptography": crypto, "glasshouse": own},
        foreign=_module("_cffi_backend"),
    )
    _refuse_another_search(one)
    return one


def _places(one: Installation) -> Iterator[_Place]:
    """Yield every file to measure."""
    disk, stdlib = one.disk, one.stdlib
    _refuse_settings(one)
    yield from _of("glasshouse", files_below(disk, one.packages["glasshouse"], "glasshouse"))
    yield from _of("cryptography", files_below(disk, one.packages["cryptography"], "cryptography"))
    # Native code beside the plaintext of every package's assets.
    yield from _of("cryptography", files_below(disk, one.packages["blake3"], "blake3"))
    if one.foreign is not None:  # the one module outside itself that `cryptography` loads
        yield "cryptography", os.path.basename(one.foreign), one.foreign
    yield "interpreter", "python", one.python
    yield from _of("interpreter", _beside_the_interpreter(one))
    # Without its own tests, which nothing imports.
    yield from _of("interpreter", files_below(disk, stdlib, "stdlib", skipped=SKIPPED | {"test"}))
    yield from _of("start_up", start_up_files(one))


def _of(part: str, files: Iterator[tuple[str, str]]) -> Iterator[_Place]:
    return ((part, name, path) for name, path in files)


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


def _site_directories() -> list[str]:
    # The user's own site directory is left out: the runtime's `-I` never looks there. `sys.path` is not asked:
    # an ordinary interpreter has the working directory and PYTHONPATH in it.
    return [os.path.abspath(directory) for directory in site.getsitepackages() if os.path.isdir(directory)]


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
