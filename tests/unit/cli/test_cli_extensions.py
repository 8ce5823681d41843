"""What another distribution adds is found by its entry points, and loaded only when it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from glasshouse.cli import app as cli
from glasshouse.errors import Code, ExitCode, UsageError
from glasshouse.jobs.owner import installation as extensions
from glasshouse.jobs.owner.installation import beside
from glasshouse.wire import dsse
from simulators.slot_measurement import OWNER, measured
from simulators.world import World

OWNER_PUB = "owner.pub"
GROUP = typer.Typer(help="Weigh.")


@GROUP.callback()
def _weigh() -> None:
    """Weigh."""


@GROUP.command()
def twice(number: int) -> int:
    """Print twice a number."""
    typer.echo(str(2 * number))
    return 0


def from_distribution(point: EntryPoint, name: str) -> EntryPoint:
    vars(point).update(dist=SimpleNamespace(name=name))
    return point


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    def found(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [one for one in points if one.group == group and name in (None, one.name)]

    monkeypatch.setattr(extensions, "entry_points", found)


def owner_file(folder: Path) -> Path:
    from glasshouse.jobs.owner.owner_identity import OwnerPublic

    path = folder / OWNER_PUB
    path.write_bytes(OwnerPublic(signing=OWNER.public, sealing=World().owner_hpke.public).encode())
    return path


def test_a_group_of_another_distribution_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EntryPoint("weigh", f"{__name__}:GROUP", extensions.COMMANDS))
    assert cli.run(["weigh", "twice", "21"]) == ExitCode.DONE
    assert capsys.readouterr().out == "42\n"
    assert cli.run(["--help"]) == ExitCode.DONE
    assert "weigh" in capsys.readouterr().out


def test_a_command_of_our_own_loads_and_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "entry_points", lambda **_: pytest.fail("looked for entry points"))
    assert cli.run(["schema"]) == ExitCode.DONE


def test_no_distribution_takes_the_name_of_our_command(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("verify", "nowhere:group", extensions.COMMANDS))
    assert cli.run(["verify", "--help"]) == ExitCode.DONE
    assert cli.run(["--help"]) == ExitCode.DONE


def test_what_lacks_a_library_is_left_out_of_the_help_and_says_so_when_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EntryPoint("weigh", "no_such_library:group", extensions.COMMANDS))
    assert cli.run(["--help"]) == ExitCode.DONE
    assert "weigh" not in capsys.readouterr().out
    assert cli.run(["weigh"]) == ExitCode.USAGE
    assert "no_such_library" in capsys.readouterr().err


@pytest.mark.parametrize(
    "code", ["raise RuntimeError('half installed')", "group = 7", "", "import json.nothing", "group = ("]
)
def test_a_broken_distribution_breaks_its_own_command_alone(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half_installed.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "half_installed", raising=False)
    install(monkeypatch, EntryPoint("weigh", "half_installed:group", extensions.COMMANDS))
    assert cli.run(["--help"]) == ExitCode.DONE
    assert cli.run(["schema"]) == ExitCode.DONE
    capsys.readouterr()
    assert cli.run(["weigh", "twice"]) == ExitCode.USAGE
    assert "weigh" in capsys.readouterr().err


def test_what_is_claimed_twice_is_taken_from_neither(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [EntryPoint("weigh", f"{__name__}:GROUP", extensions.COMMANDS) for _ in range(2)]
    install(monkeypatch, from_distribution(both[0], "Scales"), from_distribution(both[1], "other_scales"))
    assert cli.run(["weigh", "twice", "21"]) == ExitCode.USAGE
    assert "claimed by other-scales, scales" in capsys.readouterr().err


def test_a_name_of_ours_is_taken_from_our_distribution_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = EntryPoint("bench", f"{__name__}:GROUP", extensions.COMMANDS)
    install(monkeypatch, from_distribution(taken, "bench-of-another"))
    assert cli.run(["bench", "twice", "21"]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert "glasshouse-train-bench, which is not installed" in said.err
    install(monkeypatch, from_distribution(taken, "Glasshouse_Train.Bench"))
    assert cli.run(["bench", "twice", "21"]) == ExitCode.DONE


def test_without_the_bench_its_command_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert cli.run(["bench", "overhead", "--workload", "mlp"]) == ExitCode.USAGE
    said = "".join(capsys.readouterr().err.split())
    assert "benchneedsglasshouse-train-bench,whichisnotinstalled" in said
    assert beside("bench", "glasshouse-train-bench").replace(" ", "") in said


def test_the_bench_that_is_installed_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--help"]) == ExitCode.DONE
    assert "overhead" in capsys.readouterr().out


def test_a_measurement_is_verified_by_what_the_bench_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = measured(tmp_path / "m", receipts=True, sessions=3, length_ns=800_000_000)
    options = ["--owner", str(owner_file(tmp_path)), "--home", str(tmp_path / "home")]
    assert cli.run(["verify", str(folder), *options, "--json"]) == ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["status"], told["assurance"]) == ("measurement", "good", "software")
    (folder / "interleaved" / "design.json").write_bytes(b"{}")
    assert cli.run(["verify", str(folder / "statement.json"), *options]) == ExitCode.VERIFICATION_FAILED
    assert "NOT authentic" in capsys.readouterr().err


def test_without_the_bench_a_measurement_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    folder = measured(tmp_path / "m", sessions=3, length_ns=800_000_000)
    options = ["--owner", str(owner_file(tmp_path)), "--home", str(tmp_path / "home")]
    assert cli.run(["verify", str(folder), *options]) == ExitCode.USAGE
    assert "glasshouse-train-bench" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text/plain", "application/vnd.glasshouse.measurement+json;x", ""])
def test_a_statement_of_an_unknown_type_is_refused(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m" / "statement.json"
    path.parent.mkdir()
    path.write_bytes(dsse.sign(kind, b"{}", [OWNER]).encode())
    options = ["--owner", str(owner_file(tmp_path)), "--home", str(tmp_path / "home")]
    assert cli.run(["verify", str(path), *options]) != ExitCode.DONE
    assert "unknown type" in capsys.readouterr().err


def test_loading_what_is_not_there_is_the_users_error() -> None:
    with pytest.raises(UsageError) as caught:
        extensions.load(extensions.ARTIFACTS, "nothing")
    assert caught.value.code is Code.REQUIREMENT_MISSING


def test_the_help_of_a_command_loads_nothing_of_the_bench() -> None:
    run = "import sys; from glasshouse.cli.app import run; run(['verify', '--help'])"
    code = f"{run}; print('glasshouse_bench' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.splitlines()[-1] == "False"
