"""A training that goes on elsewhere: real processes, gate and store, and what goes wrong between them."""

from __future__ import annotations

import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.evidence.receipt import Receipt
from glasshouse.wire.lines.checkpoint import resume_key
from glasshouse.wire.lines.statements import COUNT_PATH, HEADER_PATH, PART_PATH
from tools.agent_of_lines import ENVIRONMENT, content_key
from tools.line_world import LineWorld, checkpoints, notices
from tools.runtime_proxy import Proxy, Reply
from tools.runtime_world import AgentProcess, Broken, ended
from tools.scanner import scan

CANARY = b"canary-" + secrets.token_hex(24).encode()
# Counts to where it is told to, saves after each step, and prints where it began.
TRAIN = """
import pathlib, sys
from glasshouse import task
here = task.current()
state = pathlib.Path("state/count")
begun = 0 if here.resume is None else int(here.resume.path.joinpath("count").read_text())
print(f"begun at {begun}", flush=True)
state.parent.mkdir(exist_ok=True)
for step in range(begun + 1, begun + STEPS + 1):
    state.write_text(str(step))
    print(step, here.save_checkpoint("state", step=step, wait=True), flush=True)
    here.progress(step)
WAIT
here.save_bytes("count.txt", state.read_bytes())
"""
FOREVER = """
import time
while True:
    time.sleep(0.05)
"""


def script(*, steps: int, then: str = "") -> str:
    return TRAIN.replace("STEPS", str(steps)).replace("WAIT", then)


Make = Callable[..., LineWorld]


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as open_:

        def make(text: str, **options: Any) -> LineWorld:
            made = LineWorld(tmp_path, text, **options)
            open_.callback(made.close)
            return made

        yield make


def completed(agent: AgentProcess) -> Receipt:
    return ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None).chain.receipt


def test_a_second_machine_goes_on_where_the_first_one_ended_and_a_third_from_before(
    line: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = line(script(steps=3))
    first = world.start()
    receipt = completed(first)
    assert [(one["seq"], one["step"]) for one in checkpoints(first)] == [(1, 1), (2, 2), (3, 3)], first.log()
    assert receipt.line is not None
    assert receipt.line.last is not None
    assert (receipt.line.leg, receipt.line.seq, receipt.line.last.seq, receipt.line.last.step) == (1, 0, 3, 3)
    view = world.view()
    assert (view.leg, view.over, view.head, view.head_step) == (1, "receipt", receipt.line.last.digest, 3)
    assert not (first.out / "checkpoints").exists()
    monkeypatch.setenv(ENVIRONMENT, "another torch")
    second = world.start()
    receipt = completed(second)
    assert "begun at 3" in second.log()
    assert "environment-changed" in notices(second)
    assert second.outputs() == {"count.txt": b"6"}
    assert receipt.line is not None
    assert (receipt.line.leg, receipt.line.seq, receipt.line.checkpoint) == (2, 3, view.head)
    assert receipt.line.last is not None
    assert receipt.line.last.seq == 6
    third = world.start(world.rewound(5, bytes.fromhex(checkpoints(second)[-2]["digest"])))
    receipt = completed(third)
    assert "begun at 5" in third.log()
    assert [(one["seq"], one["step"]) for one in checkpoints(third)] == [(7, 6), (8, 7), (9, 8)], "none is given twice"
    assert receipt.line is not None
    assert (receipt.line.rewind, receipt.line.counted) == (True, 6)
    assert "environment-changed" not in notices(third)


def test_a_gate_that_crashes_within_a_checkpoint_counts_it_when_it_is_back(line: Make) -> None:
    world = line(script(steps=3, then="").replace("here.progress(step)", "import time; time.sleep(0.3)"))
    agent = world.start()
    agent.wait_for(lambda: checkpoints(agent))
    world.restart_gate()
    receipt = completed(agent)
    assert [one["seq"] for one in checkpoints(agent)] == [1, 2, 3]
    assert receipt.line is not None
    assert world.view().head == (receipt.line.last and receipt.line.last.digest)


def test_a_job_with_checkpoints_is_not_begun_without_a_line(line: Make) -> None:
    world = line(script(steps=1))
    agent = world.world.start(world.world.launch())
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.RELEASE_INVALID)


def test_on_a_bad_way_parts_and_tickets_are_asked_for_again_and_each_is_counted_once(
    line: Make, tmp_path: Path
) -> None:
    world, asked = line(script(steps=2)), Counter[str]()

    def act(path: str, _body: bytes, ask: Callable[[], Reply]) -> Reply | None:
        asked[path] += 1
        if path == PART_PATH and asked[path] < 3:
            return None  # the link is down
        answer = ask()
        if path == COUNT_PATH and asked[path] == 1:
            return None  # the answer is lost
        return (200, b"{}") if path == HEADER_PATH and asked[path] == 1 else answer

    proxy = Proxy(tmp_path / "proxy", world.world.broker.runtime_url, act)
    agent = world.start(world.launch(broker_url=proxy.url))
    receipt = completed(agent)
    proxy.close()
    assert [(one["seq"], one["step"]) for one in checkpoints(agent)] == [(1, 1), (2, 2)]
    assert receipt.line is not None
    assert world.view().head == (receipt.line.last and receipt.line.last.digest)
    assert asked == Counter({**asked, PART_PATH: 4, HEADER_PATH: 3, COUNT_PATH: 3})
    assert {"broker-unreachable", "broker-untrusted"} <= set(notices(agent))


def test_training_goes_on_where_the_gate_refuses_a_checkpoint_and_where_it_comes_back(
    line: Make, tmp_path: Path
) -> None:
    world, asked = line(script(steps=3)), Counter[str]()

    def act(path: str, _body: bytes, ask: Callable[[], Reply]) -> Reply | None:
        asked[path] += 1
        full = path == PART_PATH and asked[path] == 1
        return (413, b'{"code":"owner-quota"}') if full else ask()

    proxy = Proxy(tmp_path / "proxy", world.world.broker.runtime_url, act)
    agent = world.start(world.launch(broker_url=proxy.url))
    completed(agent)
    proxy.close()
    assert [(one["seq"], one["step"]) for one in checkpoints(agent)] == [(1, 2), (2, 3)]
    assert {"owner-quota", "checkpoint-given-up"} <= set(notices(agent))


def test_a_leg_after_which_another_was_released_ends_and_counts_nothing_more(line: Make) -> None:
    world = line(script(steps=1, then=FOREVER), broken=Broken(max_legs=9, lease_s=15))
    first = world.start()
    first.wait_for(lambda: checkpoints(first))
    assert world.lost().over == "lost"
    second = world.start()
    second.wait_for_state("running")
    verdict = ended(first, exit_code=ExitCode.REFUSED, outcome="superseded", code=Code.LINE_SUPERSEDED)
    assert verdict.chain.receipt.line is not None
    assert verdict.chain.countersignature is not None, "its end is on record all the same"
    second.wait_for(lambda: [one["seq"] for one in checkpoints(second)] == [2])
    second.process.terminate()
    ended(second, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)


LAST = """
import time
try:
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    state.write_text("99")
    print(here.save_checkpoint("state", step=99, wait=True), flush=True)
"""


def test_a_job_that_is_stopped_saves_once_more_and_a_store_that_changed_it_opens_nothing(line: Make) -> None:
    world = line(script(steps=1, then=LAST))
    first = world.start()
    first.wait_for(lambda: checkpoints(first))
    first.process.terminate()
    verdict = ended(first, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
    last = verdict.chain.receipt.line
    assert last is not None
    assert last.last is not None
    assert (last.last.seq, last.last.step) == (2, 99), first.log()

    (part,) = (path for path in world.store.rglob("*") if re.fullmatch(r"1-2-0-[0-9]+-[0-9a-f]{64}", path.name))
    honest = part.read_bytes()
    part.write_bytes(honest[:-20] + bytes([honest[-20] ^ 1]) + honest[-19:])
    damaged = world.start()
    ended(damaged, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.CHECKPOINT_TAMPERED)
    assert "opened" not in damaged.states()

    part.unlink()
    lacking = world.start()
    ended(lacking, exit_code=ExitCode.REFUSED, outcome="refused", code=Code.CHECKPOINT_INCOMPLETE)

    part.write_bytes(honest)
    fourth = world.start()
    fourth.wait_for(lambda: checkpoints(fourth))
    assert [(one["seq"], one["step"]) for one in checkpoints(fourth)] == [(3, 100)]
    fourth.process.terminate()
    assert fourth.wait() == ExitCode.INTERRUPTED
    assert "begun at 99" in fourth.log()


def test_what_a_job_had_saved_when_it_failed_is_counted(line: Make, tmp_path: Path) -> None:
    # A moment later, while the gate is still asked: what a job saves in the moment in which it fails may be lost.
    then = 'import time; raise ValueError("a card fell off the bus")'
    world = line(script(steps=1, then=then))
    asked = Counter[str]()

    def act(path: str, _body: bytes, ask: Callable[[], Reply]) -> Reply | None:
        asked[path] += 1
        return None if path == COUNT_PATH and asked[path] < 3 else ask()

    proxy = Proxy(tmp_path / "proxy", world.world.broker.runtime_url, act)
    agent = world.start(world.launch(broker_url=proxy.url))
    agent.wait_for(lambda: "observed-again" in notices(agent))
    agent.process.send_signal(signal.SIGSTOP)  # so that it finds all that the job did at once, and its failure
    time.sleep(1)
    agent.process.send_signal(signal.SIGCONT)
    verdict = ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.SCRIPT_FAILED)
    proxy.close()
    assert verdict.chain.receipt.line is not None
    assert verdict.chain.receipt.line.last is not None
    assert world.view().head == verdict.chain.receipt.line.last.digest
    assert "checkpoint-awaited" in notices(agent)


HOLDING = """
import time
pathlib.Path("state/secret").write_text(pathlib.Path("secret.txt").read_text())
here.save_checkpoint("state", step=9, wait=True)
time.sleep(12)  # while it is searched
"""


def test_no_content_key_and_nothing_of_a_checkpoint_is_left_where_it_was_sealed(line: Make) -> None:
    world = line(script(steps=1, then=HOLDING), files={"secret.txt": CANARY})
    agent = world.start()
    agent.wait_for(lambda: len(checkpoints(agent)) == 2)
    assert world.line is not None
    package = world.world.package
    key = resume_key(package.key, deployment=world.world.deployment, line=world.line).private()
    secret = {
        "content key": content_key(0),
        "another content key": content_key(1),
        "resume key": key[:64],
        "resume key's second half": key[64:],
        "plaintext": CANARY,
    }
    worker, folders = agent.worker_pid(), [agent.out, agent.stderr, world.store]
    while_it_trains = scan(secret, pids=[agent.process.pid], folders=folders)
    assert {hit.needle for hit in while_it_trains.hits} == {"plaintext"}
    assert {hit.where.split()[1] for hit in while_it_trains.hits} == {str(worker)}
    completed(agent)
    assert scan(secret, folders=folders).hits == set()
