"""init, export and restore; a passphrase comes from a file, a descriptor or a terminal, never from anywhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from glasshouse.cli import app as cli
from glasshouse.cli.options import sealing_without_asking
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner import owner_identity as identities
from glasshouse.jobs.owner.home import Home

PASSPHRASE = "correct horse battery"


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "_SCRYPT_N", 1 << 14)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASSHOUSE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def passphrase(tmp_path: Path) -> Path:
    path = tmp_path / "passphrase"
    path.write_text(PASSPHRASE + "\n")
    path.chmod(0o600)
    return path


def ask(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    code = cli.run([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_init_makes_an_identity_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, made = ask("init", capsys=capsys)
    assert (code, made["encrypted"], made["home"]) == (0, False, str(home))
    code, shown = ask("identity", "show", capsys=capsys)
    assert (shown["fingerprint"], shown["private_key"]) == (made["fingerprint"], True)
    code, error = ask("init", capsys=capsys)
    assert code == ExitCode.USAGE
    assert "there already" in str(error["error"])


def test_an_encrypted_identity_travels_by_export_and_restore(
    home: Path, passphrase: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, made = ask("init", "--passphrase-file", str(passphrase), capsys=capsys)
    assert made["encrypted"] is True
    copy, other = str(tmp_path / "copy"), str(tmp_path / "other")
    export = ["identity", "export", "-o", copy, "--export-passphrase-file", str(passphrase)]
    code, _ = ask(*export, capsys=capsys)
    assert code == ExitCode.USAGE, "no terminal to ask on, and no file named"
    code, _ = ask(*export, "--passphrase-file", str(passphrase), capsys=capsys)
    assert code == 0
    assert Path(copy).stat().st_mode & 0o777 == 0o600
    code, restored = ask(
        "identity", "restore", copy, "--passphrase-file", str(passphrase), "--home", other, capsys=capsys
    )
    assert (code, restored["fingerprint"], restored["encrypted"]) == (0, made["fingerprint"], True)
    code, _ = ask("identity", "restore", copy, "--passphrase-file", str(passphrase), "--home", other, capsys=capsys)
    assert code == ExitCode.USAGE, "an identity is never replaced"


def test_a_wrong_passphrase_is_refused_without_a_trace_of_it(
    home: Path, passphrase: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask("init", "--passphrase-file", str(passphrase), capsys=capsys)
    wrong = tmp_path / "wrong"
    wrong.write_text("a wrong passphrase")
    wrong.chmod(0o600)
    code, error = ask("logs", "latest", "--passphrase-file", str(wrong), capsys=capsys)
    assert code == ExitCode.USAGE
    code, error = ask(
        *("identity", "export", "-o", str(tmp_path / "copy"), "--passphrase-file", str(wrong)), capsys=capsys
    )
    assert code == ExitCode.USAGE
    assert "passphrase is wrong" in str(error)
    assert "a wrong passphrase" not in str(error)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"", 0o600, "one line"),
        (b"two\nlines", 0o600, "one line"),
        (b"\xff\xfe", 0o600, "cannot read"),
        (b"x" * 5000, 0o600, "one line"),
        (PASSPHRASE.encode(), 0o644, "others may read"),
        (b"short", 0o600, "at least 8"),
    ],
)
def test_a_useless_passphrase_file_is_refused(
    home: Path, tmp_path: Path, content: bytes, mode: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "passphrase"
    path.write_bytes(content)
    path.chmod(mode)
    code, error = ask("init", "--passphrase-file", str(path), capsys=capsys)
    assert code == ExitCode.USAGE
    assert said in str(error)
    assert not (home / "owner.key").exists()


@pytest.mark.parametrize("words", [("identity", "show"), ("identity", "export", "-o", "copy"), ("run", "absent")])
def test_an_identity_that_others_may_read_is_used_by_no_command(
    home: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ask("init", capsys=capsys)
    (home / "owner.key").chmod(0o640)
    code, answer = ask(*words, capsys=capsys)
    error = answer["error"]
    assert isinstance(error, dict)
    assert (code, error["code"], error["hint"]) == (ExitCode.USAGE, "identity", f"chmod 600 {home / 'owner.key'}")


def test_names_of_outputs_are_not_opened_with_an_identity_that_others_may_read(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask("init", capsys=capsys)
    assert sealing_without_asking(Home(path=home)) is not None
    (home / "owner.key").chmod(0o604)
    assert sealing_without_asking(Home(path=home)) is None


def test_a_passphrase_comes_from_a_descriptor_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.write(writing, PASSPHRASE.encode())
    os.close(writing)
    code, made = ask("init", "--passphrase-fd", str(reading), capsys=capsys)
    assert (code, made["encrypted"]) == (0, True)
    identities.Identity.parse((home / "owner.key").read_bytes(), PASSPHRASE)


def test_two_sources_of_a_passphrase_are_one_too_many(
    home: Path, passphrase: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = ask("init", "--passphrase-file", str(passphrase), "--passphrase-fd", "0", capsys=capsys)
    assert code == ExitCode.USAGE
    assert not (home / "owner.key").exists()


def test_no_option_takes_a_passphrase_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """It would stand in the list of processes for everybody."""
    code, error = ask("init", "--passphrase=secret words", capsys=capsys)
    assert code == ExitCode.USAGE
    assert "secret words" not in str(error)


def test_a_ctrl_c_while_a_run_is_prepared_leaves_nothing_and_says_that_no_key_left(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    ask("init", capsys=capsys)
    monkeypatch.setattr("glasshouse.jobs.supervise.run_job.prepare", interrupt)
    code, error = ask("run", str(tmp_path / "job.sealed"), capsys=capsys)
    assert code == ExitCode.INTERRUPTED
    assert "was not released" in str(error["error"])
    assert list((home / "runs").iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [("run", "job.toml", "--raw", "--detach"), ("run", "absent.toml"), ("run", "absent")]
)
def test_a_run_that_cannot_begin_is_a_usage_error_and_leaves_no_folder(
    home: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ask("init", capsys=capsys)
    code, _ = ask(*arguments, capsys=capsys)
    assert code == ExitCode.USAGE
    assert list((home / "runs").iterdir()) == []


def test_an_export_without_a_terminal_names_the_option_that_it_has(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask("init", capsys=capsys)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    code, error = ask("identity", "export", "-o", str(tmp_path / "copy"), capsys=capsys)
    assert code == ExitCode.USAGE
    assert "--export-passphrase-file" in str(error["error"])
    assert "--passphrase-fd" not in str(error["error"])
