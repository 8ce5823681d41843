"""Projects of one owner: keys in the user's own data folder, runs beside the data, and neither in a package."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home
from simulators.command_line import Shell

pytestmark = pytest.mark.slow


def project(folder: Path, name: str, data: Path) -> Shell:
    """A folder of a user who names no home."""
    (folder / name).mkdir()
    shell = Shell(folder / name)
    del shell.environment["GLASSHOUSE_HOME"]
    shell.environment["XDG_DATA_HOME"] = str(data)
    path = shell.job("job", "3")
    path.write_text(path.read_text().replace('"train.py" = "train.py"\n"rows.csv" = "rows.csv"', '"." = "."'))
    path.write_text(path.read_text().replace('"." = "."', '"p" = "."').replace('"train.py"', '"p/train.py"'))
    (shell.folder / "train.py").write_text("print(open('p/rows.csv').readline())\n")
    return shell


def test_two_projects_share_an_identity_and_pack_everything_but_keys_and_runs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    one, two = (project(tmp_path, name, data) for name in ("one", "two"))
    made = one.ask("init", "--json").object
    assert made["home"] == str(data / "glasshouse")
    assert not (one.folder / ".glasshouse").exists(), "a project gets its folder with its first run"
    for shell in (one, two):
        first = shell.ask("run", "job.toml", "--json")
        assert (first.code, first.object["left_out"]) == (ExitCode.DONE, [".glasshouse/"]), first.err
        assert Path(first.object["files"]).parent == shell.folder / ".glasshouse" / "runs"
        assert (shell.folder / ".glasshouse" / ".gitignore").read_text() == "*\n"
        sealed = shell.ask("seal", "job.toml", "-o", "p.sealed", "--json").object
        assert (sealed["files"], sealed["left_out"]) == (3, [".glasshouse/"])
        assert len(shell.ask("status", "--json").object["runs"]) == 1, "a project's own, of one home"
        assert shell.ask("verify", "latest").code == ExitCode.DONE
        assert shell.left_running() == []
    again = one.ask("run", "job.toml")
    assert "✓ left out   .glasshouse/" in again.out
    assert len(one.ask("status", "--json").object["runs"]) == 2
    assert one.left_running() == []
    held = {path.name for path in (data / "glasshouse").iterdir()}
    assert {"owner.key", "owner.pub", "keys", "packages", "broker", "projects", ".gitignore"} == held
    assert Embedded(Home(path=data / "glasshouse")).serving is None


def test_a_home_of_an_earlier_version_is_found_refused_as_input_and_moved(tmp_path: Path) -> None:
    shell = project(tmp_path, "old", tmp_path / "data")
    assert shell.ask("init", "--home", ".glasshouse").code == 0
    for command in (("run", "job.toml"), ("init",), ("status",)):
        told = shell.ask(*command)
        assert told.code == ExitCode.USAGE
        assert "where earlier versions kept it" in told.err
        assert "glasshouse identity move" in told.err
    packed = shell.ask("seal", "job.toml", "-o", "p.sealed", "--home", ".glasshouse")
    assert packed.code == ExitCode.USAGE
    assert f"contains a state home with private keys: {shell.folder / '.glasshouse'}" in packed.err
    assert not (shell.folder / "p.sealed").exists()
    moved = shell.ask("identity", "move", "--json")
    assert (moved.code, moved.object["home"]) == (0, str(tmp_path / "data" / "glasshouse"))
    assert shell.ask("identity", "show", "--json").object["fingerprint"] == moved.object["fingerprint"]
    assert shell.ask("run", "job.toml").code == ExitCode.DONE
    # Another project with an identity of its own: it is said, and not taken.
    other = project(tmp_path, "other", tmp_path / "data")
    assert other.ask("init", "--home", ".glasshouse").code == 0
    assert "holds an identity too" in other.ask("status").err
    assert other.ask("identity", "show", "--json").object["fingerprint"] == moved.object["fingerprint"]
    assert "another identity already" in other.ask("identity", "move").err
