"""A bundle: what a runtime's machine needs of Glasshouse, in one reproducible file (docs/adr/0029).

Laws: the same installed files give the same bytes, wherever and however they were installed; it has no program of its
own, no start-up file and no byte code.
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import glasshouse
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import read_bounded, write_private
from glasshouse.jobs.owner.installation import DISTRIBUTION
from glasshouse.providers.serve.unpack import MANIFEST, MAX_BYTES, is_bundle
from glasshouse.wire.record import Record, table, text

FORMAT = "glasshouse-bundle/1"
_WITH = ("blake3", "cffi", "cryptography")
"""What the runtime imports beside the standard library and itself."""

_PREFIX = "site-packages/"
_OF_METADATA = re.compile(r"[^/]+\.dist-info/(METADATA|entry_points\.txt|licenses/.+|LICENSE[^/]*)")
_LEFT_OUT = (".pyc", ".pyi", ".pth", ".h", ".c")
_NATIVE = re.compile(r"\.cpython-3(\d+)-([a-z0-9_]+)-linux")
_PYTHON = re.compile(r"3\.[1-9][0-9]?")
_MAX_MANIFEST_BYTES = 64 * 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeBundle(
    Record, name="bundle", max_bytes=_MAX_MANIFEST_BYTES, constants={"format": FORMAT, "system": "Linux"}
):
    """A bundle's manifest."""

    python: Annotated[str, text(pattern=_PYTHON)]  # the minor version that its native code is for, e.g. ``3.11``
    machine: Annotated[str, text()]  # the architecture, as `uname` has it
    distributions: Annotated[Mapping[str, str], table(64, text(), text())]  # name → version of what is in it


def make_bundle(
    out: Path, *, wheels: Path | None = None, python: str | None = None, replace: bool = False
) -> RuntimeBundle:
    """Write a bundle of this Glasshouse and of what its runtime needs, from a folder of `wheels` or what is here.

    The bundle is for a minor version of `python`, by default this one's.

    Raises:
        UsageError: `requirement-missing`: something is missing, or for another machine; `usage`, `disk-full`.
    """
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    version = python or ours
    if not _PYTHON.fullmatch(version):
        raise UsageError(Code.USAGE, f"not a minor version of Python: {version[:16]!r}", hint="it looks like 3.12")
    if wheels is None and (version != ours or sys.platform != "linux"):
        raise UsageError(
            Code.REQUIREMENT_MISSING,
            f"what is installed here is not for Linux and Python {version}",
            hint="pip download --only-binary=:all: --no-deps --platform manylinux_2_28_x86_64 "
            "--platform manylinux2014_x86_64 --python-version "
            f"{version} -d wheels {' '.join(_WITH)}, and name that folder with --wheels",
        )
    files = dict(_own())
    distributions = {DISTRIBUTION: glasshouse.__version__}
    for name in _WITH:
        if wheels is None:
            installed = _distribution(name)
            files |= dict(_of(installed, packages=True))
            distributions[name] = installed.version
        else:
            found, distributions[name] = _in_wheel(wheels, name)
            files |= found
    machines = {(match[2], match[1]) for name in files if (match := _NATIVE.search(name))}
    if len(machines) != 1 or {minor for _, minor in machines} != {version.removeprefix("3.")}:
        found_for = ", ".join(f"Python 3.{minor} on {machine}" for machine, minor in sorted(machines))
        why = (
            f"what was found is for {found_for or 'another system'}, and the bundle shall be for Python {version} and "
        )
        raise UsageError(Code.REQUIREMENT_MISSING, why + "one kind of machine")
    bundle = RuntimeBundle(python=version, machine=min(machines)[0], distributions=distributions)
    write_private(out, _archive(bundle, files), replace=replace)
    return bundle


def read_bundle(path: Path) -> RuntimeBundle:
    """Return a bundle's manifest; raises `UsageError`: `file-missing`, or `usage` for another file."""
    return _opened(path)[0]


def bundled_files(path: Path) -> tuple[RuntimeBundle, dict[str, bytes]]:
    """Return a bundle's manifest, and its files by their names below `site-packages`; raises as `read_bundle`."""
    bundle, archive = _opened(path)
    try:
        with archive:
            names = [one.filename for one in archive.infolist()[1:]]
            return bundle, {name.removeprefix(_PREFIX): archive.read(name) for name in names}
    except (zipfile.BadZipFile, ValueError):
        raise _no_bundle(path) from None


def _opened(path: Path) -> tuple[RuntimeBundle, zipfile.ZipFile]:
    data = read_bounded(path, max_bytes=MAX_BYTES, what="bundle")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        # Stored members take no more memory than the file, whatever its directory claims.
        if not is_bundle(archive) or any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
            raise ValueError("no bundle")
        if archive.getinfo(MANIFEST).file_size > _MAX_MANIFEST_BYTES:
            raise ValueError("another manifest")
        return RuntimeBundle.parse(archive.read(MANIFEST)), archive
    except (zipfile.BadZipFile, FormatError, KeyError, ValueError):
        raise _no_bundle(path) from None


def _no_bundle(path: Path) -> UsageError:
    return UsageError(Code.USAGE, f"{path} is not a bundle", hint="make one with: glasshouse runtime bundle -o FILE")


def _archive(bundle: RuntimeBundle, files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in ((MANIFEST, bundle.encode()), *sorted((_PREFIX + name, files[name]) for name in files)):
            # Nothing of when, where, by whom, or with which compressor.
            member = zipfile.ZipInfo(name, _EPOCH)
            member.create_system = 3
            member.external_attr = 0o100644 << 16
            archive.writestr(member, content)
    return out.getvalue()


def _own() -> Iterator[tuple[str, bytes]]:
    """Yield this Glasshouse, from where it is imported, and its distribution's metadata."""
    folder = Path(glasshouse.__file__).parent
    for path in sorted(folder.rglob("*")):
        name = f"glasshouse/{path.relative_to(folder).as_posix()}"
        if path.is_file() and "__pycache__" not in path.parts and not name.endswith(_LEFT_OUT):
            yield name, path.read_bytes()
    yield from _of(_distribution(DISTRIBUTION), packages=False)


def _distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise UsageError(Code.REQUIREMENT_MISSING, f"{name} is not installed here") from None


def _of(distribution: metadata.Distribution, *, packages: bool) -> Iterator[tuple[str, bytes]]:
    """Yield what a distribution's own record lists, as far as a bundle has it."""
    for file in distribution.files or ():
        name = file.as_posix()
        if _belongs(name, packages=packages):
            yield name, Path(str(distribution.locate_file(file))).read_bytes()


def _in_wheel(folder: Path, name: str) -> tuple[dict[str, bytes], str]:
    wheels = sorted(folder.glob(f"{name}-*.whl"))
    if len(wheels) != 1:
        raise UsageError(Code.REQUIREMENT_MISSING, f"{folder} has {len(wheels)} wheels of {name}; it needs one")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [one for one in wheel.namelist() if _belongs(one, packages=True)]
            return {one: wheel.read(one) for one in names}, wheels[0].name.split("-")[1]
    except (OSError, zipfile.BadZipFile):
        raise UsageError(Code.FILE_MISSING, f"{wheels[0]} cannot be read as a wheel") from None


def _belongs(name: str, *, packages: bool) -> bool:
    if ".." in name.split("/") or name.startswith("/") or name.endswith("/"):
        return False  # a console script, or a folder
    if ".dist-info/" in name:
        return _OF_METADATA.fullmatch(name) is not None
    return packages and "__pycache__" not in name and ".data/" not in name and not name.endswith(_LEFT_OUT)
