"""Real workers with a schedule: they end with it, and record what they did.

That two of them keep out of each other's slots is shown by `test_measurement_real_sessions.py`.
"""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.errors import ExitCode
from glasshouse.task.handle import RECORD
from glasshouse.workloads.registry import canonical
from glasshouse_bench.records import Record, parse
from tools.raw_arm import RawArm
from tools.runtime_world import ended, script_world, workload_world
from tools.waiting import wait_for

MLP = {"synthetic_rows": 256, "width": 16, "depth": 1, "deterministic": True, "device": "cpu"}
# A busy machine takes its time: the next schedule ends later.
PATIENCE_S = (10, 20, 50)
# Asks whether it should stop; the other one has to be interrupted.
ASKS = """
import time
from glasshouse.task import current
task, done = current(), 0
task.progress(0)
while not task.should_stop():
    time.sleep(0.002)
    done += 1
    task.progress(done, loss=1 / done)
task.progress(done, done)
"""
DOES_NOT_ASK = """
import itertools, threading, time
from glasshouse.task import current
task = current()
threading.Thread(target=lambda: [task.progress(number) for number in range(50)]).start() if {threads} else None
for done in itertools.count():
    time.sleep(0.002)
    task.progress(done)
"""

KNOWS_NOTHING = """
import time, torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
while True:
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)
"""


def schedule(arm: str, *, end_ns: int, seed: str = "00" * 32, **changed: Any) -> dict[str, Any]:
    plain = {"slot_ns": 40_000_000, "steps": 3, "uncounted": 1, "warmup_steps": 4}
    return plain | {"arm": arm, "end_ns": str(end_ns), "seed": seed} | changed


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@pytest.fixture
def stack(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield stack


def raw_arm(
    stack: ExitStack, folder: Path, kind: str, params: dict[str, Any], files: dict[str, bytes] | None = None
) -> RawArm:
    folder.mkdir()
    arm = RawArm(kind, canonical(kind, params), files or {}, folder)
    stack.callback(arm.close)
    return arm


def record_of(arm: RawArm) -> Record:
    assert arm.wait() == 0, arm.said()
    return parse((arm.folder / "out" / RECORD).read_bytes())


def test_a_script_is_ended_with_its_schedule_whether_it_asks_or_not(
    tmp_path: Path, broker: BrokerProcess, stack: ExitStack
) -> None:
    files = {"train.py": DOES_NOT_ASK.format(threads=False).encode()}
    for seconds in PATIENCE_S:
        slots = {arm: schedule(arm, end_ns=now_ns() + seconds // 2 * 10**9) for arm in "RP"}
        here = tmp_path / str(seconds)
        here.mkdir()
        params = {"script": "train.py", "slots": slots["R"]}
        deaf = raw_arm(stack, here / "deaf", "script", params, files)
        world = stack.enter_context(script_world(here, ASKS, broker=broker, slots=slots["P"]))
        agent = world.start()
        receipt = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None).chain.receipt
        protected, raw = parse(agent.outputs()[RECORD]), record_of(deaf)
        if min(len(one.losses) for one in (protected, raw)) > 4:
            break
    assert (protected.reason, raw.reason) == ("end", "end")
    assert receipt.work is not None
    assert receipt.work.stop_reason == "time"
    # The count of the end, reported once more, was no step.
    assert receipt.work.done == len(protected.losses) > 4
    assert deaf.one("finished")["work"]["stop_reason"] == "time"


def test_a_script_that_knows_nothing_of_glasshouse_is_measured_by_its_optimizers_steps(
    tmp_path: Path, stack: ExitStack
) -> None:
    pytest.importorskip("torch")
    for seconds in PATIENCE_S:
        params = {"script": "train.py", "slots": schedule("A", end_ns=now_ns() + seconds * 10**9)}
        arm = raw_arm(stack, tmp_path / str(seconds), "script", params, {"train.py": KNOWS_NOTHING.encode()})
        record = record_of(arm)
        if len(record.losses) > 4:
            break
    assert record.reason == "end"
    work = arm.one("finished")["work"]
    # The end of the first step is where the first that is measured begins.
    assert (work["stop_reason"], work["done"]) == ("time", 1 + len(record.losses))


def test_a_worker_alone_takes_every_slot_until_its_own_target(tmp_path: Path, stack: ExitStack) -> None:
    slots = schedule("A", end_ns=now_ns() + 3600 * 10**9, slot_ns=10**6, steps=64)
    arm = raw_arm(stack, tmp_path / "raw", "mlp", {**MLP, "epochs": 40, "slots": slots})
    record = record_of(arm)
    assert (record.reason, len(record.losses)) == ("stopped", 40)
    # No slot is another's, so nothing is waited for: between two slots lies the text of one loss.
    assert np.median(record.steps.begin[1:] - record.steps.end[:-1]) < 5_000_000
    assert arm.one("finished")["work"]["stop_reason"] == "steps"


def test_what_another_thread_reports_is_no_step(tmp_path: Path, stack: ExitStack) -> None:
    # The thread that reports first is the one that trains: here, the other one.
    params = {"script": "train.py", "slots": schedule("A", end_ns=now_ns() + 3600 * 10**9)}
    files = {"train.py": DOES_NOT_ASK.format(threads=True).encode()}
    arm = raw_arm(stack, tmp_path / "raw", "script", params, files)
    wait_for(lambda: (arm.folder / "events").exists() and [one for one in arm.events() if one["type"] == "progress"])
    arm.process.send_signal(signal.SIGTERM)
    record = record_of(arm)
    assert record.reason == "stopped"
    assert len(record.losses) <= 49


def test_the_record_of_a_job_that_fails_comes_back_too(tmp_path: Path, stack: ExitStack) -> None:
    script = b"""
from glasshouse.task import current
for done in range(20):
    current().progress(done, loss=float("nan") if done == 12 else 1.0)
raise ValueError("the end")
"""
    slots = schedule("A", end_ns=now_ns() + 3600 * 10**9)
    arm = raw_arm(stack, tmp_path / "raw", "script", {"script": "train.py", "slots": slots}, {"train.py": script})
    assert arm.wait() == 1
    [output] = [event for event in arm.events() if event["type"] == "output"]
    assert output["name"] == RECORD
    record = parse((arm.folder / "out" / RECORD).read_bytes())
    assert (record.reason, len(record.losses), record.losses[11]) == ("stopped", 19, "nonfinite")


def test_a_profiled_job_records_where_its_steps_went(tmp_path: Path, broker: BrokerProcess, stack: ExitStack) -> None:
    slots = schedule("A", end_ns=now_ns() + 3600 * 10**9, slot_ns=10**6, steps=64)
    params = {**MLP, "slots": slots, "epochs": 14, "profile": 5}
    world = stack.enter_context(workload_world(tmp_path, "mlp", params, {}, broker=broker))
    agent = world.start()
    receipt = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None).chain.receipt
    outputs = agent.outputs()
    record = parse(outputs[RECORD])
    assert len(record.losses) == 14
    assert record.profile is not None
    # Four steps of warm-up and three under a cold profiler come first; after those five nothing is profiled.
    assert (record.profile.first, record.profile.steps) == (7, 5)
    assert record.profile.together_ns == int((record.steps.end - record.steps.begin)[7:12].sum())
    assert {"forward", "backward", "optimizer"} <= set(record.profile.phases)
    assert set(record.profile.phases) <= {"forward", "backward", "optimizer", "hooks"}
    # An ordinary run: weights, metrics and the record, in which the profile is.
    assert len(receipt.outputs) == len(outputs) == 3


def test_a_script_names_its_own_phases_and_what_lies_in_another_one_counts_once(
    tmp_path: Path, stack: ExitStack
) -> None:
    script = b"""
import time
import torch
from glasshouse.task import current
task = current()
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.01)
for done in range(30):
    with torch.profiler.record_function("data"):
        with task.open("rows") as rows:
            rows.read()
        time.sleep(0.002)
    time.sleep(0.001)
    (weight * 2).sum().backward()
    optimizer.step()
    task.progress(done)
"""
    slots = schedule("A", end_ns=now_ns() + 3600 * 10**9, slot_ns=10**6, steps=64)
    params = {"script": "train.py", "slots": slots, "profile": 10}
    arm = raw_arm(stack, tmp_path / "raw", "script", params, {"train.py": script, "rows": b"x" * 1000})
    record = record_of(arm)
    assert record.profile is not None
    phases = dict(record.profile.phases)
    phases.pop("hooks", None)  # a report, if one fell due
    assert list(phases) == ["data", "optimizer"]
    assert phases["data"] >= 10 * 2_000_000
    assert sum(record.profile.phases.values()) <= record.profile.together_ns - 10 * 1_000_000, "the rest is no phase"


def test_a_script_without_pytorch_has_no_phases_and_imports_none(tmp_path: Path, stack: ExitStack) -> None:
    script = b"""
import sys
from glasshouse.task import current
for done in range(20):
    current().progress(done)
    if "torch" in sys.modules:
        raise SystemExit("torch was imported")
"""
    slots = schedule("A", end_ns=now_ns() + 3600 * 10**9, slot_ns=10**6, steps=64)
    params = {"script": "train.py", "slots": slots, "profile": 2}
    record = record_of(raw_arm(stack, tmp_path / "raw", "script", params, {"train.py": script}))
    assert record.profile is not None
    assert not record.profile.phases
