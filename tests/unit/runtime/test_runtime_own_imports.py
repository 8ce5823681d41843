"""What is installed beside the measured packages is not imported into the agent, by whichever name it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glasshouse.runtime.__main__ import MEASURED
from glasshouse.workloads.process import bytecode


def _printed(folder: Path, code: str) -> list[str]:
    command = [sys.executable, "-I", "-B", "-X", f"pycache_prefix={folder / 'none'}", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A site directory with what an attacker put there."""
    for name in ("org/python/core.py", "msvcrt.py", "helper.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("print('stolen')\n")
    (tmp_path / "namespace").mkdir()
    return tmp_path


def test_a_module_that_the_standard_library_asks_for_does_not_run_in_the_agent(beside: Path) -> None:
    """`copy` asks for Jython's `org.python.core`; the agent imports it with the rest."""
    code = f"""
import runpy, sys
sys.path.append({str(beside)!r})
try: runpy.run_module("glasshouse.runtime", run_name="__main__")
except SystemExit: pass
import copy
print("org" in sys.modules)
"""
    assert _printed(beside, code) == ["False"]


@pytest.mark.parametrize("name", ["org", "msvcrt", "helper", "namespace", "torch", "absent"])
def test_nothing_else_is_found(beside: Path, name: str) -> None:
    code = f"""
import importlib, sys
sys.path.append({str(beside)!r})
from glasshouse.runtime.__main__ import allow_measured_only
allow_measured_only()
try: importlib.import_module({name!r})
except ModuleNotFoundError as error: print(error.name)
"""
    assert _printed(beside, code) == [name]


def test_the_standard_library_and_what_is_measured_are_found(tmp_path: Path) -> None:
    code = """
from glasshouse.runtime.__main__ import allow_measured_only
allow_measured_only()
import blake3, cryptography.hazmat.primitives.ciphers.aead, glasshouse.runtime.run.lifecycle
import _struct, decimal, xml.dom.minidom, zipimport
print("found")
"""
    assert _printed(tmp_path, code) == ["found"]


def test_what_was_imported_before_stays(beside: Path) -> None:
    """A start-up hook that the owner accepts is measured, and goes on."""
    code = f"""
import sys
sys.path.append({str(beside)!r})
import helper
from glasshouse.runtime.__main__ import allow_measured_only
allow_measured_only()
import helper as again
print(again is helper)
"""
    assert _printed(beside, code) == ["stolen", "True"]


def test_both_lists_of_measured_packages_are_one() -> None:
    """The worker reads no byte code of what the agent may import; the two rooms do not import each other."""
    assert MEASURED == bytecode.MEASURED
