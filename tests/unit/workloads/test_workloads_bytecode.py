"""Frameworks load from their byte code; what is measured by content never does."""

from __future__ import annotations

import importlib.util
import marshal
import os
import subprocess
import sys
from pathlib import Path

import pytest

HONEST = "said = 'source'\n"
PLANTED = compile("said = 'planted'\n", "planted", "exec")

PROGRAM = """
import sys
from glasshouse.workloads.bytecode import allow_third_party
folder = sys.argv[1]
allow_third_party([folder])
sys.path.insert(0, folder)
sys.modules.pop("glasshouse", None), sys.modules.pop("cryptography", None)
print(__import__(sys.argv[2]).said)
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


def said(folder: Path, name: str, prefix: Path) -> str:
    command = [sys.executable, "-I", "-B", "-X", f"pycache_prefix={prefix}", "-c", PROGRAM, str(folder), name]
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
