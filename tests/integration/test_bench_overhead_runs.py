"""Measurements of real processes: raw workers and whole protected runs, with settings as small as they may be."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.bench.harness import machine
from glasshouse.bench.harness.engine import Engine, Pieces
from glasshouse.bench.harness.sequential import Legs
from glasshouse.bench.harness.stage import Stage
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.harness.store import Store
from glasshouse.bench.harness.subject import builtin
from glasshouse.bench.overhead.artifact import Part
from glasshouse.bench.overhead.design import Arm, Design, LaunchOrder, Mode, Phase, WarmupRule
from glasshouse.bench.overhead.parity import Same
from glasshouse.bench.overhead.slices import SessionEnd, Slice
from glasshouse.jobs.identity import Identity
from simulators.command_line import Shell
from simulators.paced_arms import Quiet

pytestmark = pytest.mark.slow

# One warm-up block: these tests ask what is measured, and not whether the machine is quiet.
AT_ONCE = WarmupRule(least_ns=0, cap_ns=0)

SCRIPT = """\
from glasshouse import task

job, step, x = task.current(), 0, 1
while not job.should_stop() and step < {steps}:
    for _ in range(20000):
        x = x * 1103515245 + 12345 & 0x7fffffff
    step += 1
    job.progress(step, loss=1 / step)
job.save_bytes("state.safetensors", b"%d after %d" % (x, step))
"""

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
def stage() -> Iterator[Stage]:
    with Stop() as stop, Stage(lambda folder: builtin("mlp", folder), identity=Identity.generate(), stop=stop) as made:
        yield made


def _run(stage: Stage, folder: Path, design: Design) -> tuple[Part, Quiet]:
    watch = Quiet()
    with Stop() as stop:
        store = Store(folder / design.mode.value, design)
        pieces = Pieces(
            design=design,
            store=store,
            arms=stage.arms(design.mode),
            look=lambda: machine.look(None),
            watch=watch,
            stop=stop,
        )
        runs = (Legs if design.mode is Mode.SEQUENTIAL else Engine)(pieces)
        for number in range(design.sessions):
            runs.session(number)
        store.close()
    return Part.load(folder / design.mode.value), watch


def test_two_raw_workers_do_the_same_work_and_leave_a_part_that_replays(stage: Stage, tmp_path: Path) -> None:
    design = Design(mode=Mode.NULL, seed=bytes(32), sessions=1, blocks_per_session=2, slice_steps=5, warmup=AT_ONCE)
    part, watch = _run(stage, tmp_path, design)
    assert watch.reasons == [""]
    assert part.analysis.attempts.completed == 2
    assert part.parity.word is Same.SAME
    slices = [one for one in part.records if isinstance(one, Slice)]
    assert all(one.steps == 5 and one.guard_ns >= design.guard_ns for one in slices)
    assert all(one.parked_cpu_ns is not None and one.steal_ppm is not None for one in slices)
    assert part.lifecycle is None


def test_a_protected_run_does_the_same_work_as_a_raw_one_and_gives_its_receipt(stage: Stage, tmp_path: Path) -> None:
    design = Design(
        mode=Mode.INTERLEAVED, seed=bytes(32), sessions=1, blocks_per_session=2, slice_steps=5, warmup=AT_ONCE
    )
    part, watch = _run(stage, tmp_path, design)
    assert watch.reasons == [""]
    assert part.analysis.attempts.completed == 2
    assert part.parity.word is Same.SAME
    assert part.lifecycle is not None
    assert part.jobs is not None
    note = part.notes[0]
    assert note.protected is not None
    assert note.raw is not None
    assert note.protected.done == note.raw.done
    assert (tmp_path / "interleaved" / "receipts" / "0000.json").is_file()
    hooks = {one.arm: one.hooks_ns for one in part.records if isinstance(one, Slice)}
    assert hooks[Arm.RAW] is None
    assert hooks[Arm.PROTECTED] is not None


def test_legs_are_processes_of_their_own(stage: Stage, tmp_path: Path) -> None:
    design = Design(
        mode=Mode.SEQUENTIAL,
        seed=bytes(32),
        sessions=1,
        blocks_per_session=1,
        slice_steps=None,
        leg_ns=500_000_000,
        guard_steps=0,
        guard_ns=0,
        launch_order=LaunchOrder.PROTECTED_FIRST,
        warmup=AT_ONCE,
    )
    part, watch = _run(stage, tmp_path, design)
    assert watch.reasons == [""]
    measured = [one for one in part.records if isinstance(one, Slice) and one.phase is Phase.MEASURED]
    assert [one.arm for one in measured] == [Arm.PROTECTED, Arm.RAW]
    assert measured[0].first_batch == measured[1].first_batch
    assert part.analysis.sequential is not None
    assert part.analysis.sequential.label.startswith("n=1, no interval")


def _shell(folder: Path, steps: int) -> Shell:
    shell = Shell(folder)
    (folder / "train.py").write_text(SCRIPT.format(steps=steps))
    (folder / "job.toml").write_text(JOB)
    return shell


def test_an_interrupt_keeps_what_is_complete_and_leaves_no_process(tmp_path: Path) -> None:
    shell = _shell(tmp_path, 10**9)
    began = shell.start(
        *("bench", "overhead", "--workload", "script", "--job", "job.toml", "--sessions", "2", "--blocks", "50"),
        *("--warmup", "1s", "-o", "out", "--json"),
    )
    slices = tmp_path / "out" / "interleaved" / "slices.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (slices.exists() and slices.read_bytes().count(b"\n") >= 3):
        assert began.poll() is None
        time.sleep(0.05)
    began.send_signal(signal.SIGINT)
    answer = shell.end(began, timeout_s=60)
    assert answer.code == 130
    assert answer.object["ended_by"] == "interrupted"
    part = Part.load(tmp_path / "out" / "interleaved")
    ends = [one for one in part.records if isinstance(one, SessionEnd)]
    assert [end.code for end in ends] == ["interrupted"]
    assert (tmp_path / "out" / "statement.json").is_file()
    assert (tmp_path / "out" / "report.html").is_file()
    assert not [line for line in shell.left_running() if "glasshouse" in line]
    checked = shell.ask("verify", "out", "--owner", "out/owner.pub", "--json")
    assert checked.code == 8, checked.out  # authentic, and it lacks its null and its receipts


def test_a_script_that_ends_by_itself_is_told_to_its_owner(tmp_path: Path) -> None:
    shell = _shell(tmp_path, 30)
    answer = shell.ask("bench", "overhead", "--workload", "script", "--job", "job.toml", "--time", "10m", "--json")
    assert answer.code == 4
    assert "ended by itself after 30 steps" in answer.error["message"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith("overhead-")]  # noqa: PTH208


def test_a_script_that_fails_says_how(tmp_path: Path) -> None:
    shell = _shell(tmp_path, 10**9)
    (tmp_path / "train.py").write_text("raise SystemExit('no data today')\n")
    answer = shell.ask("bench", "overhead", "--workload", "script", "--job", "job.toml", "--json")
    assert answer.code == 4
    assert answer.error["code"] == "script-failed"
    assert "no data today" in answer.error["message"]
