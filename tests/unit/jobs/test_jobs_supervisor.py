"""What a detached supervisor writes into its log is of its own words, whatever went wrong."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from glasshouse.errors import Code, ExitCode, PlatformError
from glasshouse.jobs.define.wanted import Caps
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase
from glasshouse.jobs.places.placing import LeftError
from glasshouse.jobs.places.rental_journal import Attempt, Journal, Rental, Step
from glasshouse.jobs.supervise import supervisor
from glasshouse.jobs.supervise.sweeping import Swept, sweep
from simulators.owner_side import OwnersWorld
from tests.simulators.rental_world import offer

SECRET = "patient-4711-canary"
GONE = ProcessName(pid=2**22 - 1, started=1)


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


def rented_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeper: ProcessName | None) -> tuple[Path, Journal]:
    """Return a run that goes on on a rented machine, and the journal of that, whose keeper is another process."""
    owner = OwnersWorld()
    folder = owner.settle(tmp_path)
    folder.update(phase=Phase.RUNNING, place=f"world:{folder.run_id[:8]}")
    caps = Caps(usd=None, seconds=4 * 3600, boot_s=600)
    rental = Rental(
        run_id=folder.run_id, provider="world", created_us=1, caps=caps, python="python3", keeper=ProcessName.of()
    )
    journal = Journal.create(owner.home, rental)
    journal.add(Attempt(tag="gh-a-1", nonce="ab", offer=offer(), asked_us=1, step=Step.UP, machine="m1"))
    journal.update(keeper=keeper)
    monkeypatch.setattr(supervisor, "broker_of", lambda _home, _folder: None)
    return folder.path, journal


def test_a_run_whose_machine_a_sweep_gives_back_at_this_moment_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, journal = rented_run(tmp_path, monkeypatch, GONE)
    monkeypatch.setattr(supervisor, "run_here", lambda *_of, **_how: pytest.fail("it followed the run"))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with journal.claimed() as ours:
        assert ours
        assert supervisor.main([str(journal.path.parent.parent), str(path)]) == ExitCode.DONE
    assert "another process looks after it" in capsys.readouterr().err
    assert journal.load().keeper == GONE


def test_no_sweep_ends_a_machine_whose_run_is_taken_over_and_not_yet_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, journal = rented_run(tmp_path, monkeypatch, GONE)
    said: list[str] = []

    def follow(*_of: object, **_how: object) -> None:
        assert sweep(Home(path=journal.path.parent.parent), say=said.append) == Swept()
        raise LeftError(journal.load().run_id, "world")

    monkeypatch.setattr(supervisor, "run_here", follow)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    supervisor.main([str(journal.path.parent.parent), str(path)])
    assert "is looked after by another process" in said[0]
    assert not journal.load().over
    with journal.claimed() as ours:
        assert ours, "it ends with the process that has it"
