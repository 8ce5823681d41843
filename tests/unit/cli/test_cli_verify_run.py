"""What is asked for by a run's id is that run: a good receipt of another one says nothing about it."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.rundir import RunFolder
from simulators.group_world import settle_group
from simulators.owner_side import OwnersWorld
from simulators.world import START_US

_OWN = frozenset({"id of run", "id of token", "key of evidence", "key of launch"})


@dataclass
class SecondRun(OwnersWorld):
    """Another run of the same owner, broker and package."""

    def digest(self, label: str) -> bytes:
        return super().digest(f"{label} of the second run" if label in _OWN else label)


@dataclass
class Desk:
    """The owner at a shell, with two runs of theirs that ended well."""

    home: Path
    first: RunFolder
    second: RunFolder
    capsys: pytest.CaptureFixture[str]

    def ask(self, *words: object) -> tuple[int, str]:
        code = cli.run([*map(str, words), "--home", str(self.home)])
        said = self.capsys.readouterr()
        return code, said.out + said.err


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    first, second = OwnersWorld(), SecondRun()
    one, other = first.settle(tmp_path / "first"), second.settle(tmp_path / "second")
    first.tell(one, first.run())
    second.tell(other, second.run())
    moved = first.home.runs / other.run_id
    shutil.move(other.path, moved)
    for folder in (one, RunFolder(moved)):
        folder.end(outcome="completed", verdict="good", exit_code=0)
    return Desk(home=first.home.path, first=one, second=RunFolder(moved), capsys=capsys)


def hand_in(from_run: RunFolder, as_run: RunFolder) -> None:
    """The host of a run gives back what another run of the same owner had left: all of it is signed."""
    shutil.rmtree(as_run.out)
    shutil.copytree(from_run.out, as_run.out)


@pytest.mark.parametrize("named", ["by its id", "by its folder"])
def test_the_files_of_another_run_do_not_stand_for_this_one(desk: Desk, named: str) -> None:
    what = desk.second.run_id if named == "by its id" else desk.second.path
    assert desk.ask("verify", what)[0] == ExitCode.DONE
    hand_in(desk.first, desk.second)
    code, said = desk.ask("verify", what)
    assert code == ExitCode.VERIFICATION_FAILED
    assert "is of another run" in said
    assert "Authentic" not in said


@pytest.mark.parametrize("words", [("artifact", "-o", "a.json"), ("export", "-o", "kit"), ("card", "-o", "card.html")])
def test_nothing_is_published_of_another_run_than_the_one_that_was_named(
    desk: Desk, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glasshouse.cli.results.artifact_command.leak_patterns", lambda *_words, **_options: [])
    hand_in(desk.first, desk.second)
    command, *options = words
    code, said = desk.ask(command, desk.second.run_id, *options)
    assert (code, "is of another run" in said) == (ExitCode.VERIFICATION_FAILED, True), said
    assert not (tmp_path / options[-1]).exists()


def test_a_folder_here_does_not_stand_for_the_run_of_that_name(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something that was fetched into the working folder is called like what the owner asks for."""
    monkeypatch.chdir(tmp_path)
    older = desk.first.out
    for name in ("latest", desk.second.run_id):
        shutil.copytree(older, tmp_path / name)
        code, said = desk.ask("verify", name)
        assert (code, "is a run, and something in this folder too" in said) == (ExitCode.USAGE, True), said
        assert desk.ask("verify", f"./{name}/receipt.json")[0] == ExitCode.DONE
    monkeypatch.chdir(desk.second.path.parent)
    assert desk.ask("verify", desk.second.run_id)[0] == ExitCode.DONE, "the run's own folder"


def test_a_file_that_nothing_vouches_for_is_no_part_of_what_matches(desk: Desk) -> None:
    """The host lays an output of its own beside the real ones: `fetch` refuses it, `verify` says that it is there."""
    assert "Not looked at" not in desk.ask("verify", desk.first.run_id)[1]
    (desk.first.out / "outputs" / "0003.sealed").write_bytes(b"forged")
    (desk.first.out / "log" / "notes").mkdir()
    code, said = desk.ask("verify", desk.first.run_id)
    assert (code, "outputs: 3 of 3 match" in said) == (ExitCode.DONE, True)
    assert "Not looked at: what else lies in outputs/ (1), what else lies in log/ (1)." in said
    assert desk.ask("fetch", desk.first.run_id, "-o", desk.home / "out")[0] == ExitCode.VERIFICATION_FAILED


def test_one_machine_alone_does_not_stand_for_a_run_on_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, worlds, folders = settle_group(tmp_path)
    for world, machine in zip(worlds, folders, strict=True):
        world.tell(machine, world.run())
    alone = OwnersWorld()
    single = alone.settle(tmp_path / "alone")
    alone.tell(single, alone.run())
    desk = Desk(home=worlds[0].home.path, first=single, second=folder, capsys=capsys)
    by_folder = desk.ask("verify", folder.path)
    assert by_folder[0] == ExitCode.DONE
    assert "on all 2 machines" in by_folder[1]
    hand_in(single, folder)
    code, said = desk.ask("verify", folder.run_id)
    assert (code, "is of another run" in said) == (ExitCode.VERIFICATION_FAILED, True)


def test_a_machine_of_a_group_that_ended_in_the_future_is_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worlds, folders = settle_group(tmp_path)
    worlds[0].tell(folders[0], worlds[0].run())
    late, close = worlds[1], worlds[1].close
    monkeypatch.setattr(late, "close", lambda *words: (late.tick(3600 * 1_000_000), close(*words))[1])
    late.tell(folders[1], late.run())
    desk = Desk(home=worlds[0].home.path, first=folder, second=folder, capsys=capsys)
    assert desk.ask("verify", folder.run_id)[0] == ExitCode.DONE
    monkeypatch.setattr(time, "time_ns", lambda: (START_US + 60 * 1_000_000) * 1000)
    code, said = desk.ask("verify", folder.run_id)
    assert (code, "in the future" in said) == (ExitCode.VERIFICATION_FAILED, True), said
