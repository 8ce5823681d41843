"""Runs a program as an interpreter of the next minor version would: ``another_minor.py PROGRAM [OPTIONS] (-c|-m) …``.

PROGRAM is the path by which it was started; an environment around that is entered as `site` enters a virtual one.
Nothing else is another version's: what is compiled, and the standard library, are this interpreter's own.
"""

# What an interpreter has of paths is text.
# ruff: noqa: PTH100, PTH101, PTH112, PTH118, PTH120, PTH123
from __future__ import annotations

import importlib.machinery
import os
import platform
import runpy
import site
import sys
import sysconfig
import zipimport

OURS = sys.version_info[1]
MINOR = OURS + 1


def program(folder: os.PathLike[str]) -> str:
    """Write an executable that stands for such an interpreter into a folder, and return its path."""
    path = os.path.join(folder, f"python3.{MINOR}")
    own = os.path.realpath(__file__)
    with open(path, "w") as out:
        out.write(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -I -B {own} "$0" "$@"\n')
    os.chmod(path, 0o755)
    return path


def _suffix(minor: int) -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX")).replace(f"cpython-3{OURS}", f"cpython-3{minor}")


def pretend(started: str) -> None:
    """Become it: version, program, prefix, and the names of native modules."""
    sys.version_info = (3, MINOR, 0, "final", 0)  # type: ignore[assignment]
    platform.python_version = lambda: f"3.{MINOR}.0"
    sys.executable = os.path.abspath(started)
    sys._base_executable = os.path.realpath(started)  # type: ignore[attr-defined]
    sys.prefix = sys.exec_prefix = os.path.dirname(os.path.dirname(sys.executable))
    native = [_suffix(MINOR), ".abi3.so", _suffix(OURS)]  # the last for the standard library
    importlib.machinery.all_suffixes = lambda: [*importlib.machinery.SOURCE_SUFFIXES, *native]
    finder = importlib.machinery.FileFinder.path_hook(
        (importlib.machinery.ExtensionFileLoader, native),
        (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES),
    )
    sys.path_hooks[:] = [zipimport.zipimporter, finder]
    sys.path_importer_cache.clear()
    sites = {os.path.realpath(path) for path in site.getsitepackages([sys.base_prefix])}
    old = {path for path in sys.path if "-packages" in path}
    sys.path[:] = [path for path in sys.path if path not in old and os.path.realpath(path) not in sites]
    site.PREFIXES[:] = [sys.prefix]
    for path in site.getsitepackages():
        if os.path.isdir(path):
            site.addsitedir(path)


def main() -> None:
    started, *words = sys.argv[1:]
    pretend(started)
    while words and words[0] in ("-I", "-B", "-X"):
        words = words[2 if words[0] == "-X" else 1 :]
    kind, what, *rest = words
    if kind == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
