"""Ended runs leave nothing in the machine's shared memory, however they ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulators.measured import measured
from tools.runtime_world import Broken, script_world

SHARED = Path("/dev/shm")
USES_IT = "open('/dev/shm/mine', 'w').write('plain'); open('/tmp/mine', 'w').write('plain')\n"


def left_by(pid: int) -> list[Path]:
    return [*SHARED.glob(f"glasshouse-ws-{pid}-*"), *SHARED.glob("mine"), *Path("/tmp").glob("mine")]


@pytest.mark.parametrize(
    ("script", "broken"),
    [
        (USES_IT, Broken()),
        (USES_IT + "raise SystemExit(3)", Broken()),
        (USES_IT, Broken(references=(measured("another"),))),
    ],
    ids=["completed", "failed", "refused"],
)
def test_a_run_that_has_ended_left_no_name_in_shared_memory(tmp_path: Path, script: str, broken: Broken) -> None:
    with script_world(tmp_path, script, broken=broken) as world:
        agent = world.start()
        code = agent.wait()
        assert (code == 0) is (script == USES_IT and not broken.references)
        assert left_by(agent.process.pid) == []


def test_an_agent_that_is_killed_while_its_worker_works_leaves_nothing_there(tmp_path: Path) -> None:
    with script_world(tmp_path, USES_IT + "import time; time.sleep(60)") as world:
        agent = world.start()
        agent.wait_for_state("running")
        agent.kill()
        assert left_by(agent.process.pid) == []
