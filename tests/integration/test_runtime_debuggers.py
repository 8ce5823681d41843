"""Somebody attaches a debugger in the middle of a run: the run fails with its own code and still wipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.errors import Code, ExitCode
from glasshouse.runtime.watchdog.watchdog_process import STOPPED_AGENT_S
from tools.runtime_world import AgentProcess, ended, script_world
from tools.sandboxed import children_of

TRAIN = """
import time
for _ in range(600):
    time.sleep(0.05)
"""

# Attaches like a debugger, and then holds on: to one process, without stopping it or ever waiting for it.
TRACER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
request, pid = int(sys.argv[1]), int(sys.argv[2])
result = libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, None)
print(os.strerror(ctypes.get_errno()) if result else "attached", flush=True)
time.sleep(30)
"""
ATTACH, SEIZE = 16, 0x4206
NOTICED_S = 8.0  # a second where there is nothing else to do; this machine may be busy


# A runtime whose disk takes nothing for a while: where the run begins to work, it waits until the test lets it go on.
HELD = """
import runpy
from glasshouse.runtime.run import interrupts
from glasshouse.runtime.keys import outdir
interrupts.SILENT_S = 2.0
write, waited = outdir.OutDir.event, []
def held(self, line):
    write(self, line)
    if b'"running"' in line and not waited:
        waited.append(open({disk!r}, "rb").close())
outdir.OutDir.event = held
runpy.run_module("glasshouse.runtime", run_name="__main__", alter_sys=True)
"""


# A runtime whose look at its sentinel never comes: whether its init counts is then seen to otherwise.
COUNTED = """
import os, runpy
from glasshouse.runtime.worker import sandbox
from glasshouse.runtime.run import interrupts
from glasshouse.runtime.worker import worker_session
interrupts.Heartbeat._look = lambda self: None
told = []
def noted(kind, name):
    real = getattr(kind, name)
    def act(*given, **named):
        told.append(name)
        os.write(2, f"{name} after {told.count('beat')} beats\\n".encode())
        return real(*given, **named)
    setattr(kind, name, act)
noted(sandbox.Worker, "beat")
noted(worker_session.WorkerSession, "give")
runpy.run_module("glasshouse.runtime", run_name="__main__", alter_sys=True)
"""


class Tracer:
    """A process that traces another."""

    def __init__(self, request: int, pid: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", TRACER, str(request), str(pid)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()  # nothing happens to one that has ended, nor the second time
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def agent(tmp_path: Path, broker: BrokerProcess) -> Iterator[AgentProcess]:
    with script_world(tmp_path, TRAIN, broker=broker) as world:
        agent = world.start()
        agent.wait_for_state("running")
        yield agent


@pytest.fixture
def attach() -> Iterator[Callable[[int, int], Tracer]]:
    tracers: list[Tracer] = []

    def start(request: int, pid: int) -> Tracer:
        tracers.append(Tracer(request, pid))
        return tracers[-1]

    yield start
    for tracer in tracers:
        tracer.close()


def gone_within(pid: int, seconds: float) -> bool:
    """Return whether a process ended, or is a zombie, in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("request_", [SEIZE, ATTACH], ids=["seize", "attach"])
def test_a_debugger_on_the_worker_ends_it_and_the_run(
    agent: AgentProcess, attach: Callable[[int, int], Tracer], request_: int
) -> None:
    worker = agent.worker_pid()
    tracer = attach(request_, worker)
    if tracer.said != "attached":
        return  # the kernel refused, which is as good
    assert gone_within(worker, NOTICED_S)
    agent.wait_for((agent.out / "receipt.json").exists)
    tracer.close()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)


def test_a_debugger_on_the_agent_costs_it_the_worker_and_the_run(
    agent: AgentProcess, attach: Callable[[int, int], Tracer]
) -> None:
    worker = agent.worker_pid()
    tracer = attach(SEIZE, agent.process.pid)
    if tracer.said != "attached":
        return
    assert gone_within(worker, NOTICED_S)
    agent.wait_for((agent.out / "receipt.json").exists)
    tracer.close()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)


def test_an_agent_that_is_held_in_place_is_ended_with_its_worker(
    agent: AgentProcess, attach: Callable[[int, int], Tracer]
) -> None:
    worker = agent.worker_pid()
    tracer = attach(ATTACH, agent.process.pid)
    if tracer.said != "attached":
        return
    assert gone_within(worker, 0.8 * STOPPED_AGENT_S)
    assert gone_within(agent.process.pid, 4 * STOPPED_AGENT_S)


def sentinel_of(agent: AgentProcess) -> int:
    worker = agent.worker_pid()
    [sentinel] = [pid for pid in agent.children() if worker not in children_of(pid)]
    return sentinel


def noticed(agent: AgentProcess) -> list[str]:
    return [event["body"]["code"] for event in agent.events() if event["type"] == "notice"]


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_whoever_ends_or_stops_the_sentinel_ends_the_run(agent: AgentProcess, signal_: signal.Signals) -> None:
    worker = agent.worker_pid()
    os.kill(sentinel_of(agent), signal_)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)
    assert gone_within(worker, 0.1)
    assert noticed(agent)[-1:] == ["sentinel-gone"]


@pytest.mark.parametrize("request_", [SEIZE, ATTACH], ids=["seize", "attach"])
def test_a_debugger_on_the_sentinel_ends_the_run(
    agent: AgentProcess, attach: Callable[[int, int], Tracer], request_: int
) -> None:
    tracer = attach(request_, sentinel_of(agent))
    if tracer.said != "attached":
        return
    agent.wait_for((agent.out / "receipt.json").exists)
    tracer.close()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)
    assert noticed(agent)[-1:] == ["sentinel-gone"]


def test_a_worker_that_is_killed_while_the_sentinel_is_stopped_was_not_simply_killed(agent: AgentProcess) -> None:
    worker, sentinel = agent.worker_pid(), sentinel_of(agent)
    os.kill(sentinel, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)


def test_whoever_kills_the_agent_kills_the_worker_and_its_plaintext(agent: AgentProcess) -> None:
    everyone = [*agent.children()]
    agent.kill()
    assert all(gone_within(pid, NOTICED_S) for pid in everyone)


def test_a_runtime_that_waited_long_says_so_when_it_goes_on(tmp_path: Path, broker: BrokerProcess) -> None:
    disk = tmp_path / "disk"
    os.mkfifo(disk)
    with script_world(tmp_path, "import time\ntime.sleep(0.1)\n", broker=broker) as world:
        agent = world.start(program=("-c", HELD.format(disk=str(disk))))
        agent.wait_for_state("running")
        time.sleep(2.5)
        disk.open("wb").close()
        ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
        assert "agent-silent" in noticed(agent)


def test_before_a_worker_is_given_anything_its_init_counts(tmp_path: Path, broker: BrokerProcess) -> None:
    """A worker that holds the runtime from its first moment on would not be ended by an init that waits for a beat."""
    with script_world(tmp_path, "import time\ntime.sleep(0.1)\n", broker=broker) as world:
        agent = world.start(program=("-c", COUNTED))
        assert agent.wait() == 0, agent.stderr.read_text()
        assert "give after 1 beats" in agent.stderr.read_text()
