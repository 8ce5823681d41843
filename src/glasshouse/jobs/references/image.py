"""What a runtime would measure to in a container image that was unpacked into a folder, and is not run.

Laws: what an interpreter of that image would find when it starts is derived from its files, and an image whose files do
not determine it is refused; the files are then measured as a runtime measures itself.
Source: CPython 3.11 to 3.13, Modules/getpath.py and Lib/site.py; Debian's Lib/site.py.
"""

# Paths are those of the tree, as text.
# ruff: noqa: PTH118, PTH119, PTH120
from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from glasshouse.attestation.measurements.installation import Installation, files_of_modules, package_directories
from glasshouse.attestation.measurements.measurement import measured_files
from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.jobs.places.runtime_bundle import bundled_files
from glasshouse.jobs.references.known_references import Files
from glasshouse.jobs.references.tree import BROUGHT, ImageTree

# Where a container looks for programs, unless its image has another PATH.
_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_PROGRAM = re.compile(r"python3\.([0-9]{2})")
_OLDEST = 11
_SUFFIXES = (".py", ".pyc", ".so")
_HINT = (
    "name the interpreter that will run there with --python, and with --bundle the bundle where the image has no "
    "Glasshouse of its own"
)
_LIBRARIES = ("lib", "lib64")
# Minor version → what its standard library has more and less than that of the one before: `sys.stdlib_module_names`.
_CHANGES = {
    12: ("_pydatetime _pylong _sha2", "_bootsubprocess _sha256 _sha512 asynchat asyncore distutils imp smtpd"),
    13: (
        "_android_support _colorize _interpchannels _interpqueues _interpreters _ios_support _opcode_metadata _pyrepl "
        "_suggestions _sysconfig _wmi",
        "_crypt _msi aifc audioop cgi cgitb chunk crypt imghdr lib2to3 mailcap msilib nis nntplib ossaudiodev pipes "
        "sndhdr spwd sunau telnetlib uu xdrlib",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Interpreter:
    """An interpreter of a tree, as it would be started."""

    program: str  # the path that starts it
    base: str  # the program that its virtual environment was made with; itself where it is in none
    minor: int  # of its version 3.N
    stdlib: str  # its standard library
    sites: tuple[str, ...]  # its site directories that are there


def image_files(tree: Path, *, python: str | None = None, bundle: Path | None = None) -> Files:
    """Return the files that a runtime is measured by in an unpacked image.

    Args:
        tree: the folder that is the image's `/`.
        python: the interpreter's path in the image; None for the `python3` that a container finds.
        bundle: the bundle that the machine is sent; None where Glasshouse is installed in the image.

    Raises:
        UsageError: `file-missing`: no folder, bundle or interpreter; `usage`: not a path of the image.
        PlatformError: `platform-unsupported`: it has no Glasshouse, files cannot be read, or do not determine how it
            would start.
    """
    manifest, brought = (None, None) if bundle is None else bundled_files(bundle)
    try:
        disk = ImageTree(tree)
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read the tree {tree}: {error.strerror}") from None
    try:
        with disk:
            one = _interpreter(disk, _program(disk, tree, python))
            if manifest is not None and brought is not None:
                if manifest.python != f"3.{one.minor}":
                    raise UsageError(
                        Code.USAGE,
                        f"{one.program} of {tree} is Python 3.{one.minor}, and {bundle} is for {manifest.python}",
                        hint="make one for it: glasshouse runtime bundle --help; or name another with --python",
                    )
                disk.bring({**brought, "machine.pth": "".join(f"{site}\n" for site in one.sites).encode()})
                # Unpacked there, it is a virtual environment that the interpreter's own program was linked into.
                one = _found(disk, one.base, start=os.path.dirname(one.base), base=one.base, sites=(BROUGHT,))
            return measured_files(_installation(disk, one))
    except OSError as error:
        why = f"{tree} cannot be measured without running it: {error.strerror or error}"
        raise PlatformError(Code.PLATFORM, why, hint=_HINT) from None


def _program(disk: ImageTree, tree: Path, python: str | None) -> str:
    if python is None:
        found = next((path for path in (f"{folder}/python3" for folder in _PATH) if disk.is_file(path)), None)
        if found is None:
            raise UsageError(Code.FILE_MISSING, f"{tree} has no python3 in {':'.join(_PATH)}", hint=_HINT)
        return found
    if not python.startswith("/") or "\0" in python or ".." in python.split("/"):
        raise UsageError(Code.USAGE, f"not the path of a program in the tree: {python[:200]!r}", hint=_HINT)
    path = "/" + os.path.normpath(python).lstrip("/")
    if not disk.is_file(path):
        raise UsageError(Code.FILE_MISSING, f"{tree} has no program {python[:200]}", hint=_HINT)
    return path


def _interpreter(disk: ImageTree, program: str) -> _Interpreter:
    """Return what a program of the tree would find when it starts; raises `OSError`."""
    folder = os.path.dirname(program)
    prefix = os.path.dirname(folder)
    if disk.is_there(f"{folder}/pyvenv.cfg"):
        raise OSError(f"{folder}/pyvenv.cfg lies beside the program, where not all of Python looks for it")
    real = disk.real(program)
    if not disk.is_file(f"{prefix}/pyvenv.cfg"):
        return _found(disk, program, start=os.path.dirname(real), base=program)
    lines = disk.content(f"{prefix}/pyvenv.cfg").decode("utf-8", "replace").splitlines()
    split = (line.partition("=") for line in lines if "=" in line)
    settings = [(key.strip().lower(), value.strip()) for key, _, value in split]
    home = next((value for key, value in settings if key == "home"), "")
    # A path that is not normal leads elsewhere step by step than as a whole.
    if not home.startswith("/") or "\0" in home or os.path.normpath(home) != home or home.startswith("//"):
        raise OSError(f"{prefix}/pyvenv.cfg does not name its interpreter")
    wanted = [value.lower() for key, value in settings if key == "include-system-site-packages"]
    shared = not wanted or wanted[-1] == "true"
    base = real if real != program else f"{home}/{os.path.basename(program)}"
    return _found(disk, program, start=home, base=base, prefix=prefix, shared=shared)


def _found(
    disk: ImageTree,
    program: str,
    *,
    start: str,
    base: str,
    prefix: str | None = None,
    shared: bool = False,
    sites: tuple[str, ...] | None = None,
) -> _Interpreter:
    """Return what an interpreter finds that looks for its library from the folder `start` upwards.

    `base` is the program outside of a virtual environment, whose prefix is `prefix`; if `shared`, the base's site
    directories are searched behind those of the environment.
    """
    minor = _minor(disk, disk.real(program), start)
    for library in _LIBRARIES:
        above = _above(start, f"{library}/python3.{minor}/os.py", disk.is_file)
        native = _above(start, f"{library}/python3.{minor}/lib-dynload", disk.is_folder)
        archive = _above(start, f"{library}/python3{minor}.zip", disk.is_file)
        if above is not None:
            break
    else:
        raise OSError(f"no standard library of Python 3.{minor} lies above {start}")
    if archive is not None:
        why = "a standard library in an archive is not read"
        raise OSError(f"a {library}/python3{minor}.zip lies above {start}; {why}")
    if native != above:
        raise OSError(f"native modules of the standard library do not lie in {above}/{library}/python3.{minor}")
    for marker in ("pybuilddir.txt", "Modules/Setup.local"):
        if disk.is_there(f"{start}/{marker}"):
            raise OSError(f"{start}/{marker} makes an interpreter look elsewhere; name one that is installed")
    stdlib = os.path.join(above, library, f"python3.{minor}")
    if sites is None:
        prefixes = [above] if prefix is None else [prefix, above] if shared else [prefix]
        listed = _site_directories(disk, stdlib, prefixes, minor, library, environment=prefix is not None)
        sites = tuple(os.path.normpath(path) for path in listed if disk.is_folder(path))
    return _Interpreter(program=program, base=base, minor=minor, stdlib=stdlib, sites=sites)


def _minor(disk: ImageTree, real: str, start: str) -> int:
    """Return the minor version of an interpreter by its file's name, or by the one library that it could find."""
    if (named := _PROGRAM.fullmatch(os.path.basename(real))) is not None:
        found = {int(named[1])}
    else:
        found = set()
        for above in _upwards(start):
            for library in _LIBRARIES:
                names = disk.names(os.path.join(above, library))
                minors = {int(match[1]) for name in names if (match := _PROGRAM.fullmatch(name)) is not None}
                found |= {n for n in minors if disk.is_file(os.path.join(above, library, f"python3.{n}", "os.py"))}
    if len(found) != 1:
        raise OSError(f"{real} does not name its version of Python")
    return found.pop()


def _upwards(folder: str) -> list[str]:
    return [folder, *map(str, PurePosixPath(folder).parents)]


def _above(folder: str, landmark: str, is_it: Callable[[str], bool]) -> str | None:
    """Return the nearest folder from one upwards that has a landmark."""
    return next((above for above in _upwards(folder) if is_it(os.path.join(above, landmark))), None)


def _site_directories(
    disk: ImageTree, stdlib: str, prefixes: list[str], minor: int, library: str, *, environment: bool
) -> Iterator[str]:
    """Yield what `site.getsitepackages` of that standard library returns, if its text is known."""
    text = disk.content(f"{stdlib}/site.py").decode("utf-8", "replace")
    function = text.partition("\ndef getsitepackages(")[2].partition("\ndef ")[0]
    if "site-packages" not in function or "/usr/local" in function:
        raise OSError(f"{stdlib}/site.py looks for packages in a way that is not known here")
    for prefix in prefixes:
        libraries = [os.path.join(prefix, one) for one in dict.fromkeys((library, "lib"))]
        if "dist-packages" not in function:
            yield from (f"{one}/python3.{minor}/site-packages" for one in libraries)
            continue
        if environment:  # as Debian has it
            yield os.path.join(prefix, f"lib/python3.{minor}/site-packages")
        yield os.path.join(prefix, f"local/lib/python3.{minor}/dist-packages")
        yield os.path.join(prefix, "lib/python3/dist-packages")
        yield from (f"{one}/python3.{minor}/dist-packages" for one in libraries)


def _installation(disk: ImageTree, one: _Interpreter) -> Installation:
    """Return what there is to measure; raises `OSError`, and `PlatformError` where there is no Glasshouse."""
    modules = _modules(one.minor)
    path = [one.stdlib, f"{one.stdlib}/lib-dynload", *package_directories(disk, one.sites)]
    packages = {name: _package(disk, path, name) for name in ("glasshouse", "cryptography", "blake3")}
    found = Installation(
        disk=disk,
        programs=frozenset(path for program in (one.program, one.base) for path in (program, disk.real(program))),
        python=disk.real(one.base),
        version=(3, one.minor),
        stdlib=one.stdlib,
        modules=modules,
        standard=modules,
        sites=one.sites,
        packages=packages,
        foreign=_foreign(disk, path),
    )
    # A module of that name elsewhere counts where the interpreter has none built in, which no file shows.
    open_ = {name.encode() for name in modules - _standard(disk, one.stdlib)}
    for files in files_of_modules(found, open_):
        for name, where in files:
            raise OSError(f"{where} has a name of the standard library, which may have no {name.partition('.')[0]}")
    return found


def _modules(minor: int) -> frozenset[str]:
    """Return the names of the standard library of a minor version, from those of this one; raises `OSError`."""
    ours, names = sys.version_info[1], set(sys.stdlib_module_names)
    if minor < _OLDEST or any(number not in _CHANGES for number in range(min(ours, minor) + 1, max(ours, minor) + 1)):
        why = f"measure it where it runs, or with Glasshouse on a 3.{minor}"
        raise OSError(f"Python 3.{minor} is not known here; {why}")
    for number in range(ours + 1, minor + 1):
        more, less = _CHANGES[number]
        names = (names | set(more.split())) - set(less.split())
    for number in range(ours, minor, -1):
        more, less = _CHANGES[number]
        names = (names - set(more.split())) | set(less.split())
    return frozenset(names)


def _standard(disk: ImageTree, stdlib: str) -> set[str]:
    """Return the modules that a standard library has for certain: one in native code is for one machine or another."""
    found = set()
    for directory in (stdlib, f"{stdlib}/lib-dynload"):
        for name in disk.names(directory):
            module, dot, rest = name.partition(".")
            if rest in ("py", "pyc", "so") if dot else disk.is_file(f"{directory}/{name}/__init__.py"):
                found.add(module)
    return found


def _package(disk: ImageTree, path: list[str], name: str) -> str:
    """Return the folder of the package that an import finds first."""
    for directory in path:
        if any(one.startswith("__init__.") for one in disk.names(f"{directory}/{name}")):
            return f"{directory}/{name}"
        if any(one.startswith(f"{name}.") and one.endswith(_SUFFIXES) for one in disk.names(directory)):
            raise OSError(f"{directory}/{name} is a single file and no package")
    why = f"the image's Python has no {name} that could be found without running it"
    raise PlatformError(Code.PLATFORM, why, hint=_HINT)


def _foreign(disk: ImageTree, path: list[str]) -> str | None:
    """Return the file of the native module that `cryptography` loads from beside itself."""
    for directory in path:
        found = [one for one in disk.names(directory) if one.startswith("_cffi_backend.") and one.endswith(_SUFFIXES)]
        if len(found) > 1:
            raise OSError(f"{directory} has more than one _cffi_backend")
        if found:
            return f"{directory}/{found[0]}"
    return None
