"""`glasshouse verify` of a measurement: what it prints, and its exit code, which is its answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.wire import dsse
from glasshouse_bench.design import Mode
from simulators.owner_side import OwnersWorld
from simulators.slot_measurement import OWNER, measured
from simulators.world import World

RECORD = Path("interleaved/sessions/0000/raw.steps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("measured")
    measured(base / "out", receipts=True, sessions=3, length_ns=800_000_000)
    world = World()
    (base / "owner.pub").write_bytes(OwnerPublic(signing=OWNER.public, sealing=world.owner_hpke.public).encode())
    return base / "out"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder.parent, tmp_path / "copy")
    return tmp_path / "copy" / "out"


def verify(folder: Path, *arguments: str) -> int:
    owner = folder.parent / "owner.pub" if folder.is_dir() else folder.parent.parent / "owner.pub"
    return cli.run(["verify", str(folder), "--owner", str(owner), *arguments])


def edit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["", "statement.json"])
def test_a_folder_or_its_statement_is_verified(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder / name) == ExitCode.DONE
    text = capsys.readouterr().out.replace("\n", " ")
    assert "✓ statement" in text
    assert "✓ null holds 0" in text
    assert "3 of 3 sessions count" in text
    assert "assurance software; the times are the word of the owner" in text


def test_a_program_gets_every_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, "--json") == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["status"], found["assurance"]) == ("measurement", "good", "software")
    assert found["parts"][0]["claim"]["word"]


def test_a_report_beside_it_is_named_as_unsigned(folder: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder) == ExitCode.DONE
    assert "not signed" not in capsys.readouterr().out
    (copy / "report.html").write_text("<h1>protection is free</h1>")
    assert verify(copy) == ExitCode.DONE
    assert "report.html and its figures are not signed" in capsys.readouterr().out.replace("\n", " ")


def test_a_key_that_came_with_the_measurement_proves_nobody(
    folder: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(folder) == ExitCode.DONE
    assert "of an owner not known here" in capsys.readouterr().out.replace("\n", " ")
    beside = copy / "owner.pub"
    shutil.move(copy.parent / "owner.pub", beside)
    assert cli.run(["verify", str(copy), "--owner", str(beside)]) == ExitCode.DONE
    assert "THE OWNER IS NOT KNOWN: the key came with what it" in capsys.readouterr().out.replace("\n", " ")


def test_an_edited_record_is_not_authentic(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copy / RECORD)
    assert verify(copy) == ExitCode.VERIFICATION_FAILED
    assert "NOT authentic: the measurement" in capsys.readouterr().err


@pytest.mark.parametrize("beneath", ["", "out"])
def test_a_genuine_run_beside_a_forged_measurement_does_not_answer_for_it(
    copy: Path, tmp_path: Path, beneath: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who changed the records lays a good run of the owner's into the folder."""
    edit(copy / RECORD)
    world = OwnersWorld()
    settled = world.settle(tmp_path / "run")
    world.tell(settled, world.run())
    shutil.copytree(settled.out, copy / beneath, dirs_exist_ok=True)
    assert verify(copy) == ExitCode.USAGE
    assert "holds a receipt and a measurement" in capsys.readouterr().err
    assert verify(copy / "statement.json") == ExitCode.VERIFICATION_FAILED


def test_without_a_null_run_the_word_does_not_stand(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(tmp_path / "out", modes=[Mode.INTERLEAVED], receipts=True, sessions=3, length_ns=800_000_000)
    (tmp_path / "owner.pub").write_bytes((folder.parent / "owner.pub").read_bytes())
    assert verify(tmp_path / "out") == ExitCode.INCOMPLETE
    text = capsys.readouterr().out
    assert "null holds 0" not in text
    assert "Incomplete" in text
    assert "its own word" in text


def test_another_owner_is_named_as_the_reason(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = World("stranger")
    public = tmp_path / "stranger.pub"
    public.write_bytes(OwnerPublic(signing=stranger.owner.public, sealing=stranger.owner_hpke.public).encode())
    assert cli.run(["verify", str(folder), "--owner", str(public)]) == ExitCode.VERIFICATION_FAILED
    assert "by another owner" in capsys.readouterr().err


def test_a_measurement_of_the_first_format_is_refused_with_what_to_do(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = dsse.sign("application/vnd.glasshouse.overhead+json", b"{}", [OWNER])
    (copy / "statement.json").write_bytes(old.encode())
    assert verify(copy) == ExitCode.VERIFICATION_FAILED
    said = capsys.readouterr().err.replace("\n", " ")
    assert "of the first format" in said
    assert "glasshouse bench overhead" in said
