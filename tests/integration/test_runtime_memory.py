"""A machine without enough memory: the kernel ends the worker, and the run says why and wipes itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.errors import Code, ExitCode
from tools.runtime_world import ended, script_world

LIMIT_BYTES = 256 << 20

# The first report lets the test put a limit on the process; what it takes then is more than that.
GREEDY = """
import time
from glasshouse import task
task.current().progress(1)
time.sleep(3)
taken = [bytearray(b"x") * (32 << 20) for _ in range(32)]
"""


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """A control group of this test's own, version 1 or 2, where one can be made."""
    name = f"glasshouse-test-{os.getpid()}"
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT_BYTES))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("this machine lets nobody make a memory control group")


def test_a_worker_that_takes_more_memory_than_there_is(tmp_path: Path, memory_limit: Path) -> None:
    world = script_world(tmp_path, GREEDY)
    try:
        agent = world.start(world.launch())
        agent.wait_for(lambda: any(event["type"] == "progress" for event in agent.events()))
        for pid in (agent.process.pid, agent.worker_pid()):
            (memory_limit / "cgroup.procs").write_text(str(pid))
        ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.OUT_OF_MEMORY)
    finally:
        world.close()
