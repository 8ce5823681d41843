"""Agent and sentinel are killed in the same breath, at many moments of a run: the worker and all of its ends too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from glasshouse.broker.process import BrokerProcess
from glasshouse.jobs.leftover import survivors
from tools.runtime_world import AgentProcess, Broken, script_world

# A script that wants to stay when its keepers are gone.
STAYS = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
assert [libc.prctl(1, wanted, 0, 0, 0) for wanted in (0, 1, 17, 65)] == [-1] * 4
libc.prctl(1, signal.SIGTERM, 0, 0, 0)
libc.prctl(36, 1, 0, 0, 0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
time.sleep(60)
"""
MOMENTS = [0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, "hardened", "attested", "opened", "running", "running"]


def kill_keepers(agent: AgentProcess) -> list[int]:
    """Kill sentinel, custodian and agent, and nothing else; return what of the run's processes was there before."""
    before = survivors(agent.world.folder / f"empty-{len(agent.world.agents) - 1}", patience_s=0) or []
    keepers = [pid for pid, command in agent.children().items() if b"glasshouse.runtime\0" in command]
    for pid in [*keepers, agent.process.pid]:
        with contextlib.suppress(ProcessLookupError):  # gone with the keeper killed before it
            os.kill(pid, signal.SIGKILL)
    agent.process.wait()
    return before


@pytest.mark.parametrize("first", range(0, len(MOMENTS), 4))
def test_no_worker_survives_its_keepers(tmp_path: Path, broker: BrokerProcess, first: int) -> None:
    with script_world(tmp_path, STAYS, broker=broker, broken=Broken(budget=8)) as world:
        for number, moment in enumerate(MOMENTS[first : first + 4]):
            agent = world.start()
            if isinstance(moment, str):
                agent.wait_for_state(moment)
            else:
                time.sleep(moment)
            before = kill_keepers(agent)
            assert before, "something ran"
            assert survivors(world.folder / f"empty-{number}", patience_s=15) == [], moment
