"""A job that takes all of the memory of its control group ends with its own code; nothing of its keepers is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.errors import Code, ExitCode
from tools.machine import CONFINED, needs_filters
from tools.runtime_world import ended, script_world

V1 = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20
FILL = """
import os
print("first to be killed:", open("/proc/self/oom_score_adj").read().strip())
piece, held = bytes(1 << 20), []
try:
    with open("/dev/shm/filled", "wb") as file:
        while True:
            file.write(piece)
except OSError as error:
    print("full:", error.errno, os.path.getsize("/dev/shm/filled") >> 20, flush=True)
"""
THEN_ALL = "while True: held.append(bytearray(os.urandom(64) * (1 << 14)))\n"


@pytest.fixture
def group() -> Iterator[Path]:
    place = V1 / f"glasshouse-run-{os.getpid()}"
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text(str(1200 * MIB))
    except OSError:
        pytest.skip("this machine lets no control group of version 1 be made")
    yield place
    place.rmdir()


RUN = "import sys; from glasshouse.runtime.__main__ import main; sys.exit(main(sys.argv[1:], sys.stdin.buffer))"
FILL_WORKSPACE = """
piece = bytes(1 << 20)
with open("filled", "wb") as file:
    while True:
        file.write(piece)
"""


def program(group: Path, *, score: int = 0, run: str = RUN) -> list[str]:
    """An agent that joins the group before it does anything, and has a score that it was started with."""
    lines = [
        f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')",
        f"open('/proc/self/oom_score_adj', 'w').write('{score}')",
    ]
    return ["-c", "\n".join([*lines, run])]


def test_a_full_dev_shm_is_the_scripts_error_and_leaves_room_for_its_keepers(
    tmp_path: Path, broker: BrokerProcess, group: Path
) -> None:
    with script_world(tmp_path, FILL, broker=broker) as world:
        agent = world.start(program=program(group))
        ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
        said = agent.log()
    assert "first to be killed: 1000" in said
    size = int(said.split("full: 28 ")[1].split()[0])
    assert 64 <= size <= 600, "half of what the group has left"


def test_memory_that_runs_out_ends_the_worker_with_its_own_code(
    tmp_path: Path, broker: BrokerProcess, group: Path
) -> None:
    with script_world(tmp_path, FILL + THEN_ALL, broker=broker) as world:
        agent = world.start(program=program(group))
        ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.OUT_OF_MEMORY)


@needs_filters
@pytest.mark.parametrize("score", [999, 1000])
def test_an_agent_that_was_started_as_the_first_to_be_ended_outlives_a_worker_that_fills_its_workspace(
    tmp_path: Path, broker: BrokerProcess, group: Path, score: int
) -> None:
    """As in a container of Kubernetes': no mounts, so that a workspace with a name outlives an agent that is killed."""
    with script_world(tmp_path, FILL_WORKSPACE, broker=broker) as world:
        agent = world.start(program=program(group, score=score, run=CONFINED))
        ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.OUT_OF_MEMORY)
    assert list(Path("/dev/shm").glob(f"glasshouse-ws-{agent.process.pid}-*")) == []
