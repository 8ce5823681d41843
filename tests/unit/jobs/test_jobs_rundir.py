"""Runs are found by id, beginning or `latest`; a record survives its round trip; a process is not taken for another."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(path=tmp_path / "home").make()


def record(folder: RunFolder, created_us: int = 1) -> RunRecord:
    return RunRecord(
        run_id=folder.run_id,
        name="clinic",
        workload="lora",
        package=Path("/somewhere/job.sealed"),
        package_id="ab" * 16,
        manifest_sha256="cd" * 32,
        assurance="software",
        profile="standard",
        created_us=created_us,
        max_duration_s=60,
    )


def test_a_record_round_trips_with_everything_in_it(home: Home) -> None:
    folder = RunFolder.create(home)
    full = replace(
        record(folder),
        phase=Phase.RUNNING,
        deployment="ef" * 16,
        broker=Path("/run/owner.sock"),
        supervisor=ProcessName.of(),
        agent=ProcessName(pid=4711, started=99),
        outcome="failed",
        code="worker-killed",
    )
    assert folder.save(full) == full == folder.load()
    assert stat.S_IMODE((folder.path / "run.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    ended = folder.end(outcome="completed", code=None)
    assert (ended.phase, ended.outcome, ended.code, ended.deployment) == (Phase.ENDED, "completed", None, "ef" * 16)
    assert ended.ended_us is not None


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"run_id": 3}'])
def test_a_damaged_record_is_named(home: Home, damage: str) -> None:
    folder = RunFolder.create(home)
    (folder.path / "run.json").write_text(damage)
    with pytest.raises(UsageError, match="damaged"):
        folder.load()


def test_a_record_of_another_version_is_damaged_and_no_crash(home: Home) -> None:
    folder = RunFolder.create(home)
    value = record(folder).to_json() | {"phase": "dreaming"}
    (folder.path / "run.json").write_text(json.dumps(value))
    with pytest.raises(UsageError, match="damaged"):
        folder.load()


def test_a_record_with_more_than_this_version_writes_is_read(home: Home) -> None:
    folder = RunFolder.create(home)
    saved = folder.save(record(folder))
    path = folder.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_a_later_version": {"more": 1}}))
    assert folder.load() == saved


def test_runs_are_found_by_id_beginning_and_latest(home: Home) -> None:
    names = ["aa11" + "0" * 28, "aa22" + "0" * 28, "bb33" + "0" * 28]
    for age, name in enumerate(names):
        folder = RunFolder(home.runs / name)
        folder.path.mkdir()
        folder.save(record(folder, created_us=100 - age if name != names[1] else 500))
    assert RunFolder.find(home, names[0]).run_id == names[0]
    assert RunFolder.find(home, "BB").run_id == names[2]
    assert RunFolder.find(home, "latest").run_id == names[1]
    for unknown, said in (("aa", "2 runs"), ("cc", "no run"), ("", "no run"), ("../" + names[0], "no run")):
        with pytest.raises(UsageError, match=said) as refused:
            RunFolder.find(home, unknown)
        assert refused.value.code is Code.RUN_UNKNOWN


def test_latest_of_nothing_says_how_to_begin(home: Home) -> None:
    with pytest.raises(UsageError) as refused:
        RunFolder.find(home, "latest")
    assert refused.value.code is Code.RUN_UNKNOWN
    assert "glasshouse run" in refused.value.hint


def test_a_process_is_known_by_when_it_began() -> None:
    me = ProcessName.of()
    assert me.alive
    assert ProcessName.from_json(me.to_json()) == me
    assert not replace(me, started=me.started + 1).alive, "a later process with our number is not us"
    for junk in (None, {}, {"pid": "1"}, {"pid": 0}, {"pid": 1}, {"pid": -1}):
        with pytest.raises(FormatError):
            ProcessName.from_json(junk)  # type: ignore[arg-type]


def test_a_dead_process_and_a_zombie_are_not_alive_and_get_no_signal() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = ProcessName.of(child.pid)
    assert name.alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not name.alive, "nobody has reaped it yet, and still it is dead"
    assert not name.send(signal.SIGTERM)
    child.communicate()
    assert not name.alive


@pytest.mark.parametrize("pid", [0, -1])
def test_a_number_that_stands_for_a_group_of_processes_is_no_process(pid: int) -> None:
    assert not ProcessName(pid=pid, started=0).send(signal.SIGCONT)


def test_the_home_is_the_one_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLASSHOUSE_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    home = Home.locate()
    assert (home.path, home.project) == (tmp_path / "data" / "glasshouse", tmp_path / ".glasshouse")
    assert Home.locate().runs == tmp_path / ".glasshouse" / "runs"
    monkeypatch.setenv("GLASSHOUSE_HOME", str(tmp_path / "elsewhere"))
    assert Home.locate().path == tmp_path / "elsewhere"
    home = Home.locate(Path("named"))
    assert (home.path, home.project) == (tmp_path / "named", None)
    assert Home.locate(Path("named")).runs == tmp_path / "named" / "runs"
    with pytest.raises(UsageError) as refused:
        Home.locate().require()
    assert refused.value.code is Code.IDENTITY


def test_state_is_kept_out_of_repositories_and_a_folder_of_the_users_own_is_not(tmp_path: Path) -> None:
    home = Home(path=tmp_path / "data", project=tmp_path / "project" / ".glasshouse").make()
    RunFolder.create(home)
    for folder in (home.path, tmp_path / "project" / ".glasshouse"):
        assert (folder / ".gitignore").read_text() == "*\n"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "project" / "train.py").touch()
    Home(path=tmp_path / "project").make()  # --home .
    assert not (tmp_path / "project" / ".gitignore").exists()


def test_runs_of_all_projects_of_one_home_are_found_also_beside_a_damaged_note(tmp_path: Path) -> None:
    homes = [Home(path=tmp_path / "data", project=tmp_path / name) for name in ("one", "two")]
    folders = [RunFolder.create(home) for home in homes for _ in range(2)]
    for folder in folders:
        folder.save(record(folder))
    (tmp_path / "data" / "projects" / "junk.json").write_text('{"path": 3}')
    for home in homes:
        assert {folder.path for folder in RunFolder.everywhere(home)} == {folder.path for folder in folders}
        assert len(list(RunFolder.all(home))) == 2
