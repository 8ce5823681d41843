"""Ranks of a line save together and go on together: on one machine, and on two whose agents do not know each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import ExitCode
from glasshouse.evidence.receipt import Receipt
from tools.line_world import LineWorld, checkpoints
from tools.machine import needs_landlock, needs_namespaces
from tools.runtime_world import AgentProcess, Broken, ended

pytestmark = [needs_namespaces, needs_landlock]

# Each rank counts for itself.
COUNT = """
import os, pathlib
from glasshouse import task
here, rank = task.current(), os.environ["RANK"]
state = pathlib.Path("state", rank)
begun = 0 if here.resume is None else int(state.read_text())
print(f"rank {rank} begun at {begun}", flush=True)
state.parent.mkdir(exist_ok=True)
for step in range(begun + 1, begun + 3):
    state.write_text(str(step))
    assert here.save_checkpoint(state, step=step, wait=True)
    here.progress(step)
"""


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Callable[..., LineWorld]]:
    with ExitStack() as open_:

        def make(**broken: Any) -> LineWorld:
            made = LineWorld(tmp_path, COUNT, broken=Broken(max_legs=9, **broken))
            open_.callback(made.close)
            return made

        yield make


def completed(agent: AgentProcess) -> Receipt:
    agent.wait(within_s=180)
    return ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None).chain.receipt


def last_of(receipt: Receipt) -> int:
    assert receipt.line is not None
    assert receipt.line.last is not None
    return receipt.line.last.seq


def test_two_ranks_of_a_machine(line: Callable[..., LineWorld]) -> None:
    world = line()
    first = world.start(ranks=2)
    assert last_of(completed(first)) == 2
    assert [(one["seq"], one["step"]) for one in checkpoints(first)] == [(1, 1), (2, 2)], first.log()
    second = world.start(ranks=2)
    assert last_of(completed(second)) == 4
    for rank in range(2):
        assert f"rank {rank} begun at 2" in second.log()


def test_a_rank_on_each_of_two_machines(line: Callable[..., LineWorld]) -> None:
    world = line(egress=("group",), budget=2)
    first = world.start_machines(2)
    receipts = [completed(agent) for agent in first]
    assert last_of(receipts[0]) == 2
    assert [checkpoints(agent) != [] for agent in first] == [True, False], "machine 0 has them counted"
    second = world.start_machines(2)
    receipts = [completed(agent) for agent in second]
    assert last_of(receipts[0]) == 4
    for rank, agent in enumerate(second):
        assert f"rank {rank} begun at 2" in agent.log()
