"""Lets third-party modules use the byte code that pip compiled for them, and nothing else.

The worker runs with an empty `pycache_prefix`, so that a poisoned ``.pyc`` beside a measured source is never read; for
a framework that means compiling a thousand modules at every start. Frameworks are measured only by the digests of their
installation records: there, a poisoned ``.pyc`` is no stronger than a poisoned ``.py``. So modules below site-packages
read their own cache and never write it.
Laws: a package that is measured by content, or of which anything was imported before (the start-up hooks were), never
reads one; nor does anything outside site-packages: an owner's folder may hold a package of any name.
Source: docs/adr/0005-what-is-measured.md.
"""

from __future__ import annotations

import _imp
import marshal
import os
import site
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import MAGIC_NUMBER
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import PathEntryFinder

MEASURED = frozenset({"_cffi_backend", "blake3", "cryptography", "glasshouse"})
"""Packages whose sources the runtime measurement covers, wherever they are installed."""

_SITES = ("dist-packages", "site-packages")
_HEADER_BYTES = 16


class _Loader(SourceFileLoader):
    """Loads a source file through the cache beside it, when that was compiled from just this file."""

    without_cache: frozenset[str] = MEASURED

    def get_code(self, fullname: str) -> CodeType | None:
        if fullname.partition(".")[0] not in self.without_cache:
            code = self._cached()
            if code is not None:
                return code
        return super().get_code(fullname)

    def _cached(self) -> CodeType | None:
        folder, _, name = self.path.rpartition("/")
        cache = f"{folder}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
        try:
            data, state = self.get_data(cache), os.stat(self.path)  # noqa: PTH116 - a thousand times at a start
            expected = (int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF)
            found = tuple(int.from_bytes(data[start : start + 4], "little") for start in (8, 12))
            # Flags (bytes 4 to 7) are zero where the cache is tied to the source by time and size (PEP 552).
            if data[:8] != MAGIC_NUMBER + bytes(4) or found != expected:
                return None
            code = marshal.loads(memoryview(data)[_HEADER_BYTES:])  # noqa: S302 - as trusted as the source beside it
        except (OSError, ValueError, EOFError, TypeError):
            return None
        if not isinstance(code, CodeType):
            return None
        # As importlib does: the folder may have moved since pip compiled what is in it.
        _imp._fix_co_filename(code, self.path)  # type: ignore[attr-defined]  # not in the type stubs
        return code


def allow_third_party(folders: list[str] | None = None) -> None:
    """Load modules below `folders` (site-packages by default) by their caches, before the owner's code is imported."""
    if folders is None:  # this environment's, and those of others that a `.pth` file adds to the search path
        added = (path for path in sys.path if os.path.basename(path.rstrip("/")) in _SITES)  # noqa: PTH119
        folders = [*site.getsitepackages(), *added]
    roots = tuple(folder.rstrip("/") for folder in folders)

    class Loader(_Loader):
        without_cache = MEASURED | {name.partition(".")[0] for name in sys.modules}

    finder = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES), (Loader, SOURCE_SUFFIXES), (SourcelessFileLoader, BYTECODE_SUFFIXES)
    )

    def below(path: str) -> bool:
        return any(path == root or path.startswith(root + "/") for root in roots)

    def hook(path: str) -> PathEntryFinder:
        if not below(path):
            raise ImportError("not a third-party folder")
        return finder(path)  # refuses archives, which the next hooks know

    sys.path_hooks.insert(0, hook)
    for path in [path for path in sys.path_importer_cache if below(path)]:
        del sys.path_importer_cache[path]
