"""What a newcomer meets: a reason for a failure, a table that keeps the state, commands that can be repeated."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from glasshouse.cli import app as cli
from glasshouse.cli.runs import status_command as status
from glasshouse.cli.show.ending import say_ended
from glasshouse.cli.show.output import CommandOutput
from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.define.jobfile import load
from glasshouse.jobs.define.seal_job import script_warnings
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise import control
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.conclusion import conclude
from glasshouse.task.uncollected import Uncollected
from glasshouse.wire.states import Outcome
from simulators.owner_side import OwnersWorld

PRINTED = b"".join(b"line %d\n" % number for number in range(20)) + b"10 %\r20 %\nValueError: \x1b[2Jcanary\n"


def people(monkeypatch: pytest.MonkeyPatch, output: CommandOutput, width: int = 200) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=file, width=width, highlight=False, color_system=None))
    return file


def failed(tmp_path: Path, world: OwnersWorld, **story: object) -> Ended:
    folder = world.settle(tmp_path)
    world.tell(folder, world.run(**story))
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    return Ended(folder=folder, record=folder.load(), seen=Seen.of(folder.events), conclusion=conclusion)


def test_a_failed_run_shows_its_workers_last_words_escaped_and_programs_get_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = OwnersWorld(printed=PRINTED)
    ended = failed(tmp_path, world, outcome=Outcome.FAILED, code=Code.SCRIPT_FAILED)
    output, home = CommandOutput(False), tmp_path / "a home"
    said = people(monkeypatch, output)
    keys = {"sealing": world.owner_hpke, "owner_signing": world.owner.public, "home": home}
    say_ended(output, ended, **keys)  # type: ignore[arg-type]
    text, logs = said.getvalue(), f"glasshouse logs {ended.folder.run_id[:8]} --home '{home}'"
    block = text.partition("The worker's last lines:\n")[2].splitlines()
    assert block == [
        *(f"  line {n}" for n in range(14, 20)),
        "  20 %",
        "  ValueError: \\u001b[2Jcanary",
        f"  all of it: {logs}",
    ]
    assert f"glasshouse verify {ended.folder.run_id[:8]} --home '{home}'" in text
    say_ended(CommandOutput(True), ended, **keys)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert json.loads(out)["log_hint"] == logs
    assert "canary" not in out


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (b"glasshouse runtime: platform-unsupported\ntoo little room: --shm-size\n", "too little room: --shm-size"),
        (b"x" * 300_000 + b"\nglasshouse runtime: platform-unsupported\n\x1b[2Jgone\nand more\n", "\\u001b[2Jgone"),
        (b"glasshouse runtime: platform-unsupported\n" + b"y" * 5000, "y" * 999 + "…"),
        (b"glasshouse runtime: platform-unsupported\n", None),
        (b"glasshouse runtime: disk-full\nmake room\n", None),
        (b"", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("code", [Code.PLATFORM, Code.HARDWARE_UNAVAILABLE], ids=str)
def test_why_a_machine_cannot_run_a_job_is_shown_escaped_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: bytes | None, said: str | None, code: Code
) -> None:
    world = OwnersWorld()
    ended = failed(tmp_path, world, outcome=Outcome.FAILED, code=code)
    if log is not None:
        ended.folder.runtime_log.write_bytes(log.replace(b"platform-unsupported", code.value.encode()))
    output = CommandOutput(False)
    printed = people(monkeypatch, output)
    say_ended(output, ended, sealing=None)
    lines = [line.split("  ", 1) for line in printed.getvalue().splitlines() if "  " in line]
    facts = {name: value.strip() for name, value in lines}
    assert facts.get("reason") == said
    assert facts["next"] == f"see the runtime's own log: {ended.folder.runtime_log}"


def test_a_run_that_ended_otherwise_shows_nothing_of_the_runtimes_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = OwnersWorld()
    ended = failed(tmp_path, world, outcome=Outcome.FAILED, code=Code.SCRIPT_FAILED)
    ended.folder.runtime_log.write_bytes(b"glasshouse runtime: script-failed\nyou were robbed\n")
    output = CommandOutput(False)
    printed = people(monkeypatch, output)
    say_ended(output, ended, sealing=None)
    assert "robbed" not in printed.getvalue()


@pytest.mark.parametrize("segments", [1, 0])
def test_a_log_is_proposed_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segments: int) -> None:
    """A run that was refused has none, for its script never began."""
    ended = failed(tmp_path, OwnersWorld(), outcome=Outcome.REFUSED, code=Code.HARDWARE_TCB)
    verdict = ended.conclusion.verified
    assert verdict is not None
    chain = replace(verdict.chain, receipt=replace(verdict.chain.receipt, segments=segments))
    ended = replace(ended, conclusion=replace(ended.conclusion, verified=replace(verdict, chain=chain)))
    output = CommandOutput(False)
    said = people(monkeypatch, output)
    say_ended(output, ended, sealing=None)
    assert ("glasshouse logs" in said.getvalue(), "glasshouse verify" in said.getvalue()) == (segments > 0, True)


def test_a_completed_run_needs_no_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = OwnersWorld(printed=PRINTED)
    ended = failed(tmp_path, world)
    output = CommandOutput(False)
    said = people(monkeypatch, output)
    say_ended(output, ended, sealing=world.owner_hpke, owner_signing=world.owner.public)
    assert "last lines" not in said.getvalue()
    say_ended(CommandOutput(True), ended, sealing=world.owner_hpke, owner_signing=world.owner.public)
    assert json.loads(capsys.readouterr().out)["log_hint"] is None


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_the_table_of_runs_never_cuts_how_a_run_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    progress = {"unit": "step", "done": 18000, "total": 600000, "elapsed_us": 1, "loss": "0.123456"}
    record = folder.end(outcome="failed", code="hardening-missing", verdict="not-completed", progress=progress)
    folder.save(record)
    folder.update(name="a job with a name that is as long as a name may be, which is quite a lot")
    output = CommandOutput(False)
    said = people(monkeypatch, output, width)
    status._table(output, control.looks(world.home))
    header, row = said.getvalue().splitlines()
    assert "failed (hardening-missing)" in row
    assert folder.run_id[:8] in row
    assert header.split()[:1] == ["run"]
    assert max(map(len, (header, row))) <= width
    assert ("18000/600000 steps" in row) == (width >= 80)


@pytest.mark.parametrize("group", ["identity", "broker", "bench"])
def test_a_group_alone_prints_its_help_and_no_empty_error(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([group]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert "Usage" in said.out
    assert "error" not in said.err


def verified(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(["verify", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_verify_compares_the_outputs_of_a_run_and_says_when_it_could_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    home = ("--home", str(world.home.path))
    code, out, _ = verified("latest", *home, capsys=capsys)
    assert code == 0
    assert "outputs: 3 of 3 match" in out
    alone = tmp_path / "receipt.json"
    alone.write_bytes(folder.receipt.read_bytes())
    code, out, _ = verified(str(alone), *home, capsys=capsys)
    assert code == 0
    assert "outputs: not looked at" in out
    assert "the sealed log segments (1), the sealed outputs (3)." in out
    sealed = folder.out / "outputs" / "0001.sealed"
    data = sealed.read_bytes()
    sealed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for what in ("latest", str(folder.receipt)):
        code, _, err = verified(what, *home, capsys=capsys)
        assert code == ExitCode.VERIFICATION_FAILED
        assert "[output-tampered]" in err
    for path in (folder.out / "outputs").iterdir():
        path.unlink()
    code, _, err = verified("latest", *home, capsys=capsys)
    assert code == ExitCode.VERIFICATION_FAILED
    assert "there is no such file" in err


def test_verify_names_the_file_and_says_first_what_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    home = ("--home", str(world.home.path))
    photo = tmp_path / "photo.png"
    photo.write_bytes(b"\x89PNG")
    code, _, err = verified(str(photo), *home, capsys=capsys)
    assert code == ExitCode.VERIFICATION_FAILED
    assert err.startswith(f"error: {photo} is not a Glasshouse receipt, artifact, log or package: ")
    damaged = json.loads(folder.receipt.read_bytes())
    signature = damaged["receipt"]["signatures"][0]
    signature["sig"] = ("A" if signature["sig"][0] != "A" else "B") + signature["sig"][1:]
    folder.receipt.write_text(json.dumps(damaged, separators=(",", ":"), sort_keys=True))
    code, _, err = verified(str(folder.receipt), *home, capsys=capsys)
    assert code == ExitCode.VERIFICATION_FAILED
    assert err.startswith(f"error: NOT authentic: the receipt {folder.receipt}: ")


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


def test_sealing_warns_of_pickles_before_a_machine_is_paid_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.save({}, 'model.pt')\n")
    job, home = tmp_path / "job.toml", ("--home", str(tmp_path / "home"))
    job.write_text(JOB)
    assert cli.run(["init", *home]) == 0
    capsys.readouterr()
    assert cli.run(["seal", str(job), "-o", str(tmp_path / "one.sealed"), *home]) == 0
    said = capsys.readouterr()
    assert "note: train.py line 2: torch.save writes a pickle" in said.err
    job.write_text(JOB.replace("[policy]", "allow_pickle = true\n[policy]"))
    assert cli.run(["seal", str(job), "-o", str(tmp_path / "two.sealed"), *home]) == 0
    assert "pickle" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "warned"),
    [
        ("import torch\noutputs = model(x)\n", True),  # the name of a variable is no folder
        ("open('outputs/a', 'w')\n", False),
        ("import os\nopen(f'{os.environ[\"GLASSHOUSE_OUTPUTS\"]}/a', 'w')\n", False),
        ("from glasshouse.task import current\n", False),
        ("def\n", True),
    ],
)
def test_sealing_warns_where_nothing_mentions_an_output_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, warned: bool
) -> None:
    (tmp_path / "train.py").write_text(script)
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    warnings = script_warnings(load(job))
    assert [line for line in warnings if "mentions an output folder (outputs/)" in line] == warnings
    assert bool(warnings) is warned
    job.write_text(JOB.replace("[policy]", 'arguments = ["--out", "outputs"]\n[policy]'))
    assert script_warnings(load(job)) == []


def test_work_that_was_lost_is_named_to_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = Uncollected(files=30, bytes=5_000_000, named=tuple(f"checkpoints/\x1b[2J{n}" for n in range(20)))
    world = OwnersWorld(printed=f"at work\n{lost.line()}\n".encode())
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    record = replace(folder.load(), workload="script")
    ended = Ended(folder=folder, record=record, seen=Seen.of(folder.events), conclusion=conclusion)
    keys = {"sealing": world.owner_hpke, "owner_signing": world.owner.public}
    output = CommandOutput(False)
    said = people(monkeypatch, output)
    say_ended(output, ended, **keys)  # type: ignore[arg-type]
    text = said.getvalue()
    assert "30 files, 5.0 MB, written outside of the job's output folders" in text
    assert "checkpoints/\\u001b[2J7\n" in text
    assert "and 22 more" in text
    assert 'outputs = ["outputs/", "checkpoints/"]' in text
    say_ended(CommandOutput(True), ended, **keys)  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)["uncollected"]
    assert found == {"files": 30, "bytes": 5_000_000, "named": list(lost.named), "links": []}
    # Without the owner's key nothing of it can be said: the names are in the sealed log alone.
    say_ended(CommandOutput(True), ended, sealing=None)
    assert json.loads(capsys.readouterr().out)["uncollected"] is None


def test_a_link_among_the_outputs_is_named_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Uncollected(files=0, bytes=0, named=(), links=("outputs/best\x1b[2J", "outputs/last"))
    world = OwnersWorld(printed=f"at work\n{lost.line()}\n".encode())
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    record = replace(folder.load(), workload="script")
    ended = Ended(folder=folder, record=record, seen=Seen.of(folder.events), conclusion=conclusion)
    output = CommandOutput(False)
    said = people(monkeypatch, output)
    say_ended(output, ended, sealing=world.owner_hpke, owner_signing=world.owner.public)
    assert "not sent back, only files are: outputs/best\\u001b[2J, outputs/last" in said.getvalue()
    assert "LOST" not in said.getvalue()


@pytest.fixture
def ended(tmp_path: Path) -> tuple[OwnersWorld, RunFolder]:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    return world, folder


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("events.log", "log-invalid"),
        ("heads.log", "log-invalid"),
        ("log/0000.sealed", "output-tampered"),
        ("outputs/0001.sealed", "output-tampered"),
    ],
)
@pytest.mark.parametrize("instead", ["nothing", "a link", "a folder", "a pipe"])
def test_of_a_run_everything_must_be_there_and_be_a_file(
    ended: tuple[OwnersWorld, RunFolder], name: str, code: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world, folder = ended
    path = folder.out / name
    kept = path.rename(path.with_name("kept"))
    match instead:
        case "a link":
            path.symlink_to(kept)
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
    for what in ("latest", str(folder.out), str(folder.path)):
        exit_code, _, err = verified(what, "--home", str(world.home.path), capsys=capsys)
        assert (exit_code, f"[{code}]" in err) == (ExitCode.VERIFICATION_FAILED, True)
        assert name in err


def test_a_log_segment_that_was_exchanged_is_noticed(
    ended: tuple[OwnersWorld, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    world, folder = ended
    home = ("--home", str(world.home.path))
    code, out, _ = verified("latest", *home, "--json", capsys=capsys)
    found = json.loads(out)
    assert (code, found["segments_match"], found["outputs_match"], found["not_looked_at"]) == (0, 1, 3, [])
    assert found["heads"] > 1
    segment = folder.out / "log" / "0000.sealed"
    data = segment.read_bytes()
    segment.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, _, err = verified("latest", *home, capsys=capsys)
    assert (code, "[output-tampered]" in err) == (ExitCode.VERIFICATION_FAILED, True)
