"""Names of assets and outputs: one grammar, checked at writing and again at reading (spec/sealed-package.md 5)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from glasshouse.errors import Code, PackageError

MAX_PATH_BYTES = 1024
MAX_COMPONENT_BYTES = 255


def check_path(path: str, *, max_bytes: int = MAX_PATH_BYTES) -> str:
    """Return `path` if it is safe to create below any folder on Linux and macOS.

    Raises:
        PackageError: `package-path`.
    """
    try:
        length = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        raise _refused(path, "is not Unicode text") from None
    if not 0 < length <= max_bytes:
        raise _refused(path, f"is not 1 to {max_bytes} bytes long")
    # Format characters (Cf) turn text round or hide: `photo\u202egpj.exe` would be shown as `photoexe.jpg`. What this
    # version of Unicode does not assign (Cn), another one may fold.
    if "\\" in path or any(unicodedata.category(char) in ("Cc", "Cf", "Cn", "Zl", "Zp") for char in path):
        raise _refused(path, "has a backslash, a control or format character or one that Unicode does not assign")
    # Two spellings of one name would be two files on Linux and one on macOS.
    if not unicodedata.is_normalized("NFC", path):
        raise _refused(path, "is not in Unicode normal form C")
    for component in path.split("/"):
        if component in ("", ".", ".."):
            raise _refused(path, "is absolute or has an empty, '.' or '..' component")
        if len(component.encode("utf-8")) > MAX_COMPONENT_BYTES:
            raise _refused(path, f"has a component of more than {MAX_COMPONENT_BYTES} bytes")
    return path


def check_paths(paths: Iterable[str], *, fold: bool = True) -> None:
    """Check a package's paths together; raises `PackageError` (`package-path`).

    They ascend strictly by their bytes in UTF-8; none is a folder of another, or, if `fold`, equal to it but for case.
    """
    files: set[str] = set()
    folders: set[str] = set()
    before = b""
    for path in paths:
        check_path(path)
        encoded = path.encode("utf-8")
        if encoded <= before:
            raise _refused(path, "is repeated or out of order")
        before = encoded
        same = folded(path) if fold else path
        if same in files:
            raise _refused(path, "differs from another only in case")
        files.add(same)
        parts = same.split("/")
        folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    for both in sorted(files & folders):
        raise _refused(both, "is a file and a folder at once")


def folded(path: str) -> str:
    """Return what is the same for two paths that differ only in case."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _refused(path: str, why: str) -> PackageError:
    shown = ascii(path[:64]) + ("…" if len(path) > 64 else "")
    return PackageError(Code.PACKAGE_PATH, f"the path {shown} {why}")
