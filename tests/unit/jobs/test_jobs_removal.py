"""A run keeps its package whatever becomes of the file; runs that have ended can be removed, and no others."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import Code, ExitCode, UsageError
from glasshouse.jobs.define.wanted import Caps
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.places.rental_journal import Attempt, Journal, Rental, Step
from glasshouse.jobs.supervise import sweeping as removal
from simulators.rental_world import offer
from tools.memory_disk import memory_disk

SEALED = b"sealed" * 20_000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    made = Home(path=tmp_path / "home").make()
    Identity.generate().save(private=made.owner_private, public=made.owner_public, passphrase=None)
    monkeypatch.setenv("GLASSHOUSE_HOME", str(made.path))
    return made


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "job.sealed"
    path.write_bytes(SEALED)
    return path


def a_run(home: Home, **changes: object) -> RunFolder:
    folder = RunFolder.create(home)
    record = RunRecord(
        run_id=folder.run_id,
        name="clinic",
        workload="script",
        package=folder.package,
        package_id="ab" * 16,
        manifest_sha256="cd" * 32,
        assurance="software",
        profile="standard",
        created_us=1,
        max_duration_s=60,
        phase=Phase.ENDED,
        ended_us=2_000_000,
        outcome="completed",
    )
    folder.save(replace(record, **changes))  # type: ignore[arg-type]
    return folder


def test_a_kept_package_is_the_same_file_and_stays_when_its_name_is_used_again(home: Home, package: Path) -> None:
    folder = RunFolder.create(home)
    assert folder.keep(package) == folder.package
    assert folder.package.samefile(package)
    assert folder.keep(package) == folder.package, "asked twice"
    replacement = package.with_suffix(".part")
    replacement.write_bytes(b"sealed again")
    replacement.replace(package)
    package.unlink()
    assert folder.package.read_bytes() == SEALED


def test_a_package_reached_through_a_link_is_kept_itself(home: Home, package: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(package)
    folder = RunFolder.create(home)
    kept = folder.keep(tmp_path / "link")
    assert stat.S_ISREG(kept.lstat().st_mode)
    package.unlink()
    assert kept.read_bytes() == SEALED


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_what_cannot_be_linked_is_copied(
    home: Home, package: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_names: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    folder = RunFolder.create(home)
    monkeypatch.setattr("glasshouse.jobs.owner.rundir.os.link", refuse)
    kept = folder.keep(package)
    assert (kept.read_bytes(), kept.samefile(package)) == (SEALED, False)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of its own, for as long as the test runs."""
    with memory_disk(tmp_path / "elsewhere") as place:
        yield place


def test_a_package_on_another_file_system_is_copied(home: Home, other_file_system: Path) -> None:
    package = other_file_system / "job.sealed"
    package.write_bytes(SEALED)
    folder = RunFolder.create(home)
    assert folder.path.stat().st_dev != package.stat().st_dev
    assert folder.keep(package).read_bytes() == SEALED
    package.unlink()
    assert folder.package.read_bytes() == SEALED


@pytest.mark.parametrize("name", ["absent.sealed", "folder", "pipe", "file/below"])
def test_what_is_no_package_is_a_usage_error_and_leaves_none(home: Home, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    folder = RunFolder.create(home)
    with pytest.raises(UsageError) as refused:
        folder.keep(tmp_path / name)
    assert refused.value.code is Code.FILE_MISSING
    assert not folder.package.exists()


def test_a_run_that_goes_on_is_never_removed(home: Home) -> None:
    going = a_run(home, phase=Phase.RUNNING, ended_us=None, outcome=None, supervisor=ProcessName.of())
    ended = a_run(home)
    attended = a_run(home, agent=ProcessName.of(), phase=Phase.RUNNING, outcome=None, ended_us=None)
    for folder in (going, attended):
        with pytest.raises(UsageError, match="has not ended") as refused:
            removal.removable(folder, home)
        assert "glasshouse stop" in refused.value.hint
    assert [one.folder.run_id for one in removal.ended_before(home, us=3_000_000)] == [ended.run_id]
    assert removal.ended_before(home, us=2_000_000) == []


def test_what_another_name_still_holds_frees_nothing(home: Home, package: Path) -> None:
    folder = a_run(home)
    folder.keep(package)
    linked = removal.removable(folder, home).freed_bytes
    package.unlink()
    assert removal.removable(folder, home).freed_bytes >= linked + len(SEALED)


def test_a_removal_that_was_cut_off_leaves_no_half_run_and_the_next_one_finishes_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = a_run(home), a_run(home)

    def die(_path: Path) -> None:
        raise KeyboardInterrupt

    chosen = [removal.removable(first, home)]
    with monkeypatch.context() as patched:
        patched.setattr("glasshouse.jobs.supervise.sweeping.shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            removal.remove(chosen)
    assert [folder.run_id for folder in RunFolder.all(home)] == [second.run_id]
    removal.remove([removal.removable(second, home)])
    assert list(home.runs.iterdir()) == []


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = cli.run([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_rm_says_what_goes_and_removes_it_once_that_is_agreed_to(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = a_run(home), a_run(home)
    code, told = ask(capsys, "rm", one.run_id[:8], one.run_id)
    assert (code, told["removed"]) == (ExitCode.USAGE, False)
    assert [run["run_id"] for run in told["runs"]] == [one.run_id]  # type: ignore[attr-defined]
    assert one.path.exists()
    assert cli.run(["rm", one.run_id]) == ExitCode.USAGE, "there is nobody to ask"
    assert "--yes" in capsys.readouterr().out
    code, told = ask(capsys, "rm", one.run_id, "--yes")
    assert (code, told["removed"]) == (ExitCode.DONE, True)
    assert not one.path.exists()
    assert two.path.exists()
    assert ask(capsys, "rm", one.run_id, "--yes")[1]["error"]["code"] == "run-unknown"  # type: ignore[index]


def test_rm_of_several_removes_none_when_one_of_them_goes_on(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    ended = a_run(home)
    going = a_run(home, phase=Phase.RUNNING, ended_us=None, outcome=None, supervisor=ProcessName.of())
    code, told = ask(capsys, "rm", ended.run_id, going.run_id, "--yes")
    assert code == ExitCode.USAGE
    assert "has not ended" in told["error"]["message"]  # type: ignore[index]
    assert ended.path.exists()


def test_prune_takes_what_ended_long_ago(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    import time

    old, recent = a_run(home), a_run(home, ended_us=time.time_ns() // 1000 - 5_000_000)
    code, told = ask(capsys, "prune", "--yes")
    assert (code, [run["run_id"] for run in told["runs"]]) == (0, [old.run_id])  # type: ignore[attr-defined]
    assert ask(capsys, "prune")[1] == {"removed": False, "runs": [], "freed_bytes": 0}
    assert cli.run(["prune", "--older-than", "a while"]) == ExitCode.USAGE
    assert "'a while'" in capsys.readouterr().err
    assert ask(capsys, "prune", "--older-than", "2s", "--yes")[1]["removed"] is True
    assert not recent.path.exists()


def test_a_link_among_the_runs_is_no_run_and_keeps_nothing_from_being_removed(home: Home, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("all of it")
    run = a_run(home)
    (precious / "run.json").write_bytes((run.path / "run.json").read_bytes())
    (home.runs / ("f" * 32)).symlink_to(precious)
    (home.runs / f".{'e' * 32}.removed").symlink_to(precious)  # as an earlier version left one
    with pytest.raises(UsageError) as caught:
        RunFolder.find(home, "ffff")
    assert caught.value.code is Code.RUN_UNKNOWN
    removal.remove([removal.removable(run, home)])
    assert not run.path.exists()
    assert (precious / "thesis").read_text() == "all of it"
    assert not list(home.runs.glob(".*.removed"))


def a_rental(home: Home, folder: RunFolder, step: Step) -> Journal:
    attempt = Attempt(
        tag="gh-abcdefghij-c0ffee00-1",
        nonce="0" * 32,
        offer=offer(),
        asked_us=1,
        step=step,
        gone_us=2 if step.over else None,
    )
    caps = Caps(usd=None, seconds=3600, boot_s=60)
    rental = Rental(
        run_id=folder.run_id, provider="vast", created_us=1, caps=caps, python="p", keeper=None, attempts=(attempt,)
    )
    return Journal.create(home, rental)


@pytest.mark.parametrize("step", [step for step in Step if not step.over])
def test_a_run_whose_rented_machine_may_still_cost_money_is_not_removed(
    home: Home, step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = a_run(home)
    journal = a_rental(home, folder, step)
    assert cli.run(["rm", folder.run_id, "--yes"]) == ExitCode.USAGE
    assert "not shown to be gone" in capsys.readouterr().err
    assert cli.run(["prune", "--older-than", "1s", "--yes"]) == ExitCode.DONE
    assert folder.path.exists()
    assert journal.exists


def test_a_rental_that_is_over_goes_with_its_run_and_no_other(home: Home) -> None:
    folder, other = a_run(home), a_run(home)
    journals = [a_rental(home, one, Step.GONE) for one in (folder, other)]
    folder.rental.write_text("{}")
    (home.accounts).mkdir(mode=0o700)
    (home.accounts / "vast").write_text("0123456789")
    assert cli.run(["rm", folder.run_id, "--yes"]) == ExitCode.DONE
    assert not folder.path.exists()
    assert [one.path.exists() for one in journals] == [False, True]
    assert cli.run(["prune", "--older-than", "1s", "--yes"]) == ExitCode.DONE
    assert not journals[1].path.exists()
    assert (home.accounts / "vast").exists(), "the key of an account is of no run"


def test_a_run_whose_rental_cannot_be_read_is_not_removed(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(home)
    journal = a_rental(home, folder, Step.GONE)
    (journal.path / "rental.json").write_text("{}")
    assert cli.run(["rm", folder.run_id, "--yes"]) == ExitCode.USAGE
    assert "is damaged" in capsys.readouterr().err
    assert folder.path.exists()
