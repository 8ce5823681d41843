"""Completion, quiet help, packages named after the job, tables that keep what matters, errors that show the value."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from glasshouse.cli import app as cli
from glasshouse.cli.runs import status_command as status
from glasshouse.cli.show.output import CommandOutput
from glasshouse.errors import ExitCode, UsageError
from glasshouse.evidence.events import Event, EventType
from glasshouse.jobs.define.jobfile import parse
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.results.run_logs import Named, refuse_other
from glasshouse.jobs.supervise import control
from glasshouse.tamper.attacks import ATTACKS, GROUP_ATTACKS, HARDWARE, LINES
from glasshouse.wire.states import State
from simulators.owner_side import OwnersWorld

ROOT = Path(__file__).resolve().parents[3]
JOB = """\
workload = "script"
name = "{name}"
[inputs]
"train.py" = "train.py"
[params]
script = "train.py"
[policy]
assurance = "software"
profile = "standard"
"""


def completed(words: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-m", "glasshouse.cli"],
        env=os.environ
        | {"_GLASSHOUSE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.split()


def test_a_shell_completes_commands_options_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSHOUSE_HOME", str(tmp_path / "home"))
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    assert completed("glasshouse se") == ["seal"]
    assert completed("glasshouse seal --for") == ["--force"]
    assert completed(f"glasshouse logs {folder.run_id[:4]}") == [folder.run_id]
    assert completed("glasshouse logs lat") == ["latest"]
    monkeypatch.setenv("GLASSHOUSE_HOME", "/dev/null/none")
    assert completed("glasshouse logs 4") == []


def test_help_says_of_a_flag_that_it_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [["-h"], ["run", "-h"], ["identity", "export", "--help"], ["bench", "overhead", "--help"]]
    for page in pages:
        assert cli.run(page) == ExitCode.DONE
        said = capsys.readouterr().out
        assert "--help" in said
        assert "bool" not in said.lower()
    assert "DIR" in said, "what an option takes is still said"


@pytest.mark.parametrize(
    ("name", "file"),
    [("clinic", "clinic.sealed"), ("../ward 7", "ward-7.sealed"), (".hidden", "hidden.sealed"), ("…", "job.sealed")],
)
def test_a_package_is_named_after_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, file: str
) -> None:
    monkeypatch.setenv("GLASSHOUSE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    home = Home.locate().make()
    Identity.generate().save(private=home.owner_private, public=home.owner_public, passphrase=None)
    (tmp_path / "train.py").write_text("open('outputs/x', 'w')")
    (tmp_path / "job.toml").write_text(JOB.format(name=name))
    assert cli.run(["seal", "job.toml"]) == ExitCode.DONE
    assert (tmp_path / file).stat().st_size
    assert f"into {file}" in capsys.readouterr().out
    assert cli.run(["seal", "job.toml"]) == ExitCode.USAGE, "it does not replace what is there"
    assert "exists already" in capsys.readouterr().err


def test_at_80_columns_a_run_keeps_its_name_and_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    progress = {"unit": "example", "done": 1_234_567, "total": 12_345_678, "elapsed_us": 1, "loss": "0.123456"}
    folder.end(outcome="failed", code="hardening-missing", verdict="not-completed", progress=progress)
    folder.update(name="ward-seven-with-a-long-name", created_us=1_790_000_000_000_000)
    output, said = CommandOutput(False), io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=said, width=80, highlight=False, color_system=None))
    status._table(output, control.looks(world.home))
    header, row = said.getvalue().splitlines()
    assert {"run", "job", "is", "began"} <= set(header.split())
    assert "ward-se" in row
    assert "2026-09-21" in row
    assert max(map(len, (header, row))) <= 80


def test_status_shows_the_newest_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    folder.end(outcome="completed", verdict="good")
    monkeypatch.setenv("GLASSHOUSE_HOME", str(world.home.path))
    for number in range(3):
        other = type(folder)(folder.path.parent / f"{number:032x}")
        other.path.mkdir()
        other.save(folder.load())
        other.update(created_us=number + 1, run_id=other.run_id)
    assert cli.run(["status", "-n", "2", "--json"]) == ExitCode.DONE
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["run_id"] for run in runs] == [folder.run_id, f"{2:032x}"]
    assert cli.run(["status", "-n", "0"]) == ExitCode.USAGE


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('[policy]\nassurance = "soft"\nprofile = "standard"', "'soft'"),
        ('[policy]\nassurance = "software"\nprofile = "standard"\nmax_duration = "soon"', "'soon'"),
        ('[policy]\nassurance = "software"\nprofile = "standard"\nreleases = 0', "not 0"),
        ('[params]\nscript = "train.py"\narguments = "--fast"', "'--fast'"),
        ("[package]\nchunk_bytes = 1000", "1000"),
        ('[package]\nfollow_links = "yes"', "'yes'"),
    ],
)
def test_an_error_in_a_job_file_shows_what_was_there(tmp_path: Path, line: str, value: str) -> None:
    parts = {part.split("]")[0]: part for part in JOB.format(name="x").replace("\n[", "\n\0[").split("\0")}
    parts[line.split("]")[0]] = line + "\n"
    with pytest.raises(UsageError) as refused:
        parse("".join(parts.values()).encode(), folder=tmp_path, default_name="x")
    assert value in refused.value.message


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["run", "job.toml", "--ranks", "many"], "'many'"),
        (["run", "job.toml", "--ranks", "0"], "not 0"),
        (["prune", "--older-than", "soon"], "'soon'"),
        (["bench", "overhead", "--workload", "mlp", "--time", "soon"], "'soon'"),
        (["bench", "overhead", "--workload", "mlp", "--mode", "fast"], "'fast'"),
        (["bench", "overhead", "--workload", "mlp", "--margin", "much"], "'much'"),
        (["status", "-n", "few"], "'few'"),
    ],
)
def test_an_error_in_an_option_shows_what_was_given(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    value: str,
) -> None:
    monkeypatch.setenv("GLASSHOUSE_HOME", str(tmp_path / "home"))
    home = Home.locate().make()
    Identity.generate().save(private=home.owner_private, public=home.owner_public, passphrase=None)
    assert cli.run(arguments) == ExitCode.USAGE
    assert value in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["interleaved", "null", "sequential", "alternating"])
def test_a_time_in_which_no_job_has_room_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    def start(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was started, or a job made")

    monkeypatch.setattr("glasshouse_bench.harness.measure.Stage", start)
    monkeypatch.chdir(tmp_path)
    words = ["bench", "overhead", "--workload", "mlp", "--mode", mode, "--time", "20s", "--device", "cpu"]
    assert cli.run(words) == ExitCode.USAGE
    assert "too short" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_demo_and_the_readme_count_the_attacks_that_there_are() -> None:
    number = str(len(ATTACKS) + len(GROUP_ATTACKS) + len(LINES) + len(HARDWARE))
    for path in ("examples/clinic/demo.sh", "README.md", "src/glasshouse/cli/app.py"):
        assert f"{number} attacks" in (ROOT / path).read_text(), path


def test_a_followed_log_that_its_receipt_does_not_name_is_refused() -> None:
    def segment(digest: str) -> Event:
        return Event(
            sequence=1,
            time_us=1,
            state=State.RUNNING,
            type=EventType.SEGMENT,
            body={"sealed_bytes": 1, "sealed_sha256": digest * 32, "sequence": 0},
        )

    shown, other = segment("aa"), segment("bb")
    refuse_other([shown], Named(events=[shown], vouched=True))
    refuse_other([shown], Named(events=[other], vouched=False))
    for events in ([other], [], [shown, other]):
        with pytest.raises(Exception, match="not the one that the receipt vouches for"):
            refuse_other([shown], Named(events=events, vouched=True))
