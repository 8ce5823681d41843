"""What a detached supervisor writes into its log is of its own words, whatever went wrong."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from glasshouse.errors import Code, ExitCode, PlatformError
from glasshouse.jobs import supervisor
from glasshouse.jobs.rundir import Phase
from simulators.owner_side import OwnersWorld

SECRET = "patient-4711-canary"


def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(supervisor, "broker_of", lambda _home, _folder: None)
    monkeypatch.setattr(supervisor, "run_here", fail)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"launch file")))
    return supervisor.main([str(tmp_path), "f" * 32])


def test_a_defect_leaves_its_kind_and_not_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(tmp_path, monkeypatch, ValueError(SECRET)) == ExitCode.INTERNAL
    log = capsys.readouterr().err
    assert "a defect in Glasshouse: ValueError" in log
    assert SECRET not in log
    assert "Traceback" not in log


def test_a_fault_that_is_known_is_said_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = PlatformError(Code.PLATFORM, "no runtime can be started")
    assert told(tmp_path, monkeypatch, error) == ExitCode.RUN_FAILED
    assert "no runtime can be started [platform-unsupported]" in capsys.readouterr().err


def test_another_machines_words_are_logged_and_command_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = PlatformError(Code.PLATFORM, "the machine refused: \x1b]0;owned\x07 \u202etxt.exe\nforged line")
    assert told(tmp_path, monkeypatch, error) == ExitCode.RUN_FAILED
    log = capsys.readouterr().err
    assert log.count("\n") == 1
    assert log.rstrip("\n").isascii()
    assert "the machine refused: \\x1b]0;owned" in log


@pytest.mark.parametrize(("line", "returned"), [(b"", False), (b"launch file", True)], ids=["taken over", "of its own"])
def test_a_supervisor_that_cannot_follow_a_run_leaves_the_machine_that_the_run_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, returned: bool
) -> None:
    def fail(*_of: object, **_how: object) -> None:
        raise PlatformError(Code.PLATFORM, "no machine of this name")

    given: list[object] = []
    folder = OwnersWorld().settle(tmp_path)
    folder.update(phase=Phase.RUNNING, place="world:0011")
    monkeypatch.setattr(supervisor, "broker_of", lambda _home, _folder: None)
    monkeypatch.setattr(supervisor, "run_here", fail)
    monkeypatch.setattr(supervisor, "return_machine", lambda *of, **_how: given.append(of))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(line)))
    assert supervisor.main([str(tmp_path), str(folder.path)]) == ExitCode.RUN_FAILED
    assert bool(given) is returned
