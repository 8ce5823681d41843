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

from glasshouse.errors import Code, ExitCode
from tools.runtime_world import AgentProcess, World, ended, script_world

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


class Tracer:
    """A process that traces another."""

    def __init__(self, request: int, pid: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", TRACER, str(request), str(pid)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    world: World = script_world(tmp_path, TRAIN)
    agent = world.start()
    agent.wait_for_state("running")
    yield agent
    world.close()


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
def test_a_debugger_on_the_worker_ends_it_within_a_second(
    agent: AgentProcess, attach: Callable[[int, int], Tracer], request_: int
) -> None:
    worker = agent.worker_pid()
    tracer = attach(request_, worker)
    if tracer.said != "attached":
        return  # the kernel refused, which is as good
    assert gone_within(worker, 1.0)
    agent.wait_for((agent.out / "receipt.json").exists, within_s=8)
    tracer.close()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)


def test_a_debugger_on_the_agent_costs_it_the_worker_and_the_run(
    agent: AgentProcess, attach: Callable[[int, int], Tracer]
) -> None:
    worker = agent.worker_pid()
    tracer = attach(SEIZE, agent.process.pid)
    if tracer.said != "attached":
        return
    assert gone_within(worker, 1.0)
    agent.wait_for((agent.out / "receipt.json").exists, within_s=8)
    tracer.close()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)


def test_an_agent_that_is_held_in_place_is_ended_with_its_worker(
    agent: AgentProcess, attach: Callable[[int, int], Tracer]
) -> None:
    worker = agent.worker_pid()
    tracer = attach(ATTACH, agent.process.pid)
    if tracer.said != "attached":
        return
    assert gone_within(worker, 1.0)
    assert gone_within(agent.process.pid, 10.0)


def test_whoever_ends_the_sentinel_ends_the_run(agent: AgentProcess) -> None:
    worker = agent.worker_pid()
    sentinel = next(pid for pid in agent.children() if pid != worker)
    os.kill(sentinel, signal.SIGKILL)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)


def test_whoever_kills_the_agent_kills_the_worker_and_its_plaintext(agent: AgentProcess) -> None:
    everyone = [*agent.children()]
    agent.kill()
    assert all(gone_within(pid, 2.0) for pid in everyone)
