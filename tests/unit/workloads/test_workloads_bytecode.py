"""Frameworks load from their byte code; what is measured by content never does."""

from __future__ import annotations

import importlib.util
import marshal
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HONEST = "said = 'source'\n"
PLANTED = compile("said = 'planted'\n", "planted", "exec")

PROGRAM = """
import sys
folder, name, before, *paths = sys.argv[1:]
from glasshouse.workloads.process.bytecode import allow_third_party
sys.path[:0] = paths or [folder]
if before:
    __import__(before)
allow_third_party([folder])
sys.modules.pop("glasshouse", None), sys.modules.pop("cryptography", None)
__import__(name)
print(sys.modules[name].said)
"""


def plant(folder: Path, name: str, *, code: object = PLANTED) -> Path:
    """Write a module and, in its cache, other code that claims to be compiled from it."""
    source = folder / f"{name}.py"
    source.write_text(HONEST)
    state = source.stat()
    times = (int(state.st_mtime), state.st_size)
    header = importlib.util.MAGIC_NUMBER + bytes(4) + b"".join(value.to_bytes(4, "little") for value in times)
    cache = folder / "__pycache__" / f"{name}.{sys.implementation.cache_tag}.pyc"
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(header + marshal.dumps(code))
    return source


def said(folder: Path, name: str, prefix: Path, *paths: Path, before: str = "") -> str:
    """Import a module where `folder` is site-packages and `paths`, or the folder itself, come first in the search."""
    command = [sys.executable, "-I", "-B", "-X", f"pycache_prefix={prefix}", "-c", PROGRAM, str(folder), name, before]
    command += map(str, paths)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_framework_is_loaded_from_its_cache_and_nothing_is_written(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    plant(site, "framework")
    before = sorted(site.rglob("*"))
    assert said(site, "framework", tmp_path / "empty") == "planted"
    assert sorted(site.rglob("*")) == before
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize("name", ["glasshouse", "cryptography"])
def test_poisoned_byte_code_of_a_measured_package_is_never_run(tmp_path: Path, name: str) -> None:
    plant(tmp_path, name)
    assert said(tmp_path, name, tmp_path / "empty") == "source"


def test_a_cache_of_another_source_is_not_used(tmp_path: Path) -> None:
    source = plant(tmp_path, "framework")
    os.utime(source, (1, 1))
    assert said(tmp_path, "framework", tmp_path / "empty") == "source"


@pytest.mark.parametrize("content", [b"", b"\x00" * 15, b"\x00" * 64])
def test_a_broken_cache_is_not_used(tmp_path: Path, content: bytes) -> None:
    plant(tmp_path, "framework")
    next((tmp_path / "__pycache__").iterdir()).write_bytes(content)
    assert said(tmp_path, "framework", tmp_path / "empty") == "source"


def test_a_cache_that_holds_no_code_is_not_used(tmp_path: Path) -> None:
    plant(tmp_path, "framework", code=["not code"])
    assert said(tmp_path, "framework", tmp_path / "empty") == "source"


def test_an_owners_package_of_the_same_name_wins_and_its_byte_code_is_not_read(tmp_path: Path) -> None:
    site, job = tmp_path / "site", tmp_path / "job"
    for folder in (site, job):
        (folder / "framework").mkdir(parents=True)
        plant(folder / "framework", "__init__")
    (site / "framework" / "__init__.py").write_text("said = 'site'\n")
    assert said(site, "framework", tmp_path / "empty", job, site) == "source"


def test_a_neighbour_of_site_packages_is_not_below_it(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site-of-another").mkdir()
    plant(tmp_path / "site-of-another", "framework")
    assert said(tmp_path / "site", "framework", tmp_path / "empty", tmp_path / "site-of-another") == "source"


def test_a_start_up_hook_never_reads_a_cache_afterwards(tmp_path: Path) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "__init__.py").touch()
    plant(tmp_path / "hook", "later")
    assert said(tmp_path, "hook.later", tmp_path / "empty") == "planted"
    assert said(tmp_path, "hook.later", tmp_path / "empty", before="hook") == "source"


@pytest.mark.parametrize("unpacked", [False, True])
def test_eggs_below_site_packages_are_imported(tmp_path: Path, unpacked: bool) -> None:
    egg = tmp_path / "site" / "framework.egg"
    if unpacked:
        egg.mkdir(parents=True)
        plant(egg, "framework")
    else:
        egg.parent.mkdir()
        with zipfile.ZipFile(egg, "w") as archive:
            archive.writestr("framework/__init__.py", "from framework.inner import said\n")
            archive.writestr("framework/inner.py", HONEST)
    assert said(egg.parent, "framework", tmp_path / "empty", egg) == ("planted" if unpacked else "source")


def test_a_module_without_its_source_and_a_folder_without_init_are_imported(tmp_path: Path) -> None:
    (tmp_path / "namespace").mkdir()
    source = plant(tmp_path / "namespace", "framework")
    source.unlink()
    next((tmp_path / "namespace" / "__pycache__").iterdir()).rename(source.with_suffix(".pyc"))
    assert said(tmp_path, "namespace.framework", tmp_path / "empty") == "planted"


def test_a_cache_that_was_moved_says_where_its_source_is_now(tmp_path: Path) -> None:
    code = compile("said = (lambda: None).__code__.co_filename\n", "/where/pip/was/framework.py", "exec")
    source = plant(tmp_path, "framework", code=code)
    assert said(tmp_path, "framework", tmp_path / "empty") == str(source)
