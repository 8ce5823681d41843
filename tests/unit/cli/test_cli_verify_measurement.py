"""`glasshouse verify` of a measurement: what it prints, and its exit code, which is its answer."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from glasshouse.bench.overhead.design import Mode
from glasshouse.cli import app as cli
from glasshouse.errors import ExitCode
from glasshouse.jobs.identity import OwnerPublic
from glasshouse.jobs.installation import install_command
from simulators.measurement import OWNER, edit_lines, write
from simulators.owner_side import OwnersWorld
from simulators.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("measured")
    write(base / "out", sessions=2, blocks=2, phases=0)
    world = World()
    (base / "owner.pub").write_bytes(OwnerPublic(signing=OWNER.public, sealing=world.owner_hpke.public).encode())
    return base / "out"


def verify(folder: Path, *arguments: str) -> int:
    owner = folder.parent / "owner.pub" if folder.is_dir() else folder.parent.parent / "owner.pub"
    return cli.run(["verify", str(folder), "--owner", str(owner), *arguments])


@pytest.mark.parametrize("name", ["", "statement.json"])
def test_a_folder_or_its_statement_is_verified(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder / name) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "✓ statement" in text
    assert "✓ null holds 0" in text
    assert "2 of 2 sessions completed" in text
    assert "assurance software; the times are the owner's word" in text


def test_a_program_gets_every_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, "--json") == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["status"], found["assurance"]) == ("overhead", "good", "software")
    assert found["parts"][0]["claim"]["word"]


def test_a_report_beside_it_is_named_as_unsigned(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(folder) == ExitCode.DONE
    assert "not signed" not in capsys.readouterr().out
    shutil.copytree(folder.parent, tmp_path / "copy")
    (tmp_path / "copy/out/report.html").write_text("<h1>protection is free</h1>")
    assert verify(tmp_path / "copy/out") == ExitCode.DONE
    assert "report.html and its figures are not signed" in capsys.readouterr().out.replace("\n", " ")


def test_a_key_that_came_with_the_measurement_proves_nobody(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(folder) == ExitCode.DONE
    assert "of an owner not known here" in capsys.readouterr().out.replace("\n", " ")
    shutil.copytree(folder.parent, tmp_path / "copy")
    beside = tmp_path / "copy/out/owner.pub"
    shutil.move(tmp_path / "copy/owner.pub", beside)
    assert cli.run(["verify", str(beside.parent), "--owner", str(beside)]) == ExitCode.DONE
    assert "THE OWNER IS NOT KNOWN: the key came with what it" in capsys.readouterr().out.replace("\n", " ")


def test_an_edited_time_is_not_authentic(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder.parent, tmp_path / "copy")
    edited = tmp_path / "copy/out"
    edit_lines(edited / "interleaved/slices.jsonl", lambda found: found[0].update(t1_ns=found[0]["t1_ns"] + 1))
    assert verify(edited) == ExitCode.VERIFICATION_FAILED
    text = capsys.readouterr().err
    assert "NOT authentic: the measurement" in text
    assert "interleaved/slices.jsonl does not hold the lines that were signed" in text


@pytest.mark.parametrize("beneath", ["", "out"])
def test_a_genuine_run_beside_a_forged_measurement_does_not_answer_for_it(
    folder: Path, tmp_path: Path, beneath: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who changed the slices lays a good run of the owner's into the folder."""
    shutil.copytree(folder.parent, tmp_path / "copy")
    forged, world = tmp_path / "copy/out", OwnersWorld()
    edit_lines(forged / "interleaved/slices.jsonl", lambda found: found[0].update(t1_ns=found[0]["t1_ns"] + 1))
    settled = world.settle(tmp_path / "run")
    world.tell(settled, world.run())
    shutil.copytree(settled.out, forged / beneath, dirs_exist_ok=True)
    assert verify(forged) == ExitCode.USAGE
    assert "holds a receipt and a measurement" in capsys.readouterr().err
    assert verify(forged / "statement.json") == ExitCode.VERIFICATION_FAILED


def test_without_a_null_run_the_word_does_not_stand(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "out", modes=[Mode.INTERLEAVED], sessions=2, blocks=2, phases=0)
    (tmp_path / "owner.pub").write_bytes((folder.parent / "owner.pub").read_bytes())
    assert verify(tmp_path / "out") == ExitCode.INCOMPLETE
    text = capsys.readouterr().out
    assert "✗ null holds 0" in text
    assert "its word does not stand" in text


def test_another_owner_is_named_as_the_reason(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = World("stranger")
    public = tmp_path / "stranger.pub"
    public.write_bytes(OwnerPublic(signing=stranger.owner.public, sealing=stranger.owner_hpke.public).encode())
    assert cli.run(["verify", str(folder), "--owner", str(public)]) == ExitCode.VERIFICATION_FAILED
    assert "by another owner" in capsys.readouterr().err


def test_an_installation_without_the_bench_extra_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "glasshouse.bench.overhead.verify", None)
    assert verify(folder) == ExitCode.USAGE
    assert install_command("bench") in capsys.readouterr().err
