"""One object on standard output, errors too; each fault has its exit code; starting is quick and loads little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import (
    Code,
    ExitCode,
    FormatError,
    GlasshouseError,
    PackageError,
    PeerError,
    PlatformError,
    RefusedError,
    ResidueError,
    RunError,
    UsageError,
    VerificationError,
)
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from simulators.world import World

COMMANDS = (
    *("init", "seal", "inspect", "run", "attach", "stop", "status", "logs", "fetch", "verify", "artifact", "revoke"),
    *("tamper", "doctor", "identity", "broker", "bench"),
)


def glasshouse(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    found = capsys.readouterr()
    return code, found.out, found.err


def test_help_names_every_command_and_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = glasshouse("--help", capsys=capsys)
    assert code == ExitCode.DONE
    for command in COMMANDS:
        assert command in out
        code, said, _ = glasshouse(command, "--help", capsys=capsys)
        assert (code, "Usage" in said) == (ExitCode.DONE, True), command


@pytest.mark.parametrize(
    "command",
    [
        *("init", "seal", "inspect", "run", "attach", "stop", "status", "logs", "fetch", "verify", "artifact"),
        *("revoke", "tamper", "doctor", "identity show", "identity export", "identity restore", "broker serve"),
    ],
)
def test_every_command_speaks_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = glasshouse(*command.split(), "--help", capsys=capsys)
    assert "--json" in out


def test_starting_is_quick_and_loads_neither_torch_nor_ciphers() -> None:
    told = (
        "import sys; from glasshouse.cli import app; code = app.run(['--version']); "
        "loaded = set(sys.modules); "
        "print(code, *sorted(loaded & {'torch', 'transformers', 'cryptography', 'fastapi', 'sqlalchemy', 'rich.live'}))"
    )
    times = []
    for _ in range(3):
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
        times.append(time.monotonic() - begin)
    assert done.stdout.splitlines()[-1] == "0"
    # Half a second on a machine that does nothing else; tests share theirs.
    assert min(times) < 2.0


def test_commands_about_runs_load_neither_the_broker_s_database_nor_its_server(tmp_path: Path) -> None:
    told = (
        "import sys; from glasshouse.cli import app; codes = [app.run(words.split()) for words in sys.argv[1:]]; "
        "print(*codes, *sorted({'torch', 'fastapi', 'sqlalchemy', 'uvicorn'} & set(sys.modules)))"
    )
    home = f"--home {tmp_path}"
    commands = (f"init {home}", f"status {home}", f"broker audit {home}", f"logs {home}", f"gate list {home}")
    done = subprocess.run([sys.executable, "-c", told, *commands], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 0 0 2 0", done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run"], ["fetch", "x"], ["status", "--colour"], ["bench", "speed"]]
)
def test_a_wrong_command_line_is_a_usage_error_in_words_and_as_json(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = glasshouse(*arguments, capsys=capsys)
    assert (code, out) == (ExitCode.USAGE, "")
    assert err.startswith("error: ")
    code, out, err = glasshouse(*arguments, "--json", capsys=capsys)
    assert (code, err) == (ExitCode.USAGE, "")
    error = json.loads(out)["error"]
    assert error.keys() == {"code", "message", "hint", "fault"}
    assert (error["code"], error["fault"]) == ("usage", "user")
    assert "--help" in error["hint"]


@pytest.mark.parametrize(
    ("kind", "code", "fault"),
    [
        (UsageError, ExitCode.USAGE, "user"),
        (RefusedError, ExitCode.REFUSED, "runtime"),
        (RunError, ExitCode.RUN_FAILED, "job"),
        (PlatformError, ExitCode.RUN_FAILED, "machine"),
        (FormatError, ExitCode.VERIFICATION_FAILED, "sender"),
        (PackageError, ExitCode.VERIFICATION_FAILED, "package"),
        (VerificationError, ExitCode.VERIFICATION_FAILED, "document"),
        (ResidueError, ExitCode.RESIDUE, "machine"),
        (PeerError, ExitCode.UNREACHABLE, "peer"),
    ],
)
def test_each_fault_has_its_exit_code(
    kind: type[GlasshouseError],
    code: ExitCode,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(_named: object = None) -> None:
        raise kind(Code.SCHEMA, "what went wrong", hint="what to do")

    monkeypatch.setattr("glasshouse.jobs.owner.home.Home.locate", fail)
    found, out, _ = glasshouse("status", "--json", "--home", str(tmp_path), capsys=capsys)
    assert found == code
    said = {"code": "schema-invalid", "message": "what went wrong", "hint": "what to do", "fault": fault}
    assert json.loads(out) == {"error": said}
    found, out, err = glasshouse("status", capsys=capsys)
    assert (found, out) == (code, "")
    assert err == "error: what went wrong [schema-invalid]\n  what to do\n"


def test_a_defect_of_ours_shows_its_place_and_no_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_named: object = None) -> None:
        secret = "the package key"
        raise ValueError(secret)

    monkeypatch.setattr("glasshouse.jobs.owner.home.Home.locate", fail)
    code, out, err = glasshouse("status", "--json", capsys=capsys)
    assert code == ExitCode.INTERNAL
    assert json.loads(out)["error"]["code"] == "internal"
    assert "package key" not in out + err
    assert "ValueError" in out
    assert "test_cli_app.py" in out


def test_a_ctrl_c_before_anything_was_placed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_named: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("glasshouse.jobs.owner.home.Home.locate", interrupt)
    code, out, _ = glasshouse("status", "--json", capsys=capsys)
    assert code == ExitCode.INTERRUPTED
    assert json.loads(out)["error"]["code"] == "interrupted"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m glasshouse.cli --help | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_an_answer_that_nobody_could_read_is_not_a_good_one(tmp_path: Path) -> None:
    """Told without its countersignatures, the bundle is `incomplete`: exit code 8, and never 0."""
    world = World()
    (tmp_path / "receipt.json").write_bytes(world.run(broker_away=True).data)
    owner = OwnerPublic(signing=world.owner.public, sealing=world.owner_hpke.public)
    (tmp_path / "owner.pub").write_bytes(owner.encode())
    for words in ([], ["--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "glasshouse.cli", "verify", "receipt.json", "--owner", "owner.pub", *words]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.DEVNULL, cwd=tmp_path, check=False)
        os.close(writing)
        assert done.returncode != ExitCode.DONE
