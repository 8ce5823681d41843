"""Agent and sentinel are killed in the same breath, at many moments of a run: the worker and all of its ends too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.verify.conclusion import survivors
from glasshouse.runtime.watchdog.session_record import SessionRecord, members
from tools.machine import CONFINED, needs_filters, needs_namespaces
from tools.runtime_world import AgentProcess, Broken, ended, script_world

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
    before = survivors(agent.world.folder / f"empty-{len(agent.world.agents) - 1}", agent.out, patience_s=0) or []
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
            assert survivors(world.folder / f"empty-{number}", agent.out, patience_s=15) == [], moment


# By a thread: the signal of its parent's end is not this one's.
ANOTHER_PROGRAM = """
import os, sys, threading, time
plain = [sys.executable, "-I", "-S", "-c", "import time; secret = 'plain'; time.sleep(60)"]
if os.fork() == 0:
    os.execv(sys.executable, plain)
threading.Thread(target=os.execv, args=(sys.executable, plain)).start()
time.sleep(60)
"""


@needs_filters
def test_a_worker_that_became_another_program_is_found_where_no_namespace_ends_it(
    tmp_path: Path, broker: BrokerProcess
) -> None:
    with script_world(tmp_path, ANOTHER_PROGRAM, broker=broker, broken=Broken(budget=8)) as world:
        agent = world.start(program=("-c", CONFINED))
        agent.wait_for_state("running")
        worker = SessionRecord.from_line((agent.out / ".worker").read_bytes()).session
        deadline = time.monotonic() + 30
        while not (found := of_another_program(worker)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(found) == 2
        seen = survivors(world.folder / "empty-0", agent.out, patience_s=0)
        assert seen is not None
        assert set(found) <= set(seen)
        keepers = [agent.process.pid, *agent.children()]
        for pid in keepers:
            os.kill(pid, signal.SIGSTOP)  # so that none of them sees another's end
        named = [ProcessName.of(pid) for pid in keepers[1:]]
        for pid in reversed(keepers):
            os.kill(pid, signal.SIGKILL)
        agent.process.wait()
        while any(name.alive for name in named) and time.monotonic() < deadline:
            time.sleep(0.01)  # a killed process is seen until its memory is given back
        try:
            left = [pid for pid in found if ProcessName.of(pid).started]
            assert survivors(world.folder / "empty-0", agent.out, patience_s=0) == left
        finally:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert survivors(world.folder / "empty-0", agent.out, patience_s=15) == []


def of_another_program(session: int) -> list[int]:
    """Return the processes of a session, once there are two and neither has our command line any more."""
    found = sorted(members(session))
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found]
    return found if len(found) == 2 and all(b"secret = 'plain'" in command for command in commands) else []


LARGE = """
import mmap
memory = mmap.mmap(-1, 1 << 30)
for at in range(0, 1 << 30, 4096):
    memory[at] = 1
from glasshouse.task import current
current().progress(1, 2)
import time
time.sleep(60)
"""


@needs_namespaces
def test_a_run_is_not_called_gone_while_the_kernel_still_takes_its_memory_back(
    tmp_path: Path, broker: BrokerProcess
) -> None:
    """A process that ends has no command line from its first moment on, and its memory until its last."""
    with script_world(tmp_path, LARGE, broker=broker) as world:
        agent = world.start()
        agent.wait_for(lambda: any(event["type"] == "progress" for event in agent.events()))
        record = SessionRecord.from_line((agent.out / ".worker").read_bytes())
        init = ProcessName.of(record.session)
        kill_keepers(agent)
        looks = 0
        while init.alive:
            found = survivors(world.folder / "empty-0", agent.out, patience_s=0)
            looks += 1
            assert found or not init.alive
        assert looks
        assert survivors(world.folder / "empty-0", agent.out, patience_s=0) == []


# Of a pipe it would hold the lock for ever: its reader waits where no signal arrives, the last one neither.
HOLDS_ITS_OUTPUT = """
import contextlib, os, socket, threading, time
ends = []
def hold(way, output):
    ends.append(socket.socketpair())
    with contextlib.suppress(OSError):
        way(ends[-1][0].fileno(), output)
for output in (1, 2):
    os.write(output, b"x")
    for way in (lambda end, output: os.splice(end, output, 1), lambda end, output: os.sendfile(output, end, None, 1)):
        threading.Thread(target=hold, args=(way, output), daemon=True).start()
time.sleep(60)
"""


def test_a_script_that_holds_its_output_neither_stops_the_agent_nor_survives_it(
    tmp_path: Path, broker: BrokerProcess
) -> None:
    with script_world(tmp_path, HOLDS_ITS_OUTPUT, broker=broker, broken=Broken(budget=2, max_duration_s=4)) as world:
        ended(world.start(), exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DURATION_EXCEEDED)
        agent = world.start()
        agent.wait_for_state("running")
        time.sleep(1.0)
        kill_keepers(agent)
        assert survivors(world.folder / "empty-1", agent.out, patience_s=15) == []
