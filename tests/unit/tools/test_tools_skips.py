"""In CI a test that was skipped for want of a program fails the whole; one that the machine cannot run does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]

_CONFTEST = f"""
import sys
sys.path.insert(0, {str(_ROOT / "tests")!r})
from tools.skips import NothingMissing

def pytest_configure(config):
    config.pluginmanager.register(NothingMissing())
"""

_WHOLE_FILE = 'import pytest\npytest.skip("{reason}", allow_module_level=True)\n'
_ONE_TEST = 'import pytest\n@pytest.mark.skipif(True, reason="{reason}")\ndef test_one(): pass\n'


def session(folder: Path, *, whole_file: str, one_test: str) -> tuple[int, str]:
    """Run a test that passes beside a file and a test that are skipped, in a worker, and return what came of it."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_good.py").write_text("def test_good(): pass\n")
    (folder / "test_file.py").write_text(_WHOLE_FILE.format(reason=whole_file))
    (folder / "test_one.py").write_text(_ONE_TEST.format(reason=one_test))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_what_was_skipped_for_want_of_a_program_fails_the_session(tmp_path: Path) -> None:
    status, text = session(tmp_path, whole_file="no such library", one_test="no such program")
    assert status == 1
    assert "must not be: no such library" in text
    assert "must not be: no such program" in text


def test_what_this_machine_cannot_run_does_not(tmp_path: Path) -> None:
    status, text = session(tmp_path, whole_file="there is no GPU here", one_test="this machine has no wings")
    assert (status, "must not be" in text) == (0, False), text
