"""`glasshouse bench overhead`: what it refuses before anything starts, and what it shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from glasshouse.bench.harness.measure import Measured
from glasshouse.bench.harness.plan import Calibration, Plan
from glasshouse.bench.overhead.design import Arm, Mode, Phase
from glasshouse.cli.app import run
from glasshouse.cli.bench_overhead_view import View, print_result
from glasshouse.cli.output import Output
from glasshouse.errors import Code
from glasshouse.jobs.identity import Identity
from glasshouse.jobs.installation import install_command
from simulators.measurement import write
from simulators.simulate import World, make_design, run_session

JOB = """\
workload = "mlp"
[inputs]
"a.csv" = "a.csv"
[policy]
assurance = "software"
profile = "standard"
"""


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which a measurement begins, before it takes its ten minutes."""

    def starts(*_arguments: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("glasshouse.bench.harness.measure.calibrate", starts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "gpt"], "--workload is one of mlp, lora, script"),
        (["--workload", "script"], "name its job file with --job"),
        (["--workload", "mlp", "--mode", "both"], "--mode is one of"),
        (["--workload", "mlp", "--order", "random"], "--order is one of"),
        (["--workload", "mlp", "--device", "tpu"], "--device is one of"),
        (["--workload", "mlp", "--time", "ten"], "--time takes a time"),
        (["--workload", "mlp", "--warmup", "0.5"], "--warmup takes a time"),
        (["--workload", "mlp", "--time", "10m", "--sessions", "3"], "do not go together"),
        (["--workload", "mlp", "--seed", "abcd"], "64 hexadecimal digits"),
        (["--workload", "mlp", "--margin", "much"], "--margin takes a percentage"),
        (["--workload", "mlp", "--margin", "0"], "--margin takes a percentage"),
        (["--workload", "mlp", "--steps", "100"], "--steps is for sequential legs"),
        (["--workload", "mlp", "--sessions", "0"], "--sessions"),
        (["--workload", "mlp", "--model", "config:qwen2-tiny"], "--model goes with --workload lora"),
        (["--workload", "lora", "--model", "gpt2"], "--model goes with --workload lora"),
        (["--workload", "lora", "--job", "job.toml"], "not lora"),
        (["--workload", "mlp", "--job", "none.toml"], "none.toml"),
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
    (tmp_path / "job.toml").write_text(JOB)
    assert run(["bench", "overhead", *arguments, "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_a_folder_that_holds_a_measurement_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "null").mkdir(parents=True)
    assert run(["bench", "overhead", "--workload", "mlp", "-o", "out", "--json"]) == 2
    assert "holds a measurement already" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_measurement_says_what_it_needs_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["bench", "overhead", "--workload", "mlp", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == Code.REQUIREMENT_MISSING
    assert error["hint"] == install_command("bench")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_tells_the_story(terminal: bool) -> None:
    import numpy as np

    from glasshouse.bench.overhead.blocks import replay
    from glasshouse.bench.overhead.slices import Outcome, SessionEnd, Slice

    design = make_design(sessions=1, blocks_per_session=6)
    records = run_session(World(overhead=0.02, noise=0.001), design, 0, np.random.default_rng(5))
    out = io.StringIO()
    with View(Console(file=out, force_terminal=terminal, width=160)) as view:
        view.calibrating()
        found = Calibration(start_s=2.0, step_ns=7e6)
        view.planned(found, Plan(designs={Mode.INTERLEAVED: design}, guard_steps=40, expected_s=100.0))
        view.doing(Mode.INTERLEAVED, 0, "starting the raw arm")
        for record in records:
            if isinstance(record, Slice):
                view.sliced(design, record)
        for block in replay(design, records)[0].blocks:
            view.block(design, block)
        view.sliced(design, next(one for one in reversed(records) if isinstance(one, Slice)))
        view.ended(design, records[-1], "")  # type: ignore[arg-type]
        broken = SessionEnd(
            session=0,
            launched_first=Arm.RAW,
            warmup_blocks=1,
            blocks_started=0,
            outcome=Outcome.FAILED,
            code=Code.NONFINITE_LOSS,
        )
        view.ended(design, broken, "the loss is not a finite number\x1b[2J")
        view.closing()
    said = out.getvalue()
    assert "a step takes 7 ms" in said
    assert design.sha256.hex() in said
    assert "so far +2." in said
    assert "the loss is not a finite number\\u001b[2J [nonfinite-loss]" in said
    assert ("left" in said) is terminal
    assert Phase.MEASURED in said or not terminal


def test_the_result_says_what_a_run_pays_once_and_what_a_stranger_needs_to_check_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measurement, owner = write(tmp_path / "out", phases=0), Identity.generate().public
    measured = Measured(folder=tmp_path / "out", measurement=measurement, report=None, ended=None, took_s=3.0)
    print_result(Output(False), measured, owner=owner)
    said = " ".join(capsys.readouterr().out.split())
    assert "1.12 s (lifecycle 0.22 s, later imports and sandbox 0.90 s)" in said
    assert f"{owner.fingerprint}; a stranger needs this fingerprint from you by another way" in said
