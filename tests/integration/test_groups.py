"""Groups on several machines with real agents and a real broker: what is released, what is refused, and who is told."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import glasshouse
from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.verify.run_files import check_group
from glasshouse.providers.place.local import LocalPlace
from tools.runtime_world import AgentProcess, Broken, World, ended, verified

pytestmark = pytest.mark.slow
QUICK = "print('trained')"
PATCHED = """
import sys
# Behind the first site directory, before what that adds: in front of it the measurement is refused.
sys.path.insert(1 + next(n for n, path in enumerate(sys.path) if path.endswith("-packages")), {folder!r})
from glasshouse.runtime.__main__ import main
sys.exit(main(sys.argv[1:], sys.stdin.buffer))
"""


@pytest.fixture
def world(script_worlds: Callable[..., World]) -> Callable[[], World]:
    return lambda: script_worlds(QUICK, {}, broken=Broken(budget=4, egress=("group",)))


def among(machines: int) -> tuple[str, ...]:
    """The options of an agent on one of so many machines."""
    return ("--ranks", "1", "--peers", ",".join(LocalPlace().addresses(machines)))


def place(here: World, machines: int, *, program: dict[int, tuple[str, ...]] | None = None) -> list[AgentProcess]:
    """Start an agent for each machine of a new group."""
    agents, options = [], among(machines)
    for group in here.group(machines):
        launch = here.launch(group=group)
        run = (program or {}).get(group.machine, ("-m", "glasshouse.runtime"))
        agents.append(here.start(launch, options=options, program=run))
    return agents


def test_every_machine_is_released_to_once_all_have_attested(world: Callable[[], World]) -> None:
    here = world()
    (first, second), options = here.group(2), among(2)
    waiting = here.start(here.launch(group=first), options=options)
    waiting.wait_for_state("measured")
    client = here.broker.client()
    waiting.wait_for(lambda: client.group(first.id)["accepted"] == 1)
    assert "attested" not in waiting.states(), "it waits for the other machine"
    assert client.deployment(here.deployment)["releases"] == 0
    late = here.start(here.launch(group=second), options=options)
    for agent in (waiting, late):
        agent.wait_for(lambda agent=agent: "attested" in agent.states() or agent.process.poll() is not None)
    for agent in (waiting, late):
        agent.wait()
        assert "attested" in agent.states(), agent.stderr.read_text()
    assert client.group(first.id)["state"] == "released"
    assert client.deployment(here.deployment)["releases"] == 2
    verdicts = [verified(agent) for agent in (waiting, late)]
    assert check_group([verdict.chain for verdict in verdicts]) == first
    assert all(verdict.chain.ear is not None for verdict in verdicts)


def test_a_machine_with_another_runtime_ends_the_job_on_all_of_them(world: Callable[[], World], tmp_path: Path) -> None:
    here = world()
    own = tmp_path / "patched"
    shutil.copytree(Path(glasshouse.__file__).parent, own / "glasshouse", ignore=shutil.ignore_patterns("__pycache__"))
    with (own / "glasshouse" / "runtime" / "run" / "probes.py").open("a") as source:
        source.write("# and so much for looking into memory\n")
    good, patched = place(here, 2, program={1: ("-c", PATCHED.format(folder=str(own)))})
    refused = ended(patched, exit_code=ExitCode.REFUSED, outcome="refused", code=Code.MEASUREMENT_UNKNOWN)
    others = ended(good, exit_code=ExitCode.REFUSED, outcome="refused", code=Code.RANK_REFUSED)
    assert refused.chain.ear is None
    assert others.chain.ear is None
    assert here.broker.client().deployment(here.deployment)["releases"] == 0


def test_a_machine_that_ends_before_it_attests_is_not_waited_for(world: Callable[[], World]) -> None:
    """Its owner sees it end, and tells the gate: nobody waits for the deadline."""
    here = world()
    first, _second = here.group(2)
    waiting = here.start(here.launch(group=first), options=among(2))
    client = here.broker.client()
    waiting.wait_for(lambda: client.group(first.id)["accepted"] == 1)
    client.refuse_group(first.id, machine=1, code=Code.HARDENING_MISSING)
    ended(waiting, exit_code=ExitCode.REFUSED, outcome="refused", code=Code.RANK_REFUSED)


def test_a_machine_that_waits_can_be_stopped(world: Callable[[], World]) -> None:
    here = world()
    first, _second = here.group(2)
    waiting = here.start(here.launch(group=first), options=among(2))
    client = here.broker.client()
    waiting.wait_for(lambda: client.group(first.id)["accepted"] == 1)
    waiting.process.terminate()
    ended(waiting, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)


def test_the_package_is_revoked_while_a_machine_waits(world: Callable[[], World]) -> None:
    here = world()
    first, _second = here.group(2)
    waiting = here.start(here.launch(group=first), options=among(2))
    client = here.broker.client()
    waiting.wait_for(lambda: client.group(first.id)["accepted"] == 1)
    client.revoke(here.package.manifest.package_id)
    ended(waiting, exit_code=ExitCode.REFUSED, outcome="refused", code=Code.PACKAGE_REVOKED)
