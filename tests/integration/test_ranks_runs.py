"""Protected runs in several ranks: a script of torchrun over `sealed`, how such a run ends, and what stays inside."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.wire.states import State
from tools.machine import needs_landlock, needs_namespaces, needs_tracing
from tools.runtime_world import CANARY, AgentProcess, World, ended
from tools.sandboxed import is_gone
from tools.scanner import family, scan
from tools.tracer import Tracer
from tools.waiting import wait_for

pytestmark = [needs_namespaces, needs_landlock]

PATIENTS = CANARY + os.urandom(1 << 20) + CANARY
PROGRAM = Path(__file__).parents[1] / "tools" / "agent_without_network.py"

WITHOUT = (
    f"import runpy, sys; sys.path.append({str(PROGRAM.parents[1])!r}); "
    f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
)

# As the tutorial of DistributedDataParallel has it; before that, each rank tries whom it reaches.
TRAIN = """
import hashlib, os, pathlib, socket
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def tried(address):
    try:
        socket.create_connection(address, timeout=2)
        return "reached"
    except OSError as error:
        return type(error).__name__
print("outside:", tried(("127.0.0.1", OUTSIDE)))
print("siblings:", tried((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))))
print("metadata:", tried(("169.254.169.254", 80)))
print("name:", tried(("example.com", 443)))

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
before = model.module[0].weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.frombuffer(bytearray(pathlib.Path("patients.csv").read_bytes()[:65536]), dtype=torch.uint8)
rows = rows.view(-1, 16).float()[rank::world] / 255
for step in range(4):
    optimizer.zero_grad()
    loss = model(rows[step * 32 : step * 32 + 32]).square().mean()
    loss.backward()
    optimizer.step()
assert not torch.equal(before, model.module[0].weight)
digest = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in model.parameters())).hexdigest()
every = [None] * world
dist.all_gather_object(every, digest)
assert "memfd:glasshouse-frames" in pathlib.Path("/proc/self/maps").read_text(), "frames go over the loopback"
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path(f"outputs/digest-{rank}.txt").write_text(digest + str(len(set(every))))
print(f"rank {rank} of {world} ends", flush=True)
dist.destroy_process_group()
"""

# Ranks that are at work: the second of them can be killed, or looked at.
LONG = """
import os, pathlib, time
from glasshouse import task
from glasshouse.collectives.secret import group_secret
held = bytes(group_secret())
data = pathlib.Path("patients.csv").read_bytes()
task.current().progress(0, 2, loss=1.0)
print("rank", os.environ["RANK"], "is at work", flush=True)
for _ in range(1200):
    time.sleep(0.05)
"""


@pytest.fixture
def world(script_worlds: Callable[..., World]) -> Callable[..., World]:
    def make(script: str, **options: Any) -> World:
        return script_worlds(script, {"patients.csv": PATIENTS}, **options)

    return make


def evidence(agent: AgentProcess) -> dict[str, Any]:
    """Return the hardening report of the run's evidence, as the owner finds it in the receipt."""
    found = re.search(r'"hardening":(\{.*?\}),"hpke_public"', _payloads(json.loads(agent.receipt())))
    assert found is not None
    report: dict[str, Any] = json.loads(found[1])
    return report


def _payloads(value: Any) -> str:
    """Return every signed payload in a bundle as text."""
    import base64

    if isinstance(value, dict):
        own = base64.b64decode(value["payload"]).decode() if "payload" in value else ""
        return own + "".join(_payloads(item) for item in value.values())
    return "".join(map(_payloads, value)) if isinstance(value, list) else ""


def ranks_of(agent: AgentProcess, count: int) -> list[int]:
    """Wait for the ranks of a run to be at work, and return their numbers on this machine."""
    agent.wait_for(lambda: len(_ranks(agent)) == count, within_s=60)
    agent.wait_for(lambda: any(event["type"] == "progress" for event in agent.events()), within_s=60)
    return _ranks(agent)


def _ranks(agent: AgentProcess) -> list[int]:
    found = []
    for pid in family([agent.process.pid]):
        try:
            if b"glasshouse.workloads.distributed.rank " in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def wait_until_gone(pids: list[int]) -> None:
    wait_for(lambda: all(map(is_gone, pids)), told=lambda: str(pids))


# a run that works


@pytest.mark.smoke
def test_two_ranks_train_over_sealed_reach_nothing_outside_and_the_receipt_holds(world: Callable[..., World]) -> None:
    """Outside is a listener of this very test, which would answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        agent = world(TRAIN.replace("OUTSIDE", str(listener.getsockname()[1]))).start(ranks=2)
        agent.wait(within_s=120)
        verdict = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert verdict.exit_code == ExitCode.DONE
    assert agent.states() == [state.value for state in State]
    outputs = agent.outputs()
    assert sorted(outputs) == ["digest-0.txt", "digest-1.txt"]
    assert outputs["digest-0.txt"] == outputs["digest-1.txt"]
    assert outputs["digest-0.txt"].endswith(b"1"), "one digest on all ranks"
    lines = agent.log().splitlines()
    assert {"rank 0 of 2 ends", "rank 1 of 2 ends"} <= set(lines)
    assert lines.count("outside: ConnectionRefusedError") == 2
    assert lines.count("siblings: reached") == 2
    assert lines.count("metadata: OSError") == 2  # no route
    assert lines.count("name: gaierror") == 2
    assert {probe.result.value for probe in verdict.chain.receipt.zeroization} == {"clean"}
    report = evidence(agent)
    assert (report["worker"]["egress-closed"], report["details"]["loopback"]) == ("passed", 1)


def test_a_run_in_one_process_says_that_it_has_no_network_at_all(world: Callable[..., World]) -> None:
    script = """
import socket
try:
    socket.socket()
except OSError as error:
    print(error)
"""
    agent = world(script).start()
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert "Address family not supported" in agent.log()
    assert "loopback" not in evidence(agent)["details"]


# what stays inside


def test_the_group_secret_is_in_worker_and_ranks_and_nowhere_else(world: Callable[..., World]) -> None:
    here = world(LONG)
    launch = here.launch(ranks=2)
    group = launch.claims().group
    assert group is not None
    secret = group.secret(here.package.key)
    agent = here.start(launch, options=("--ranks", "2"))
    ranks = ranks_of(agent, 2)
    worker = agent.worker_pid()
    files = [agent.out, agent.stderr, here.package.path]
    report = scan({"group secret": secret, "package key": here.package.key}, pids=[agent.process.pid], folders=files)
    holders = {int(hit.where.split()[1]) for hit in report.of("group secret") if hit.where.startswith("process")}
    assert set(ranks) <= holders <= {worker, *ranks}
    assert not [hit for hit in report.hits if not hit.where.startswith("process")]
    assert not report.of("package key")
    for pid in family([agent.process.pid]):
        words = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert secret not in words
        assert secret.hex().encode() not in words
    agent.process.terminate()
    ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
    wait_until_gone([worker, *ranks])
    assert scan({"group secret": secret}, folders=files).hits == set()


@needs_tracing
@pytest.mark.parametrize("stopping", [True, False], ids=["debugger", "strace"])
def test_a_tracer_on_one_rank_ends_the_run(world: Callable[..., World], stopping: bool) -> None:
    agent = world(LONG).start(ranks=2)
    ranks = ranks_of(agent, 2)
    tracer = Tracer(ranks[1], stopping=stopping)
    agent.wait_for((agent.out / "receipt.json").exists)
    tracer.close()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DEBUGGER)
    wait_until_gone(ranks)


# how it ends otherwise


def test_a_rank_that_fails_ends_all_and_the_log_says_which(world: Callable[..., World]) -> None:
    script = f"""
import os, time
if os.environ["RANK"] == "1":
    raise ValueError({CANARY.decode()!r})
time.sleep(60)
"""
    agent = world(script).start(ranks=2)
    agent.wait(within_s=120)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.SCRIPT_FAILED)
    assert f"ValueError: {CANARY.decode()}" in agent.log()
    assert "rank 1 failed, which ends all 2 ranks" in agent.log()


def test_a_rank_that_is_killed_from_outside_ends_all(world: Callable[..., World]) -> None:
    agent = world(LONG).start(ranks=3)
    ranks = ranks_of(agent, 3)
    os.kill(ranks[1], signal.SIGKILL)
    agent.wait(within_s=60)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.RANK_LOST)
    assert re.search(r"rank \d was ended by SIGKILL, which ends all 3 ranks", agent.log())
    wait_until_gone(ranks)


def test_a_collective_that_fails_gives_the_run_its_reason(world: Callable[..., World]) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("sealed")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(50))
else:
    dist.broadcast(torch.ones(50), src=1)
"""
    agent = world(script).start(ranks=2)
    agent.wait(within_s=120)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.COLLECTIVE_MISMATCH)
    assert "collective-mismatch" in agent.log()


def test_a_worker_killed_from_outside_takes_its_ranks_along(world: Callable[..., World]) -> None:
    agent = world(LONG).start(ranks=2)
    ranks = ranks_of(agent, 2)
    os.kill(agent.worker_pid(), signal.SIGKILL)
    agent.wait(within_s=60)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.WORKER_KILLED)
    wait_until_gone(ranks)


def test_a_rank_that_will_not_stop_is_killed_with_the_others(world: Callable[..., World]) -> None:
    stubborn = LONG.replace("    time.sleep(0.05)", "    try: time.sleep(0.05)\n    except BaseException: pass")
    agent = world(stubborn).start(ranks=2)
    ranks = ranks_of(agent, 2)
    agent.process.send_signal(signal.SIGTERM)
    agent.wait(within_s=60)
    ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
    wait_until_gone(ranks)


# what is refused before it begins


@pytest.mark.parametrize(("launched", "started"), [(2, 3), (2, None), (None, 2)])
def test_a_launch_for_other_ranks_than_the_runtime_was_started_for(
    world: Callable[..., World], launched: int | None, started: int | None
) -> None:
    here = world("print('ran')")
    options = () if started is None else ("--ranks", str(started))
    agent = here.start(here.launch(ranks=launched), options=options)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.USAGE)
    assert "measured" not in agent.states()


def test_a_machine_that_gives_no_network_namespace_has_ranks_without_a_network(world: Callable[..., World]) -> None:
    """What a container's ranks do in full is in `test_ranks_confined`."""
    script = """
import socket, torch, torch.distributed as dist
dist.init_process_group("sealed")
one = torch.ones(3)
dist.all_reduce(one)
print("sum", one.tolist())
try:
    socket.socket()
except OSError as error:
    print(error)
"""
    agent = world(script).start(ranks=2, program=("-c", WITHOUT))
    agent.wait(within_s=120)
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert agent.log().count("sum [2.0, 2.0, 2.0]") == 2
    assert agent.log().count("Address family not supported") == 2
    report = evidence(agent)
    assert report["worker"]["egress-closed"] == "passed"
    assert (report["details"]["no-network-namespace"], "loopback" in report["details"]) == (1, False)
