"""A path that leads nowhere, for whatever reason, is the user's to mend and no defect of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import ExitCode
from simulators.owner_side import OwnersWorld

LONG = "x" * 256
NAMED = {
    "too long": LONG,
    "too long below": f"{LONG}/file",
    "too deep": "d/" * 3000 + "file",
    "a folder": ".",
    "absent": "absent.json",
    "below a file": "file/below.json",
    "around in circles": "loop",
}
# Where a path is read; and where it is written to.
READ = {
    "verify": ("verify", "PATH"),
    "verify by": ("verify", "latest", "--owner", "PATH"),
    "verify content": ("verify", "PATH", "--content"),
    "inspect": ("inspect", "PATH"),
    "run": ("run", "PATH"),
    "run raw": ("run", "PATH", "--raw"),
    "seal": ("seal", "PATH", "-o", "out.sealed"),
    "restore": ("identity", "restore", "PATH", "--home", "another"),
    "passphrase": ("init", "--home", "another", "--passphrase-file", "PATH"),
    "revoke": ("revoke", "PATH"),
    "home": ("status", "--home", "PATH"),
    "attach": ("attach", "PATH"),
}
WRITTEN = {
    "export": ("identity", "export", "-o", "PATH", "--export-passphrase-file", "passphrase"),
    "artifact": ("artifact", "latest", "-o", "PATH"),
    "seal": ("seal", "job.toml", "-o", "PATH"),
    "fetch": ("fetch", "latest", "-o", "PATH"),
    "init": ("init", "--home", "PATH"),
    "broker data": ("broker", "serve", "--data", "PATH"),
    "broker socket": ("broker", "serve", "--owner-socket", "PATH"),
}
JOB = """\
workload = "script"
[inputs]
"train.py" = "train.py"
[params]
script = "train.py"
[policy]
assurance = "software"
profile = "standard"
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnersWorld:
    # What a broker does to its own process first, here the suite's.
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    monkeypatch.setattr("os.umask", lambda _: 0)
    made = OwnersWorld()
    folder = made.settle(tmp_path)
    made.tell(folder, made.run())
    folder.end(outcome="completed", verdict="good", exit_code=0)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "passphrase").write_text("correct horse battery")
    (tmp_path / "passphrase").chmod(0o600)
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLASSHOUSE_HOME", str(made.home.path))
    return made


def ask(words: tuple[str, ...], path: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.run([*(path if word == "PATH" else word for word in words), "--json"])
    return code, json.loads(capsys.readouterr().out)["error"]["code"]


@pytest.mark.parametrize("path", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("words", READ.values(), ids=READ)
def test_what_cannot_be_read_is_a_usage_error(
    world: OwnersWorld, words: tuple[str, ...], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, reason = ask(words, path, capsys)
    assert (code, reason != "internal") == (ExitCode.USAGE, True), reason


@pytest.mark.parametrize("path", [LONG, f"{LONG}/file", "file/below", "loop/below"])
@pytest.mark.parametrize("words", WRITTEN.values(), ids=WRITTEN)
def test_what_cannot_be_written_is_a_usage_error(
    world: OwnersWorld, words: tuple[str, ...], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, reason = ask(words, path, capsys)
    assert (code, reason != "internal") == (ExitCode.USAGE, True), reason


def test_a_file_that_the_system_refuses_in_the_midst_of_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_named: object = None) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere/file")

    monkeypatch.setattr("glasshouse.jobs.owner.home.Home.locate", fail)
    assert cli.run(["status"]) == ExitCode.USAGE
    assert capsys.readouterr().err == "error: cannot use /somewhere/file: permission denied [file-missing]\n"


def test_too_little_memory_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_named: object = None) -> None:
        raise MemoryError

    monkeypatch.setattr("glasshouse.jobs.owner.home.Home.locate", fail)
    assert cli.run(["status"]) == ExitCode.RUN_FAILED
    assert "memory" in capsys.readouterr().err
