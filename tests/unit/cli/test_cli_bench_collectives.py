"""`glasshouse bench collectives`: what it refuses before anything starts, and what people read of a result."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from glasshouse.bench.collectives.measurement import Measurement
from glasshouse.bench.collectives.plan import EXCHANGE_WAYS, REPLAY_WAYS, TRAIN_WAYS
from glasshouse.bench.collectives.values import Cell, Kind, Way
from glasshouse.cli.app import run
from glasshouse.cli.bench_collectives_view import View, print_result
from glasshouse.cli.output import Output
from simulators.collectives_measured import found, measurement


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "all"], "--parts is one of all-reduce, train, replay, start"),
        (["--ranks", "1"], "--ranks takes numbers from 2 to 16"),
        (["--ranks", "2,many"], "not 'many'"),
        (["--sizes", "25"], "--sizes takes sizes such as 64K or 25M"),
        (["--sizes", "0M"], "--sizes takes numbers"),
        (["--models", "gpt-5"], "--models is one of gpt2-14m"),
        (["--caps", "none"], "--caps takes numbers"),
        (["--dtypes", "int8"], "--dtypes is one of float32"),
        (["--time", "soon"], "--time takes a time"),
        (["--quick", "--time", "60s"], "--quick says by itself"),
        (["--parts", "replay", "--models", "gpt2-14m"], "nothing to measure"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glasshouse.bench.collectives.run.measure", _starts)
    assert run(["bench", "collectives", *arguments, "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_measurement_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("glasshouse.bench.collectives.run.measure", _starts)
    (tmp_path / "collectives.json").write_text("mine")
    assert run(["bench", "collectives", "--quick", "-o", str(tmp_path), "--json"]) == 2
    assert "holds a measurement already" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert (tmp_path / "collectives.json").read_text() == "mine"


def test_a_result_is_written_printed_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("glasshouse.bench.collectives.run.measure", lambda *_all, **_named: measurement())
    monkeypatch.setattr("glasshouse.bench.collectives.report.write", _no_report)
    folder = tmp_path / "out"
    assert run(["bench", "collectives", "-o", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    kept = json.loads((folder / "collectives.json").read_text())
    assert kept["bars"] == printed["bars"]
    assert Measurement.from_json(kept).to_json() == measurement().to_json()
    assert printed["report"] == str(folder / "report.html")


def test_a_missed_bar_fails_the_command_and_a_trial_judges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("glasshouse.bench.collectives.report.write", _no_report)
    one = measurement()
    slow = found(one.found[0].cell, {way: 1.0 + place for place, way in enumerate(one.found[0].samples)})
    bar = found(one.found[2].cell, {way: 1.0 + place for place, way in enumerate(one.found[2].samples)})
    for quick, code in ((False, 4), (True, 0)):
        missed = measurement(found=(slow, bar), quick=quick, start=None)
        monkeypatch.setattr("glasshouse.bench.collectives.run.measure", lambda *_all, _one=missed, **_named: _one)
        assert run(["bench", "collectives", "-o", str(tmp_path / str(quick)), "--json"]) == code
    capsys.readouterr()


def test_people_read_ratios_bars_and_the_paper(tmp_path: Path) -> None:
    text = _shown(measurement(), tmp_path)
    for part in text.split(" ranks. All-reduce")[1:]:
        [line] = [line for line in part.split("\n\n")[0].splitlines() if line.startswith("25\u00a0MiB ")]
        assert "×" in line
    assert "✓" in text
    assert "✗" not in text
    for words in ("8.68×", "arXiv:2501.11771", "Not measured: 1 cells"):
        assert words in text


def test_eighty_columns_hold_every_way_and_every_number(tmp_path: Path) -> None:
    cells = [
        Cell(kind=Kind.ALL_REDUCE, ranks=4, bytes=100 << 20, dtype="bfloat16", ways=EXCHANGE_WAYS),
        Cell(kind=Kind.TRAIN, ranks=4, model="gpt2-14m", cap_mib=250, ways=TRAIN_WAYS),
        Cell(kind=Kind.REPLAY, ranks=4, model="gpt2-medium", dtype="bfloat16", ways=REPLAY_WAYS),
    ]
    one = Measurement(system={}, found=tuple(found(cell, dict.fromkeys(cell.ways, 0.0512)) for cell in cells))
    lines = _shown(one, tmp_path, width=80).splitlines()
    for cell, name in zip(
        cells, ("100\u00a0MiB, bfloat16 ", "gpt2-14m, cap 250\u00a0MiB ", "gpt2-medium, bfloat16 "), strict=True
    ):
        [row] = [number for number, line in enumerate(lines) if line.startswith(name)]
        assert lines[row - 1].split() == [*(way.value for way in Way if way in cell.ways), "rounds"]
        assert "…" not in lines[row]
        assert lines[row].count("×") == len(set(cell.ways) - {Way.RAW, Way.ALONE})


def test_a_busy_machine_is_told_of(tmp_path: Path) -> None:
    cell = measurement().of(Kind.TRAIN)[0].cell
    busy = found(cell, dict.fromkeys(cell.ways, 0.2), foreign_cpu=1.2)
    text = _shown(Measurement(system={}, found=(busy,)), tmp_path)
    assert "Other programs kept up to 1.2 processors busy during 1 of 1 cells" in text


def test_progress_is_seen_where_there_is_no_terminal() -> None:
    text = io.StringIO()
    one = measurement()
    with View(Console(file=text, width=100)) as view:
        view.world(2)
        view.cell(one.found[0].cell, 1, 12)
        view.rounds(5, 1.0)
        view.found(one.found[0])
        view.skipped(one.not_measured[0])
        view.doing("start-up of a group of 8 ranks")
    said = text.getvalue()
    for words in ("starting 2 ranks", "1/12", "9 rounds", "left out, no time left", "start-up"):
        assert words in said


def _shown(one: Measurement, folder: Path, *, width: int = 160) -> str:
    output, text = Output(as_json=False), io.StringIO()
    output._console = Console(file=text, width=width, highlight=False)
    print_result(output, one, folder=folder)
    return text.getvalue()


def _no_report(_measurement: Measurement, folder: Path) -> Path:
    return folder / "report.html"


def _starts(*_arguments: Any, **_words: Any) -> None:
    raise AssertionError("something was started")
