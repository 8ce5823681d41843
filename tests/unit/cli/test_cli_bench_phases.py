"""`glasshouse bench phases`: what it refuses before anything starts, and how it says what was not looked at."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from glasshouse.bench.harness.phases import PhaseRun
from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.phases import analyse_phases
from glasshouse.cli.app import run
from glasshouse.cli.bench_phases import print_phases
from glasshouse.cli.output import Output
from simulators.measurement import phase_slices


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def starts(*_arguments: object, **_words: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("glasshouse.bench.harness.phases_alone.measure_phases", starts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "gpt"], "--workload is one of mlp, lora, script"),
        (["--workload", "script"], "name its job file with --job"),
        (["--workload", "mlp", "--device", "tpu"], "--device is one of"),
        (["--workload", "mlp", "--warmup", "soon"], "--warmup takes a time"),
        (["--workload", "mlp", "--seed", "abcd"], "64 hexadecimal digits"),
        (["--workload", "mlp", "--blocks", "0"], "--blocks"),
        (["--workload", "mlp", "--model", "config:qwen2-tiny"], "--model goes with --workload lora"),
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
    assert run(["bench", "phases", *arguments, "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["phases.jsonl", "statement.json", "interleaved"])
def test_a_folder_that_holds_a_measurement_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / taken).write_text("mine")
    assert run(["bench", "phases", "--workload", "mlp", "-o", "out", "--json"]) == 2
    assert f"({taken})" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [taken]


def shown(**changes: Any) -> str:
    """Return what a person reads of a measurement."""
    device = changes.pop("device", False)
    slices = phase_slices(device=device, blocks=changes.pop("blocks", 4))
    if device:
        slices = [type(one)(**_values(one) | {"wait_ppm": 620_000 if one.stamped else None}) for one in slices]
    plain: dict[str, Any] = {
        "phases": analyse_phases(slices),
        "beside": {Arm.RAW: 0.0, Arm.PROTECTED: 0.0016},
        "hooks": 0.000123,
        "checkpoints": "none-made",
        "ended": None,
    }
    output, text = Output(as_json=False), io.StringIO()
    output._console = Console(file=text, width=140, highlight=False)
    print_phases(output, PhaseRun(**plain | changes))
    return text.getvalue()


def _values(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__ if name != "_"}


def test_people_see_the_parts_of_a_step_in_either_arm_with_their_shares() -> None:
    text = shown()
    [forward] = [line.split() for line in text.splitlines() if line.startswith("forward")]
    assert forward == ["forward", "1,000.0", "µs", "28.3", "%", "1,000.0", "µs", "27.5", "%"]
    assert "residual (no stamp covers it)" in text
    [stamps] = [line for line in text.splitlines() if line.startswith("what the stamps change")]
    assert stamps.count("(+") == 2
    assert "+1.01 % (" in stamps
    assert "0.0123 % of the protected worker's time" in text
    assert "limited by    the host: the work runs on the CPU" in text


def test_what_nobody_looked_at_is_not_shown_as_nothing() -> None:
    text = shown(beside={}, blocks=1)
    assert "none made: this job makes none" in text
    [memory] = [line for line in text.splitlines() if line.startswith("GPU memory")]
    assert memory.split()[2:] == ["no", "GPU", "no", "GPU"]
    [others] = [line for line in text.splitlines() if line.startswith("CPU of its other")]
    assert others.count("not measured") == 2
    assert "one block, no interval" in text
    assert "checkpoint" not in shown(checkpoints="measured").split("limited by")[1]


def test_with_a_gpu_the_bound_is_said_with_the_share_of_waiting() -> None:
    text = shown(device=True)
    assert "the GPU: the host waits for the GPU, 62.0 % of a step" in text
    assert "mJ" in text
