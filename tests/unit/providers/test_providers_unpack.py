"""A bundle is tried on its machine by the modules that it has, also one that an earlier version made."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from glasshouse.providers.serve.unpack import MANIFEST, RefusedBundle, install

NATIVE, AGENT = "blake3", "glasshouse/runtime/agent"
# Where the program that serves a place was, and is.
EARLIER, NOW = "glasshouse/providers/serve", "glasshouse/providers/serve/__main__"


def brought(folder: Path, serves: str, broken: str = "") -> str:
    """Return the interpreter of a bundle of empty modules that a machine was sent; one of them may not be loaded."""
    modules = ("_cffi_backend", NATIVE, AGENT, serves)
    packages = {str(package) for module in modules for package in Path(module).parents} - {"."}
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        of = {"system": os.uname().sysname, "machine": os.uname().machine, "python": version}
        archive.writestr(MANIFEST, json.dumps(of))
        for module in (*(f"{package}/__init__" for package in sorted(packages)), *modules):
            body = "raise ImportError('another libc')" if module == broken else ""
            archive.writestr(f"site-packages/{module}.py", body)
    bundle = made.getvalue()
    digest = hashlib.sha256(bundle).hexdigest()
    return install(str(folder), digest, len(bundle), io.BytesIO(bundle), lambda _start: None)


@pytest.mark.parametrize("serves", [EARLIER, NOW])
def test_a_bundle_of_any_version_is_tried_by_its_own_modules(tmp_path: Path, serves: str) -> None:
    assert Path(brought(tmp_path / "place", serves)).exists()


@pytest.mark.parametrize(("serves", "broken"), [(EARLIER, EARLIER), (NOW, NOW), (NOW, NATIVE), (NOW, AGENT)])
def test_one_that_cannot_be_loaded_is_refused_with_its_last_line(tmp_path: Path, serves: str, broken: str) -> None:
    with pytest.raises(RefusedBundle, match="it does not run here: ImportError: another libc"):
        brought(tmp_path / "place", serves, broken)
    assert list((tmp_path / "place/runtimes").iterdir()) == []
