"""Where the worker's files lie in a container: in memory that is large enough, or on a disk by the owner's word."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, ExitCode
from tools.machine import needs_filters, needs_landlock, needs_root
from tools.runtime_world import CANARY, Broken, World, ended

pytestmark = [needs_filters, needs_landlock, needs_root]

CONFINED = Path(__file__).parents[1] / "tools" / "confined.py"
PROGRAM = (str(CONFINED), "SHM=64m", "-m", "glasshouse.runtime")
MIB = 1 << 20

WHERE = """
import os
folder = os.getcwd()
kind, place = "", ""
for line in open("/proc/self/mountinfo"):
    before, _, after = line.partition(" - ")
    at = before.split()[4].rstrip("/") + "/"
    if (folder + "/").startswith(at) and len(at) >= len(place):
        kind, place = after.split()[0], at
print("files lie on", kind, "with", os.path.getsize("patients.csv"), flush=True)
"""


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    if "tmpfs" in {line.split(" - ")[1].split()[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()
                   if line.split()[4] == "/tmp"}:  # fmt: skip
        pytest.skip("this machine's /tmp is a memory file system")
    monkeypatch.setenv("TMPDIR", "/tmp")


@pytest.fixture
def world(script_worlds: Callable[..., World]) -> Callable[..., World]:
    def make(size: int, **options: Any) -> World:
        return script_worlds(WHERE, {"patients.csv": CANARY + os.urandom(size)}, **options)

    return make


def details(agent: Any) -> dict[str, str]:
    return {event["body"]["probe"]: event["body"]["detail"] for event in agent.events() if event["type"] == "probe"}


def test_a_job_that_has_room_in_shared_memory_lies_there(world: Callable[..., World]) -> None:
    agent = world(8 * MIB).start(program=PROGRAM)
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert f"files lie on tmpfs with {8 * MIB + len(CANARY)}" in agent.log()
    assert details(agent)["workspace"] == "was-a-directory"


def test_a_job_that_has_none_is_refused_before_the_key_is_asked_for(world: Callable[..., World]) -> None:
    agent = world(40 * MIB).start(program=PROGRAM)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.PLATFORM)
    said = agent.stderr.read_text()
    assert "the job's files take 76 MB, and memory that is there has 67 MB" in said
    assert "another offer or more GPUs" in said
    assert 'workspace = "disk" in [policy]' in said
    assert "hardened" not in agent.states()


def test_by_the_owners_word_it_lies_on_the_disk_and_the_receipt_says_so(world: Callable[..., World]) -> None:
    agent = world(40 * MIB, broken=Broken(disk=True)).start(program=PROGRAM)
    verdict = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert "files lie on tmpfs" not in agent.log()
    assert f"with {40 * MIB + len(CANARY)}" in agent.log()
    assert details(agent)["workspace"] == "was-on-a-disk"
    assert {probe.probe: probe.result.value for probe in verdict.chain.receipt.zeroization}[
        "workspace"
    ] == "unverifiable"
    assert verdict.facts["files"] == "the worker's lay on the machine's disk, as the owner allowed"
    assert not list(Path("/tmp").glob(f"glasshouse-ws-{agent.process.pid}-*"))
