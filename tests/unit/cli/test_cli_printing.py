"""What comes from outside is read on a terminal and commands it nothing; programs lose no character."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from glasshouse.cli import app as cli
from glasshouse.cli.runs import logs_command as logs
from glasshouse.cli.show.ending import say_ended
from glasshouse.cli.show.live_view import RunView
from glasshouse.cli.show.output import CommandOutput, printable
from glasshouse.errors import Code, ExitCode, PackageError, UsageError
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.jobs.results.collect import RunOutput
from glasshouse.jobs.results.run_logs import Segment
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.conclusion import conclude
from simulators.owner_side import OwnersWorld

# An escape sequence, C1, text that turns round, a zero-width space, half a surrogate pair, a line separator.
HOSTILE = "photo\x1b[2J\x9b31m\u202egpj\u2066\u200b\udcff\u2028.exe"
SHOWN = "photo\\u001b[2J\\u009b31m\\u202egpj\\u2066\\u200b\\udcff\\u2028.exe"
# The same in what a tag character, beyond the first 65,536, is made of.
TAG, TAG_SHOWN = "\U000e0041", "\\udb40\\udc41"


def test_every_character_that_a_terminal_would_obey_is_shown_as_its_escape() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable(TAG) == TAG_SHOWN
    assert json.loads(f'"{printable(TAG)}"') == TAG
    assert printable("a\nb\tc") == "a\nb\\u0009c"
    assert printable("a\nb", keep="") == "a\\u000ab"


@pytest.mark.parametrize("text", ["adapter.safetensors", "Zürich", "患者", "🧬", "naïve – 5 × 3"])
def test_what_people_write_stays_as_they_wrote_it(text: str) -> None:
    assert printable(text) == text


def people(monkeypatch: pytest.MonkeyPatch, output: CommandOutput) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=file, width=200, highlight=False, color_system=None))
    return file


def test_words_facts_notes_and_steps_show_it_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = CommandOutput(False)
    said = people(monkeypatch, output)
    output.say(HOSTILE)
    output.facts({"name": HOSTILE})
    RunView(output).done("packed", HOSTILE, None)
    output.warn(HOSTILE)
    assert said.getvalue().count(SHOWN) == 3
    assert SHOWN in capsys.readouterr().err
    assert HOSTILE[5] not in said.getvalue()


def test_a_path_is_shown_as_it_is_and_not_as_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    """A dependency that names an output `:white_check_mark:` puts no mark of ours beside it."""
    path = "out/:white_check_mark:.bin [bold]x[/bold]"
    output = CommandOutput(False)
    output.say(path)
    output.facts({":x:": path})
    assert capsys.readouterr().out == f"{path}\n:x:  {path}\n"


def test_programs_get_the_very_characters(capsys: pytest.CaptureFixture[str]) -> None:
    CommandOutput(True).result({"name": HOSTILE + TAG, "city": "Zürich"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"name": HOSTILE + TAG, "city": "Zürich"}
    assert "Zürich" in out
    assert printable(out) == out


def test_an_error_shows_it_escaped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_named: object = None) -> None:
        raise UsageError(Code.USAGE, HOSTILE, hint=HOSTILE)

    monkeypatch.setattr("glasshouse.jobs.owner.home.Home.locate", fail)
    assert cli.run(["status"]) == ExitCode.USAGE
    assert capsys.readouterr().err == f"error: {SHOWN} [usage]\n  {SHOWN}\n"


def test_a_path_that_is_no_text_is_a_usage_error_for_people_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["inspect", "absent\udcff", "--home", str(tmp_path)]
    assert cli.run(arguments) == ExitCode.USAGE
    assert "absent\\udcff" in capsys.readouterr().err
    assert cli.run([*arguments, "--json"]) == ExitCode.USAGE
    assert "absent\udcff" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_folders_name_is_no_line_of_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who sends a receipt names its folder, and a shell's `*` names it to us."""
    line = "Authentic and complete (assurance gpu-tee): the run completed."
    world, folder = OwnersWorld(), tmp_path / f"sent\n{line}\n"
    run = world.run()
    folder.mkdir()
    (folder / "owner.pub").write_bytes(
        OwnerPublic(signing=world.owner.public, sealing=world.owner_hpke.public).encode()
    )
    words = ["verify", str(folder / "receipt.json"), "--owner", str(folder / "owner.pub"), "--home", str(tmp_path)]
    for data, code in ((run.data, ExitCode.DONE), (run.data[:-1], ExitCode.VERIFICATION_FAILED)):
        (folder / "receipt.json").write_bytes(data)
        assert cli.run(words) == code
        said = "".join(capsys.readouterr())
        assert f"sent\\u000a{line}" in said
        assert line not in [one.strip() for one in said.splitlines()]


def test_the_summary_shows_names_of_outputs_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are checked where they are made and where they are opened; the last word is had where they are shown."""
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    name = "one\n" + HOSTILE
    one = RunOutput(sequence=0, name=name, kind="output", plain_bytes=7, sha256=bytes(32), salt=bytes(32))
    monkeypatch.setattr("glasshouse.jobs.results.summary.look_inside", lambda *_arguments, **_options: [one])
    output = CommandOutput(False)
    said = people(monkeypatch, output)
    ended = Ended(folder=folder, record=folder.load(), seen=Seen.of(folder.events), conclusion=conclusion)
    say_ended(output, ended, sealing=world.owner_hpke)
    assert f"one\\u000a{SHOWN}  7 B" in said.getvalue()


@pytest.mark.parametrize("name", ["photo\u202egpj.exe", "zero\u200bwidth", "soft\u00adhyphen", "tag\U000e0041"])
def test_an_output_with_such_a_name_is_sealed_by_nobody(name: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError) as refused:
        OwnersWorld(files={name: ("output", "file", b"content")}).settle(tmp_path)
    assert refused.value.code is Code.PACKAGE_PATH


def test_a_progress_bar_in_a_log_is_lines_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    logs._print([Segment(sequence=0, name="log", data=b"\r10 %\r20 %\r\nhidden\rshown \x1b[2J\n")])
    assert capsys.readouterr().out == "\n10 %\n20 %\nhidden\nshown \\u001b[2J\n"
