"""What a detached supervisor writes into its log is of its own words, whatever went wrong."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from glasshouse.errors import Code, ExitCode, PlatformError
from glasshouse.jobs import supervisor

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
