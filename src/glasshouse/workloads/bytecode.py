"""Lets third-party modules use the byte code that pip compiled for them, and nothing else.

The worker runs with an empty `pycache_prefix`, so that a poisoned ``.pyc`` beside a measured source is never read.
For a framework that means compiling a thousand modules at every start. The runtime measurement covers
interpreter, standard library, `cryptography` and Glasshouse by content, but frameworks only by the digests
of their installation records: there, a poisoned ``.pyc`` is no stronger than a poisoned ``.py``. So modules below
site-packages read their own cache, never write it, and those that are measured by content never do.
Source: docs/adr/0005-what-is-measured.md.
"""

from __future__ import annotations

import marshal
import site
import sys
from importlib.abc import PathEntryFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType

__all__ = ["MEASURED", "allow_third_party"]

MEASURED = frozenset({"cryptography", "glasshouse"})
"""Packages whose sources the runtime measurement covers, wherever they are installed."""

_HEADER_BYTES = 16


class _Loader(SourceFileLoader):
    """Loads a source file through the cache beside it, when that was compiled from just this file."""

    def get_code(self, fullname: str) -> CodeType | None:
        if fullname.partition(".")[0] not in MEASURED:
            code = self._cached()
            if code is not None:
                return code
        return super().get_code(fullname)

    def _cached(self) -> CodeType | None:
        source = Path(self.path)
        cache = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        try:
            data, state = cache.read_bytes(), source.stat()
            expected = (int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF)
            found = tuple(int.from_bytes(data[start : start + 4], "little") for start in (8, 12))
            # Flags (bytes 4 to 7) are zero where the cache is tied to the source by time and size (PEP 552).
            if data[:8] != MAGIC_NUMBER + bytes(4) or found != expected:
                return None
            code = marshal.loads(memoryview(data)[_HEADER_BYTES:])  # noqa: S302 - as trusted as the source beside it
        except (OSError, ValueError, EOFError, TypeError):
            return None
        return code if isinstance(code, CodeType) else None


def allow_third_party(folders: list[str] | None = None) -> None:
    """From now on, modules below `folders` (site-packages by default) are loaded through their caches."""
    roots = tuple(f"{Path(folder)}" for folder in (site.getsitepackages() if folders is None else folders))
    finder = FileFinder.path_hook((ExtensionFileLoader, EXTENSION_SUFFIXES), (_Loader, SOURCE_SUFFIXES))

    def hook(path: str) -> PathEntryFinder:
        if not any(path == root or path.startswith(root + "/") for root in roots):
            raise ImportError("not a third-party folder")
        return finder(path)

    sys.path_hooks.insert(0, hook)
    for path in [path for path in sys.path_importer_cache if path.startswith(roots)]:
        del sys.path_importer_cache[path]
