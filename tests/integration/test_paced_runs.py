"""Runs that are measured: both arms stand, run a slice, stand again, and end with the same bytes."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from glasshouse.broker.process import BrokerProcess
from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.verify import verify_bundle
from glasshouse.wire import pacing
from glasshouse.workloads.params import measured
from tools.machine import needs_tracing
from tools.paced import Measurer, RawArm
from tools.runtime_world import AgentProcess, ended, script_world, workload_world
from tools.tracer import Tracer

MLP = measured("mlp", {"synthetic_rows": 256, "width": 16, "depth": 1, "deterministic": True, "device": "cpu"})
SCRIPT = """
import time
from glasshouse.task import current
task, done = current(), 0
task.progress(0)
while not task.should_stop():
    time.sleep(0.002)
    done += 1
    task.progress(done, loss=1 / done)
task.save_bytes("steps.txt", str(done).encode())
"""
# Does what only a worker whose run is paced may do.
UNASKED = """
from glasshouse.task import session
session._installed._channel.send({message})
import time
time.sleep(30)
"""
SLICE = {
    "type": "pace-slice", "done_before": 0, "done_after": 1, "t0_ns": 0, "t1_ns": 1, "guard_steps": 0, "guard_ns": 0,
    "skew_ns": 0, "hooks_ns": 0, "loss_finite": True, "steps": 1, "cpu_ns": 0, "device_bytes": None, "wait_ppm": None,
    "phases": None,
}  # fmt: skip


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def measurer(stack: ExitStack) -> Callable[[], Measurer]:
    def make() -> Measurer:
        made = Measurer()
        stack.callback(made.close)
        return made

    return make


Start = Callable[..., AgentProcess]


@pytest.fixture
def start(tmp_path: Path, broker: BrokerProcess, stack: ExitStack) -> Start:
    """Return what starts a protected run of a script, with a pacing channel if there is one."""

    def start(script: str = SCRIPT, *, channel: Measurer | None, paced: bool = True) -> AgentProcess:
        params = {"paced": True} if paced else {}
        world = stack.enter_context(script_world(tmp_path, script, broker=broker, **params))
        return _start(world, channel)

    return start


def _start(world: Any, channel: Measurer | None) -> AgentProcess:
    if channel is None:
        return world.start()
    agent = world.start(options=["--pace-fd", str(channel.fd)], inherited=[channel.fd])
    channel.given()
    return agent


def notices(agent: AgentProcess) -> list[str]:
    return [event["body"]["code"] for event in agent.events() if event["type"] == "notice"]


@pytest.mark.slow
def test_both_arms_run_the_same_slices_and_end_with_the_same_bytes(
    tmp_path: Path, broker: BrokerProcess, stack: ExitStack, measurer: Callable[[], Measurer]
) -> None:
    raw, protected = measurer(), measurer()
    (tmp_path / "raw").mkdir()
    arm = RawArm("mlp", MLP, {}, tmp_path / "raw", raw)
    stack.callback(arm.close)
    world = stack.enter_context(workload_world(tmp_path, "mlp", MLP, {}, broker=broker))
    agent = _start(world, protected)
    assert (raw.parked(), protected.parked()) == (0, 0)

    until, seen = 0, []
    for guard_ns, stamps in ((0, False), (20_000_000, False), (0, True)):
        until += 400
        pair = [one.slice(until=until, steps=50, guard_ns=guard_ns, stamps=stamps) for one in (raw, protected)]
        for slice_ in pair:
            assert slice_.steps == slice_.done_after - slice_.done_before == 50
            assert slice_.guard_ns >= guard_ns
            assert slice_.t0_ns < slice_.t1_ns
            assert slice_.loss_finite
            assert slice_.device_bytes is None
            assert 0 <= slice_.hooks_ns < slice_.t1_ns - slice_.t0_ns
            assert (slice_.phases is not None) == stamps
            if slice_.phases is not None:
                assert set(slice_.phases) == {"forward", "backward", "optimizer", "residual"}
                assert min(slice_.phases.values()) > 0
        # The guard of 20 ms is over before its steps are: the k-th slices of both arms are the same work.
        assert [slice_.done_before for slice_ in pair] == [until, until]
        seen += pair
        until = pair[0].done_after
    assert [one.guard_steps for one in seen[2:]] == [400, 400, 400, 400]
    for one in (raw, protected):
        one.end(until + 7)

    verdict = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert arm.wait() == 0, arm.said()
    receipt = verdict.chain.receipt
    assert receipt.work is not None
    assert (receipt.work.done, arm.one("finished")["work"]["done"]) == (until + 7, until + 7)
    weights = hashlib.sha256(agent.outputs()["model.safetensors"]).hexdigest()
    assert weights == arm.one("finished")["digests"]["model"]
    # Nobody can take a measurement for a run whose watch never rested, with its log or without.
    assert notices(agent).count("paced") == 1
    assert receipt.work.stop_reason == "paced"
    alone = verify_bundle(agent.receipt(), owner=world.package.owner.public)
    for found in (verdict, alone):
        assert "watch for debuggers rested" in found.sentence
        assert found.to_json()["paced"] is True


def test_what_is_planted_and_what_waits_is_told_apart(start: Start, measurer: Callable[[], Measurer]) -> None:
    channel = measurer()
    agent = start(channel=channel)
    channel.parked()
    short = channel.slice(steps=None, least_ns=60_000_000)
    assert short.t1_ns - short.t0_ns >= 60_000_000
    assert short.steps > 5
    planted = channel.slice(steps=5, burn_ns=20_000_000)
    assert planted.t1_ns - planted.t0_ns >= 5 * 20_000_000
    parked_s = 1.5
    time.sleep(parked_s)
    after = channel.slice(steps=5)
    assert after.guard_steps == 0
    channel.end(after.done_after)
    receipt = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None).chain.receipt
    assert agent.outputs() == {"steps.txt": str(after.done_after).encode()}
    work = receipt.work
    assert work is not None
    running_us = sum(one.t1_ns - one.t0_ns for one in (short, planted, after)) / 1000
    assert running_us <= work.elapsed_us < running_us + parked_s * 1e6, "time in which it stood does not count"


@needs_tracing
def test_a_debugger_that_comes_while_a_run_rests_is_noticed_before_it_goes_on(
    start: Start, measurer: Callable[[], Measurer]
) -> None:
    channel = measurer()
    agent = start(channel=channel)
    channel.parked()
    tracer = Tracer(agent.worker_pid(), stopping=False)
    time.sleep(1.0)  # more than two looks, were it not resting
    assert agent.process.poll() is None
    channel.ours.send(pacing.encode(channel.order(steps=1)))
    assert channel.hung_up(), "the worker did not go on"
    agent.wait_for((agent.out / "receipt.json").exists)
    tracer.close()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)
    assert {"paced", "worker-traced"} <= set(notices(agent))


@needs_tracing
def test_a_debugger_that_comes_after_a_rest_is_noticed_as_ever(start: Start, measurer: Callable[[], Measurer]) -> None:
    channel = measurer()
    agent = start(channel=channel)
    channel.parked()
    channel.slice(steps=1)
    channel.ours.send(pacing.encode(channel.order(steps=None, least_ns=60 * 10**9)))
    tracer = Tracer(agent.worker_pid(), stopping=False)
    agent.wait_for((agent.out / "receipt.json").exists)
    tracer.close()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)


@pytest.mark.parametrize("standing", [True, False], ids=["standing", "running"])
def test_a_measurer_that_goes_away_interrupts_the_run(
    start: Start, measurer: Callable[[], Measurer], standing: bool
) -> None:
    channel = measurer()
    agent = start(channel=channel)
    channel.parked()
    channel.slice(steps=3)
    if not standing:
        channel.ours.send(pacing.encode(channel.order(steps=None, least_ns=60 * 10**9)))
    channel.close()
    ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
    assert set(agent.outputs()) == {"steps.txt"}, "what there is was saved"


def test_a_run_that_rests_can_be_stopped(start: Start, measurer: Callable[[], Measurer]) -> None:
    channel = measurer()
    agent = start(channel=channel)
    channel.parked()
    channel.slice(steps=3)
    agent.process.send_signal(signal.SIGTERM)
    assert channel.hung_up()
    ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
    assert agent.outputs() == {"steps.txt": b"3"}


WORDS = {
    "unknown": (b'{"type":"pace-faster"}', Code.SCHEMA),
    "another member": (b'{"surprise":1,"type":"pace-end","until":1}', Code.SCHEMA),
    "a number out of its limits": (b'{"type":"pace-end","until":-1}', Code.SCHEMA),
    "not canonical": (b'{"until":1,"type":"pace-end"}', Code.NOT_CANONICAL),
    "not JSON": (b"stop", Code.SCHEMA),
    "too long": (b'{"type":"pace-end","until":' + b"1" * pacing.MAX_BYTES + b"}", Code.TOO_LARGE),
}


@pytest.mark.parametrize("words", WORDS)
def test_an_order_that_is_none_ends_the_run(start: Start, measurer: Callable[[], Measurer], words: str) -> None:
    channel = measurer()
    agent = start(channel=channel)
    channel.parked()
    sent, code = WORDS[words]
    channel.ours.send(sent)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=code)


def test_an_order_out_of_turn_ends_the_run(start: Start, measurer: Callable[[], Measurer]) -> None:
    channel = measurer()
    agent = start(channel=channel)
    channel.parked()
    for _ in range(2):
        channel.ours.send(pacing.encode(channel.order(steps=None, least_ns=60 * 10**9)))
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.SCHEMA)


def test_an_order_to_a_job_that_its_owner_did_not_let_be_paced_ends_the_run(
    start: Start, measurer: Callable[[], Measurer]
) -> None:
    channel = measurer()
    agent = start(channel=channel, paced=False)
    agent.wait_for(lambda: [event for event in agent.events() if event["type"] == "progress"])
    channel.ours.send(pacing.encode(channel.order()))
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.SCHEMA)
    assert "paced" not in notices(agent)


def test_a_paced_job_that_nobody_measures_does_not_run(start: Start) -> None:
    agent = start(channel=None)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.WORKER_FAILED)
    assert "paced" not in notices(agent)
    assert "until it is measured" in agent.log(), "its owner can read why"


@pytest.mark.parametrize("offered", [True, False], ids=["with a channel", "without one"])
def test_a_worker_that_reports_a_slice_unasked_ends_the_run(
    start: Start, measurer: Callable[[], Measurer], offered: bool
) -> None:
    channel = measurer() if offered else None
    agent = start(UNASKED.format(message=SLICE), channel=channel, paced=False)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.WORKER_FAILED)
    assert "paced" not in notices(agent)


def test_a_worker_that_reports_more_than_numbers_ends_the_run(start: Start, measurer: Callable[[], Measurer]) -> None:
    channel = measurer()
    loud = {"type": "pace-parked", "done": 0, "patient": "Jane Doe"}
    agent = start(UNASKED.format(message=loud), channel=channel, paced=False)
    assert channel.hung_up(), "nothing was relayed"
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.WORKER_FAILED)


def test_only_the_agent_holds_the_channel(start: Start, measurer: Callable[[], Measurer]) -> None:
    channel = measurer()
    inode = f"socket:[{Path(f'/proc/self/fd/{channel.fd}').stat().st_ino}]"
    agent = start(channel=channel)
    channel.parked()
    holders = []
    for pid in [agent.process.pid, *agent.children()]:
        held = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
        holders += [pid] * (inode in held)
    assert len(agent.children()) >= 2
    assert holders == [agent.process.pid]
    channel.end(0)
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)


def test_a_descriptor_that_is_no_channel_is_refused(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for number in (theirs.fileno(), 999):
            out = tmp_path / f"out-{number}"
            done = subprocess.run(
                [
                    *(sys.executable, "-I", "-m", "glasshouse.runtime", "--package", "none", "--out", str(out)),
                    *("--pace-fd", str(number)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
            assert done.returncode == ExitCode.USAGE
            assert b"usage" in done.stderr


# The raw arm.


@pytest.fixture
def raw_arm(tmp_path: Path, stack: ExitStack) -> Callable[..., RawArm]:
    def make(script: str, channel: Measurer | None, **params: Any) -> RawArm:
        made = RawArm("script", {"script": "train.py", **params}, {"train.py": script.encode()}, tmp_path, channel)
        stack.callback(made.close)
        return made

    return make


@pytest.mark.parametrize("how", ["goes away", "SIGTERM"])
def test_a_raw_worker_that_stands_is_stopped_like_any_other(
    raw_arm: Callable[..., RawArm], measurer: Callable[[], Measurer], how: str
) -> None:
    channel = measurer()
    arm = raw_arm(SCRIPT, channel, paced=True)
    channel.parked()
    channel.slice(steps=3)
    channel.close() if how == "goes away" else arm.process.terminate()
    assert arm.wait() == 0, arm.said()
    assert (arm.folder / "out" / "steps.txt").read_text() == "3"
    assert arm.one("finished")["work"]["stop_reason"] == "stopped"


def test_a_script_that_never_asks_whether_to_stop_is_ended_all_the_same(
    raw_arm: Callable[..., RawArm], measurer: Callable[[], Measurer]
) -> None:
    channel = measurer()
    arm = raw_arm(SCRIPT.replace("while not task.should_stop():", "while True:"), channel, paced=True)
    channel.parked()
    channel.end(channel.slice(steps=3).done_after + 2)
    assert arm.wait() == 0, arm.said()
    assert arm.one("finished")["work"] | {"elapsed_us": 0} == {
        "done": 5, "elapsed_us": 0, "stop_reason": "stopped", "unit": "step",
    }  # fmt: skip


@pytest.mark.parametrize(("offered", "paced"), [(True, False), (False, True)])
def test_a_raw_job_and_its_channel_belong_together(
    raw_arm: Callable[..., RawArm], measurer: Callable[[], Measurer], offered: bool, paced: bool
) -> None:
    arm = raw_arm(SCRIPT, measurer() if offered else None, **({"paced": True} if paced else {}))
    assert arm.wait() == 1
    assert arm.one("failed")["code"] == "job-invalid"
    assert "belong together" in arm.said()


def test_a_raw_worker_takes_no_order_that_is_none(
    raw_arm: Callable[..., RawArm], measurer: Callable[[], Measurer]
) -> None:
    channel = measurer()
    arm = raw_arm(SCRIPT, channel, paced=True)
    channel.parked()
    channel.ours.send(json.dumps({"type": "pace-end", "until": 1, "more": 2}).encode())
    assert arm.wait() == 1
    assert arm.one("failed")["code"] == "not-canonical"
